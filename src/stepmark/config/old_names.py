"""Names of the tools that people come from, and what to use here; docs/migrating.md has the same as a table.

A recipe's field, a flag or a keyword of a call with one of these names is an error that says ours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from stepmark.errors import UsageError

# Fields and keywords. Those of transformers' TrainingArguments and of run_clm first, then those of optimum-neuron.
FIELDS = {
    "do_train": "leave it out: `stepmark train` trains",
    "do_eval": "use eval_strategy",
    "evaluation_strategy": "use eval_strategy",
    "overwrite_output_dir": "choose another output_dir, or set resume_from_checkpoint",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "logging_dir": "TensorBoard's files go to output_dir",
    "no_cuda": "use device: cpu",
    "use_cpu": "use device: cpu",
    "torch_dtype": "use dtype",
    "model_type": "use config_name",
    "tpu_num_cores": "start ranks with --nproc, torchrun or srun",
    "use_mps_device": "use device: cpu",
    "group_by_length": "use train_sampling_strategy: group_by_length",
    "fp16_opt_level": "leave it out; fp16 is torch's autocast",
    "fp16_backend": "leave it out; fp16 is torch's autocast",
    "half_precision_backend": "leave it out; bf16 is autocast, dtype: bfloat16 makes the parameters bfloat16",
    "save_safetensors": "leave it out: models are saved as safetensors",
    "past_index": "leave it out, or override compute_loss",
    "jit_mode_eval": "leave it out, or pass a model that is compiled",
    "use_ipex": "leave it out, or pass a model that is compiled",
    "torchdynamo": "pass torch.compile(model)",
    "push_to_hub_token": "use hub_token",
    "push_to_hub_model_id": "use hub_model_id",
    "push_to_hub_organization": "use hub_model_id, with the organization before a slash",
    "include_inputs_for_metrics": "use include_for_metrics with inputs in it",
    "include_tokens_per_second": "leave it out: every log has tokens_per_second",
    "dispatch_batches": "leave it out: every rank loads its own batches",
    "split_batches": "leave it out: per_device_train_batch_size is of one rank",
    "fsdp_min_num_params": "use zero_1, tensor_parallel_size or pipeline_parallel_size",
    "fsdp_transformer_layer_cls_to_wrap": "use zero_1, tensor_parallel_size or pipeline_parallel_size",
    "use_legacy_prediction_loop": "leave it out",
    "evaluate_during_training": "use eval_strategy",
    "adafactor": "use optim: adafactor",
    "max_seq_length": "truncate in the tokenizer; in recipes use block_size",
    "skip_cache_push": "leave it out: compiled graphs are not uploaded",
    "disable_sequence_parallel": "use sequence_parallel, which is false by default",
    "sequence_parallel_enabled": "use sequence_parallel",
    "disable_embedding_parallelization": "use parallelize_embedding, which is true by default",
    "parallelize_embeddings": "use parallelize_embedding",
    "pipeline_parallel_num_microbatches": "use gradient_accumulation_steps: its micro-batches go through the pipeline",
    "kv_size_multiplier": "leave it out: key and value heads are replicated where there are fewer than ranks",
    "fuse_qkv": "leave it out: projections stay as the model has them",
    "recompute_causal_mask": "leave it out: masks are chosen by the shape of the inputs",
    "num_local_ranks_per_step": "leave it out: every rank reads and writes only its own part",
    "use_xser": "leave it out: checkpoints are safetensors that all ranks write together",
    "optimizer_save_master_weights_in_ckpt": "leave it out: master weights are always saved",
    "save_master_weights": "leave it out: master weights are always saved",
    "use_autocast": "use bf16: true",
    "zero1": "use zero_1",
    "zero_1_enabled": "use zero_1",
    "use_zero1": "use zero_1",
    "use_zero_1": "use zero_1",
    "neuron_cc_optlevel": "set the environment variable NEURON_CC_FLAGS, such as --optlevel=2",
    "neuron_cc_flags_model_type": "set the environment variable NEURON_CC_FLAGS, such as --model-type=transformer",
    "enable_throughput_metric": "leave it out: every log has tokens_per_second",
    "lazy_load_for_parallelism": "leave it out: a recipe loads a sharded model so; in Python use load_for_parallelism",
    "mp_plugin": "use tensor_parallel_size, sequence_parallel and parallelize_embedding",
    "tokenizer": "use processing_class in Python, tokenizer_name in a recipe",
    "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, None), or override create_optimizer",
    "train_batch_size": "use per_device_train_batch_size",
    "eval_batch_size": "use per_device_eval_batch_size",
    "tp_degree": "use tensor_parallel_size",
    "tensor_parallel_degree": "use tensor_parallel_size",
    "compute_dtype": "use dtype or bf16",
    "nproc_per_node": "start ranks with --nproc",
    "num_processes": "start ranks with --nproc",
    "early_stopping_patience": "pass transformers' EarlyStoppingCallback to a Trainer, or watch the run with "
    "`stepmark evaluate RUN --watch --patience N`",
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "set the number of layers in config_overrides"),
    **dict.fromkeys(("n_embd", "d_model", "hidden_size"), "set the model's width in config_overrides"),
}

# What other packages export, for `from stepmark import …`.
EXPORTS = {
    "NeuronTrainer": "Trainer",
    "NeuronSFTTrainer": "Trainer",
    "NeuronTrainingArguments": "TrainingArguments",
    "NeuronAccelerator": "Mesh and TrainStep, as in examples/custom_loop.py",
    "ModelParallelismPlugin": "Mesh.create(tensor_parallel_size=…) and parallelize",
    "lazy_load_for_parallelism": "load_for_parallelism",
    "Parallelizer": "parallelize",
    "ParallelizersManager": "parallelize",
    "MpDeviceLoader": "DevicePrefetcher",
    "ParallelLoader": "DevicePrefetcher",
    "NeuronZero1Optimizer": "ZeroRedundancyOptimizer",
    "make_optimizer_constructor_lazy": "Trainer.create_optimizer, or the optimizer's own class after parallelize",
    "mark_step": "TrainStep or ZeroRedundancyOptimizer, which end the step, else mesh.runtime.step_boundary()",
    "optimizer_step": "TrainStep, or the step of ZeroRedundancyOptimizer",
    "xla_device": 'Mesh.create(device="xla").runtime.device',
    "rendezvous": "Mesh.create(…).context.host.barrier()",
}

Owner = TypeVar("Owner", bound=type)


def explains_keywords(owner: Owner) -> Owner:
    """Class decorator: a keyword that `__init__` does not have raises UsageError, which says what to use instead."""
    original: Callable[..., None] = owner.__init__  # type: ignore[misc]
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **keywords: Any) -> None:
        for name in sorted(set(keywords) - set(known)):
            if keywords[name] is not None or name not in FIELDS:  # None says that nothing is set
                raise UsageError(_unknown_keyword(type(self).__name__, name, known))
            del keywords[name]
        original(self, *args, **keywords)

    owner.__init__ = construct  # type: ignore[misc]
    return owner


def _unknown_keyword(owner: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    instead = FIELDS.get(name) or (f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}")
    return f"{owner}: {name}: is not an argument; {instead}"


def export_message(name: str) -> str | None:
    """What a name of another package is called in `stepmark`; None for any other name."""
    return f"{name}: is not in stepmark; use {EXPORTS[name]}; see docs/migrating.md" if name in EXPORTS else None
