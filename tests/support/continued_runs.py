"""Runs that go on from another tool's checkpoint, or that transformers continues from ours, on one or several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

import stepmark

ROOT = Path(__file__).resolve().parents[2]
BATCH = 4  # samples of a step, over all ranks
SETTINGS: dict[str, Any] = {
    "logging_steps": 1,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "report_to": [],
    "disable_tqdm": True,
}
TWENTY: dict[str, Any] = {"max_steps": 20, "save_steps": 10, "learning_rate": 1e-2}


def samples(vocabulary: int = 64) -> list[dict[str, torch.Tensor]]:
    """Their first token has no label: transformers divides a causal model's loss by all labels, shifted out or not."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, vocabulary, (16,), generator=generator) for _ in range(24)]
    return [{"input_ids": t, "labels": torch.cat([torch.tensor([-100]), t[1:]])} for t in tokens]


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([item[key] for item in batch]) for key in batch[0]}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "llama":
        config: Any = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
        )
        return transformers.BertForMaskedLM(config)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, **no_dropout
    )
    return transformers.GPT2LMHeadModel(config)


def in_order(trainer: Any) -> Any:
    """Batches of the data in its own order, which two tools have in common; the ranks take them in turn."""
    size = trainer.args.per_device_train_batch_size
    return DataLoader(trainer.train_dataset, batch_size=size, collate_fn=collate)


class Ours(stepmark.Trainer):
    def get_train_dataloader(self) -> Any:
        return in_order(self)


class Theirs(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(in_order(self))


def theirs(kind: str, folder: str, resume: str | None = None) -> None:
    """Twenty steps of transformers' own Trainer. It multiplies a loss by the number of ranks for an average over
    all ranks' labels, which BERT does not make: there without it."""
    size = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=size,
        average_tokens_across_devices=kind != "bert",
        **SETTINGS,
        **TWENTY,
    )
    trainer = Theirs(model_of(kind), arguments, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


def run_theirs(nproc: int, *arguments: str | None) -> None:
    """Calls `theirs` in processes without torch_xla, which it would train on."""
    program = Path(str(arguments[1]) + ".py")
    program.write_text(
        "import sys; sys.modules['torch_xla'] = None\n"
        f"from tests.support.continued_runs import theirs\ntheirs(*{arguments!r})\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, *launcher, str(program)], cwd=ROOT, env=environment, check=True, timeout=600)


def continued(model: Any, folder: Path, data: list[Any], **settings: Any) -> list[float]:
    """The losses that a run logs which resumes from the newest checkpoint in the folder, from other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    size = BATCH // (int(os.environ.get("WORLD_SIZE", "1")) // settings.get("tensor_parallel_size", 1))
    given = {"per_device_train_batch_size": size, **SETTINGS, **settings}
    arguments = stepmark.TrainingArguments(str(folder), device="cpu", **given)
    Ours(model, arguments, train_dataset=data).train(resume_from_checkpoint=True)
    return logged(folder)


def logged(folder: Path) -> list[float]:
    """The losses in a run's log."""
    logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [log["loss"] for log in logs if "loss" in log]


def continued_kind(kind: str, folder: str) -> list[float]:
    """Steps 11 to 20 of a run, in a rank."""
    return continued(model_of(kind), Path(folder), samples(), **TWENTY)


def continued_llama(config: dict[str, Any], folder: str, settings: dict[str, Any]) -> list[float]:
    """Steps of a Llama, in a rank."""
    made: Any = transformers.LlamaConfig(**config)
    return continued(transformers.LlamaForCausalLM(made), Path(folder), samples(), **settings)


def twenty(kind: str, folder: str) -> list[float]:
    """Twenty steps of ours, in a rank."""
    size = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = stepmark.TrainingArguments(folder, device="cpu", per_device_train_batch_size=size, **SETTINGS, **TWENTY)
    Ours(model_of(kind), arguments, train_dataset=samples()).train()
    return logged(Path(folder))
