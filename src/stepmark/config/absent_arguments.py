"""Arguments of transformers' TrainingArguments: their defaults, and of those that Stepmark refuses what to use instead.

docs/transformers.md has the same as a table, and a test compares them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

_PRECISION = "use bf16 or fp16 (autocast) or dtype: bfloat16 (with fp32 master weights)"
_SHARDING = "use zero_1, tensor_parallel_size and sequence_parallel"
_LOADER = "leave it out, or override get_train_dataloader and get_eval_dataloader"
_REPORT = "use report_to with a callback of your own"
_IN_PYTHON = "recipes lack it; TrainingArguments in Python have it"
_DEADLINE = "use join_timeout, step_timeout and save_timeout, which are Stepmark's deadlines"

INSTEAD = {
    "fp16_full_eval": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "tf32": "set torch.backends.cuda.matmul.fp32_precision",
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": _SHARDING,
    "accelerator_config": "leave it out: Stepmark does not use accelerate",
    "project": _REPORT,
    "trackio_space_id": _REPORT,
    "trackio_bucket_id": _REPORT,
    "trackio_static_space_id": _REPORT,
    "torch_compile": _IN_PYTHON,
    "torch_compile_backend": _IN_PYTHON,
    "torch_compile_mode": _IN_PYTHON,
    "activation_checkpointing": "use gradient_checkpointing: true",
    "activation_checkpointing_kwargs": "use gradient_checkpointing_kwargs",
    "use_liger_kernel": "use a model that has the kernels",
    "liger_kernel_config": "use a model that has the kernels",
    "optim_target_modules": "override create_optimizer, or pass optimizers=(optimizer, None)",
    "auto_find_batch_size": "`stepmark plan` says which batch fits",
    "torch_empty_cache_steps": "leave it out",
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "average_tokens_across_devices": "leave it out: a step's loss is the mean over its targets on all ranks",
    "use_cache": "leave it out: training needs no cache",
    "ddp_broadcast_buffers": "leave it out",
    "ddp_backend": "leave it out: the backend is that of the device",
    "ddp_timeout": _DEADLINE,
    "logging_nan_inf_filter": "leave it out: losses are logged as they are, so a nan is seen",
    "log_on_each_node": _IN_PYTHON,
    "log_level_replica": "use log_level",
    "debug": _IN_PYTHON,
    "include_num_input_tokens_seen": "leave it out: every log has tokens_per_second",
    "skip_memory_metrics": _IN_PYTHON,
    "save_on_each_node": _IN_PYTHON,
    "full_determinism": "leave it out: a run is repeatable on a device whose operations are",
    "push_to_hub": _IN_PYTHON,
    "hub_model_id": _IN_PYTHON,
    "hub_strategy": _IN_PYTHON,
    "hub_token": _IN_PYTHON,
    "hub_private_repo": _IN_PYTHON,
    "hub_always_push": _IN_PYTHON,
    "hub_revision": _IN_PYTHON,
    "batch_eval_metrics": _IN_PYTHON,
    "eval_do_concat_batches": _IN_PYTHON,
    "include_for_metrics": _IN_PYTHON,
    "prediction_loss_only": _IN_PYTHON,
}


@functools.cache
def transformers_defaults() -> dict[str, Any]:
    """The defaults of transformers' TrainingArguments by name. Imports transformers, which takes seconds."""
    return {field.name: _default(field) for field in dataclasses.fields(transformers_class()) if field.init}


@functools.cache
def transformers_class() -> Any:
    """transformers' TrainingArguments, also where a program puts another class in its place later."""
    from stepmark.config.quiet_libraries import quiet_libraries

    quiet_libraries()
    from transformers import TrainingArguments

    return TrainingArguments


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
