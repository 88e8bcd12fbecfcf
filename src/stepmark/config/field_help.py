"""A line and an example for every recipe field, in groups: for `--help`, the recipes of `init`, and editors."""

from __future__ import annotations

from typing import NamedTuple

from stepmark.config.reduce_dtypes import REDUCE_DTYPES


class FieldHelp(NamedTuple):
    """What a field does, and a value for it as in a recipe."""

    text: str
    example: str


FIELD_HELP: dict[str, dict[str, FieldHelp]] = {
    "model": {
        "model_name_or_path": FieldHelp(
            "train this model's weights further: a folder, or a name of the hub", "runs/first"
        ),
        "config_name": FieldHelp("train a new model of this type, or of a folder's config.json", "gpt2"),
        "config_overrides": FieldHelp("sizes of the new model", "{n_layer: 4, n_embd: 256}"),
        "tokenizer_name": FieldHelp("a tokenizer's folder or hub name, or bytes (built in)", "bytes"),
        "chat_template_path": FieldHelp("a file with a chat template; unset: the tokenizer's own", "chat.jinja"),
        "trust_remote_code": FieldHelp("execute Python code that comes with the model or tokenizer", "true"),
        "peft": FieldHelp("lora: train an adapter, and leave the model's weights as they are", "lora"),
        "lora_r": FieldHelp("rank of the adapter", "16"),
        "lora_alpha": FieldHelp("scale of the adapter, times lora_r", "32"),
        "lora_dropout": FieldHelp("dropout before the adapter", "0.05"),
        "lora_target_modules": FieldHelp("modules that get one: all-linear, or names", "[q_proj, v_proj]"),
    },
    "data": {
        "train_file": FieldHelp("texts to train on: a file, a folder, a pattern, or a list of them", '"data/*.jsonl"'),
        "dataset_mixture": FieldHelp(
            "several sources, each with its share of the samples",
            "[{train_file: a.txt, weight: 3}, {train_file: b/, weight: 1}]",
        ),
        "validation_file": FieldHelp("texts to evaluate on, in the same forms", "held_out.txt"),
        "dataset_name": FieldHelp("python-stdlib (built in), a folder of save_to_disk, or a hub name", "python-stdlib"),
        "dataset_config_name": FieldHelp("the dataset's configuration", "wikitext-2-raw-v1"),
        "text_column": FieldHelp("which column holds the texts", "body"),
        "messages_column": FieldHelp("train on conversations: which column holds their messages", "messages"),
        "assistant_only_loss": FieldHelp("of conversations, train on what the assistant says alone", "true"),
        "packing": FieldHelp("put several conversations into a block, none of which sees another", "true"),
        "block_size": FieldHelp("tokens in a sample; unset: 1024, or less if the model takes less", "512"),
        "validation_split_percentage": FieldHelp(
            "percent of the training texts to evaluate on, if none are given", "1"
        ),
        "max_train_samples": FieldHelp("train on the first so many samples", "1000"),
        "max_eval_samples": FieldHelp("evaluate on the first so many samples", "200"),
        "preprocessing_num_workers": FieldHelp("processes that tokenize", "8"),
        "overwrite_cache": FieldHelp("tokenize again, whatever is cached", "true"),
        "dataloader_num_workers": FieldHelp("processes that load batches; 0: the training process does", "2"),
        "remove_unused_columns": FieldHelp("of a Dataset in Python: leave out what the model does not take", "false"),
        "label_names": FieldHelp("which inputs are labels; unset: those that the model's class names", "[labels]"),
        "dataloader_drop_last": FieldHelp("leave out the last, smaller batch of an epoch", "true"),
        "train_sampling_strategy": FieldHelp(
            "order of the samples: random, sequential or group_by_length", "sequential"
        ),
        "length_column_name": FieldHelp("of a Dataset in Python: the column that holds lengths", "tokens"),
    },
    "length and batch": {
        "max_steps": FieldHelp("optimizer steps of the run; -1: num_train_epochs", "1000"),
        "num_train_epochs": FieldHelp("passes over the data, if max_steps is not given", "1"),
        "per_device_train_batch_size": FieldHelp("samples per device in one forward pass", "16"),
        "gradient_accumulation_steps": FieldHelp("forward passes per step", "4"),
        "per_device_eval_batch_size": FieldHelp("samples per device in evaluations", "16"),
    },
    "optimization": {
        "learning_rate": FieldHelp("the highest learning rate", "3e-4"),
        "lr_scheduler_type": FieldHelp("how it changes: linear, cosine, constant_with_warmup, …", "cosine"),
        "lr_scheduler_kwargs": FieldHelp("options of that schedule", "{num_cycles: 2}"),
        "warmup_steps": FieldHelp("steps until it is reached, or a fraction of the run below 1", "100"),
        "warmup_ratio": FieldHelp("the same as a fraction of the run", "0.1"),
        "optim": FieldHelp("adamw_torch, adamw_torch_fused, adamw_8bit, adafactor, muon or sgd", "adamw_torch"),
        "optim_args": FieldHelp("options of the optimizer", '"momentum=0.9"'),
        "weight_decay": FieldHelp("decoupled weight decay", "0.1"),
        "adam_beta1": FieldHelp("AdamW's decay of the first moment", "0.9"),
        "adam_beta2": FieldHelp("AdamW's decay of the second moment", "0.95"),
        "adam_epsilon": FieldHelp("AdamW's term against division by zero", "1e-6"),
        "max_grad_norm": FieldHelp("clip gradients to this L2 norm; 0: never", "0.5"),
        "stop_on_nan": FieldHelp("end the run after this many steps in a row that are not finite; 0: never", "10"),
        "label_smoothing_factor": FieldHelp("share of the target that all other tokens get", "0.1"),
        "neftune_noise_alpha": FieldHelp("noise on the input embeddings in training (NEFTune); unset: none", "5"),
        "seed": FieldHelp("of new weights, dropout and the order of samples", "1"),
        "data_seed": FieldHelp("of the order of samples; unset: seed", "2"),
    },
    "precision and memory": {
        "bf16": FieldHelp("bfloat16 autocast over float32 parameters", "true"),
        "fp16": FieldHelp("float16 autocast over float32 parameters, with a dynamic loss scale", "true"),
        "dtype": FieldHelp("the parameters' type: float32, or bfloat16 with fp32 master weights", "bfloat16"),
        "gradient_checkpointing": FieldHelp("compute activations again instead of keeping them", "true"),
        "gradient_checkpointing_kwargs": FieldHelp("options of torch.utils.checkpoint", "{use_reentrant: true}"),
    },
    "device and parallelism": {
        "device": FieldHelp("auto, xla, cuda, neuron or cpu", "cpu"),
        "zero_1": FieldHelp("shard optimizer states over the data parallel ranks", "true"),
        "reduce_dtype": FieldHelp("how data parallel ranks send gradients: bfloat16 for half the bytes", "bfloat16"),
        "ddp_bucket_cap_mb": FieldHelp("MiB of gradients that are sent at a time; unset: by the device", "8"),
        "tensor_parallel_size": FieldHelp("ranks that hold one replica of the model together", "4"),
        "sequence_parallel": FieldHelp("with tensor parallelism, shard activations along the sequence too", "true"),
        "parallelize_embedding": FieldHelp("with tensor parallelism, shard embedding, head and loss too", "false"),
        "pipeline_parallel_size": FieldHelp("ranks that divide the layers among them as stages", "2"),
        "pipeline_schedule": FieldHelp("order of the stages' passes: 1f1b, gpipe or interleaved", "interleaved"),
        "pipeline_layers": FieldHelp("layers of each stage; unset: balanced by cost", "[9, 9, 9, 5]"),
        "pipeline_chunks": FieldHelp("stages on each rank, for the interleaved schedule", "2"),
    },
    "output and logs": {
        "output_dir": FieldHelp("the run's folder, which all ranks have to see", "runs/first"),
        "run_name": FieldHelp("the run's name for report_to", "first"),
        "logging_strategy": FieldHelp("when to log: steps, epoch or no", "epoch"),
        "logging_steps": FieldHelp("steps between logs, or a fraction of the run below 1", "10"),
        "logging_first_step": FieldHelp("log the first step too", "true"),
        "log_format": FieldHelp("lines on stderr: text or json", "json"),
        "log_level": FieldHelp("debug, info, warning, error, critical or passive", "info"),
        "disable_tqdm": FieldHelp("no progress bar", "true"),
        "report_to": FieldHelp("loggers of transformers", "tensorboard"),
        "prometheus_file": FieldHelp("keep the newest metrics in this file for Prometheus", "/var/lib/node/run.prom"),
    },
    "evaluation": {
        "eval_strategy": FieldHelp("when to evaluate: no, steps or epoch", "steps"),
        "eval_steps": FieldHelp("steps between evaluations, or a fraction; unset: logging_steps", "100"),
        "eval_on_start": FieldHelp("evaluate before the first step", "true"),
        "eval_delay": FieldHelp("no evaluations before so many steps, or epochs with eval_strategy epoch", "1000"),
        "sample_prompts": FieldHelp("texts that the model continues at each evaluation", '["def ", "class "]'),
        "sample_tokens": FieldHelp("by so many tokens", "32"),
        "metrics": FieldHelp("a function of your own whose numbers evaluations report too", "my_module:my_function"),
        "metric_for_best_model": FieldHelp("which metric tells the best model", "loss"),
        "greater_is_better": FieldHelp("whether a greater value of it is better", "false"),
        "load_best_model_at_end": FieldHelp("end with the best model instead of the last", "true"),
    },
    "checkpoints": {
        "save_strategy": FieldHelp("when to save: no, steps, epoch or best", "epoch"),
        "save_steps": FieldHelp("steps between saves, or a fraction of the run below 1", "100"),
        "save_total_limit": FieldHelp("keep the newest so many checkpoints; unset: all", "3"),
        "save_only_model": FieldHelp("save weights alone; such a checkpoint cannot be resumed from", "true"),
        "resume_from_checkpoint": FieldHelp("true: the newest valid checkpoint; or the path of one", "true"),
        "ignore_data_skip": FieldHelp("resume at the beginning of the epoch, not at the next batch", "true"),
        "async_save": FieldHelp("write checkpoints while training continues", "false"),
        "save_timeout": FieldHelp("seconds for each phase of a save, and without a heartbeat", "600"),
        "step_timeout": FieldHelp("seconds after which a step that hangs ends the run; auto or off", "1800"),
        "save_on_signal": FieldHelp("save and end with code 75 at SIGTERM, SIGUSR1, SIGHUP or Ctrl-C", "false"),
        "signal_grace": FieldHelp("seconds from the signal until the run has to have ended", "30"),
        "join_timeout": FieldHelp("seconds that the ranks may take to find each other at the start", "120"),
        "max_restarts": FieldHelp("with --nproc: how often ranks that died are started again", "3"),
        "compile_cache": FieldHelp("lazy devices: where compiled graphs are kept, or false", "s3://bucket/graphs"),
    },
}
CHOICES: dict[str, tuple[str, ...]] = {
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "dtype": ("float32", "bfloat16"),
    "reduce_dtype": REDUCE_DTYPES,
    "device": ("auto", "xla", "cuda", "neuron", "cpu"),
    "log_format": ("text", "json"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved"),
    "log_level": ("debug", "info", "warning", "error", "critical", "passive"),
}


def help_of(name: str) -> FieldHelp | None:
    """The line and example of a field; None for one without."""
    return next((fields[name] for fields in FIELD_HELP.values() if name in fields), None)
