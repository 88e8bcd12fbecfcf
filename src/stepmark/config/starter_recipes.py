"""Commented recipes to begin with, as `stepmark init` writes them."""

from __future__ import annotations

from stepmark.config.recipe import all_fields

WIDTH = 58  # of a field with its value, after which its comment begins

SCRATCH = """\
# A new model, trained from scratch
{output_dir: runs/first}
{config_name: gpt2}
{config_overrides: {n_layer: 4, n_embd: 256, n_head: 4}}
{tokenizer_name: bytes}

# The texts
{dataset_name: python-stdlib}
# train_file: corpus.txt                        # or your own: a file, a folder, a pattern, or a list of them
{block_size: 256}
{max_eval_samples: 200}

# How long, and how fast
{max_steps: 1000}
{per_device_train_batch_size: 8}
{learning_rate: 1e-3}
{lr_scheduler_type: cosine}
{warmup_steps: 50}
"""
MODEL = """\
# A model whose training continues
{output_dir: runs/continued}
{model_name_or_path: path/to/a/model}

# The texts
{train_file: corpus.txt}
# text_column: body                             # of .jsonl, .csv and .parquet files, unless it is called text
{block_size: 512}

# How long, and how fast
{num_train_epochs: 1}
{per_device_train_batch_size: 4}
{gradient_accumulation_steps: 4}
{learning_rate: 2e-5}
{lr_scheduler_type: cosine}
{warmup_ratio: 0.05}
"""
CHAT = """\
# A chat model that is fine-tuned, by an adapter
{output_dir: runs/chat}
{model_name_or_path: path/to/a/chat-model}
{peft: lora}
{lora_r: 16}
{lora_alpha: 32}

# The conversations
{train_file: chats.jsonl}
{messages_column: messages}
{assistant_only_loss: true}
{packing: true}
{block_size: 1024}

# How long, and how fast
{num_train_epochs: 2}
{per_device_train_batch_size: 2}
{gradient_accumulation_steps: 8}
{learning_rate: 2e-4}
{lr_scheduler_type: cosine}
{warmup_ratio: 0.05}
"""
COMMON = """
# Logs, evaluations and checkpoints
{logging_steps: 10}
{eval_strategy: steps}
{eval_steps: 100}
{save_steps: 100}
{save_total_limit: 3}
{resume_from_checkpoint: true}

# Memory, once it does not fit or should be faster
# bf16: true                                    # bfloat16 autocast
# gradient_checkpointing: true
# zero_1: true                                  # with several ranks: stepmark train RECIPE --nproc N
"""
KINDS = {"scratch": SCRATCH, "model": MODEL, "chat": CHAT}


def starter_recipe(kind: str, schema: str) -> str:
    """The text of a recipe of one of KINDS; its first line names the file of the JSON schema for editors."""
    lines = [f"# yaml-language-server: $schema={schema}"]
    for line in (KINDS[kind] + COMMON).splitlines():
        field, _, comment = line.partition("  # ")
        if line.startswith("{"):
            lines.append(_commented(line[1:-1]))
        else:
            lines.append(f"{field.rstrip():<{WIDTH}}# {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _commented(field: str) -> str:
    return f"{field:<{WIDTH}}# {all_fields()[field.split(':', 1)[0]].help.text}"
