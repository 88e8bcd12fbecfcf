"""Which of the Trainer's methods a subclass may override; other hooks of transformers' Trainer are rejected by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from stepmark.config.training_fields import GROUP_BY_LENGTH
from stepmark.errors import UsageError

_CALLED = """
    compute_loss get_train_dataloader _get_train_sampler get_eval_dataloader get_test_dataloader create_optimizer
    create_scheduler create_optimizer_and_scheduler prediction_step evaluate predict log save_model train
    is_world_process_zero add_callback remove_callback pop_callback create_model_card push_to_hub
"""
CALLED = tuple(_CALLED.split())
_REMEDIES = {  # for hooks of transformers' Trainer that are never called here: what to override
    "compute_loss, or pass a callback (on_step_begin, on_pre_optimizer_step, on_step_end)": """
        training_step get_batch_samples _inner_training_loop _init_training_state _run_epoch
    """,
    "compute_loss": "_get_num_items_in_batch compute_loss_context_manager autocast_smart_context_manager",
    "get_train_dataloader and get_eval_dataloader, or pass a data_collator": """
        _prepare_inputs _prepare_input _prepare_context_parallel_inputs _remove_unused_columns
        _set_signature_columns_if_needed _get_collator_with_removed_columns
    """,
    "get_train_dataloader and get_eval_dataloader": "_get_dataloader",
    "get_eval_dataloader": "_get_eval_sampler",
    "get_train_dataloader": "num_examples get_total_train_batch_size set_initial_training_values",
    "create_optimizer": "get_decay_parameter_names get_optimizer_cls_and_kwargs",
    "create_scheduler": "_get_learning_rate",
    "prediction_step or evaluate, or pass compute_metrics": "evaluation_loop prediction_loop",
    "evaluate": "_evaluate",
    "evaluate, and set metric_for_best_model": "_determine_best_metric",
    "save_model, or pass a callback (on_save)": """
        _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler _get_output_dir
    """,
    "nothing: resume_from_checkpoint restores the complete run; pass a callback with state for more": """
        _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler _load_callback_state
        _load_best_model _issue_warnings_after_load
    """,
    "create_optimizer_and_scheduler": "_prepare_for_training",
    "train": "_finalize_training hyperparameter_search _hp_search_setup _report_to_hp_search _tune_save_checkpoint",
    "log, evaluate or save_model": "_maybe_log_save_evaluate",
    "nothing: set max_grad_norm, or pass a callback (on_pre_optimizer_step)": """
        _clip_grad_norm _get_grad_norm _mixed_mesh_grad_norm _has_mixed_mesh_grads
    """,
    "log": "_track_num_input_tokens store_flos floating_point_ops",
    "nothing; set the device, dtype and sharding in TrainingArguments": """
        _validate_args _build_accelerator_args create_accelerator_and_postprocess get_sp_size get_cp_size get_tp_size
        _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters _wrap_model _update_auto_batch_size
        _move_model_to_device end
    """,
    "push_to_hub": "init_hf_repo _push_from_checkpoint _finish_current_push",
    "nothing; pass model_init": "call_model_init",
    "is_world_process_zero": "is_local_process_zero",
}
NEED_COMPLETE_MODEL = ("compute_loss", "prediction_step")  # methods whose replacement calls the complete model
INSTEAD = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}


def hooks_of(base: type) -> dict[str, Any]:
    """The methods of `base` among those of transformers' Trainer, as they are now, before any patch."""
    missing = object()
    found = {name: inspect.getattr_static(base, name, missing) for name in (*CALLED, *INSTEAD)}
    return {name: method for name, method in found.items() if method is not missing}


def check_overrides(cls: type, own: Mapping[str, Any]) -> None:
    """Raises UsageError where `cls` has, by definition or by a patch, a hook of transformers' Trainer that is never
    called here. `own` are Stepmark's methods, of `hooks_of`."""
    for name, instead in INSTEAD.items():
        if inspect.getattr_static(cls, name, None) is not own.get(name):
            raise UsageError(f"{cls.__name__}: {name} is never called by stepmark's Trainer; override {instead}")


def check_assignment(trainer: Any, name: str, value: Any) -> None:
    """Raises UsageError for a hook of transformers' Trainer that is never called here, and for another model than the
    Trainer was made with, set as an attribute of a Trainer."""
    kind = type(trainer).__name__
    if name in INSTEAD:
        raise UsageError(f"{kind}: {name} is never called by stepmark's Trainer; override {INSTEAD[name]}")
    own = vars(trainer).get("model")
    if name == "model" and own is not None and value is not own:
        raise UsageError(
            f"{kind}: its model, which was moved and sharded for the device, cannot be replaced; make a new Trainer"
        )


def check_pipeline(name: str, stages: int) -> None:
    """Raises UsageError for a replaced method of `NEED_COMPLETE_MODEL` where there are several pipeline stages."""
    if stages > 1:
        raise UsageError(
            f"{name} and pipeline_parallel_size: a {name} of your own calls the complete model, and each rank has "
            "a stage of it; pass compute_loss_func, preprocess_logits_for_metrics or compute_metrics, which get "
            "the last stage's outputs, or set pipeline_parallel_size to 1"
        )


class NoAccelerator:
    """`Trainer.accelerator`, which says what to use instead where it is read; a script may set the attribute."""

    def __get__(self, trainer: Any, kind: type) -> Any:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute 'accelerator': Stepmark does not use accelerate; return a "
            "loader as it is instead of accelerator.prepare(loader); see also args.device and is_world_process_zero()"
        )


def overrides(trainer: Any, own: Mapping[str, Any], name: str) -> bool:
    """Whether the method `name` of `trainer` is not Stepmark's `own`: a subclass, a patch or an attribute has it."""
    method = getattr(trainer, name)
    return getattr(method, "__func__", method) is not own[name]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a method of a subclass has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def call_compute_loss(
    compute: Callable[..., Any], owner: str, model: nn.Module, inputs: Any, items: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Returns the loss, a 0-dim tensor, and the outputs, which are asked for without gradients, in evaluations, only.

    Args:
        compute: The method, with transformers' parameters; it may lack `num_items_in_batch`.
        owner: The name of its class, for errors.
        model: The model.
        inputs: A batch on the device.
        items: The number of the batch's targets, a 0-dim tensor.

    Raises:
        UsageError: It returns something else than a loss with one element, or no outputs where they are asked for.
    """
    wants_outputs = not torch.is_grad_enabled()
    options: dict[str, Any] = {"num_items_in_batch": items} if accepts(compute, "num_items_in_batch") else {}
    options |= {"return_outputs": True} if wants_outputs else {}
    found = compute(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, **options)
    loss, outputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (wants_outputs and not isinstance(found, tuple)):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        expected = "a loss with one element" + (" and the outputs (return_outputs=True)" if wants_outputs else "")
        raise UsageError(f"{owner}.compute_loss returned a {type(found).__name__}{shape}; return {expected}")
    return loss.reshape(()), outputs


def call_sampler(trainer: Any) -> Sampler[int] | None:
    """What an overridden `_get_train_sampler` returns; older ones take no dataset."""
    takes_dataset = len(inspect.signature(trainer._get_train_sampler).parameters) > 0
    sampler = trainer._get_train_sampler(trainer.train_dataset) if takes_dataset else trainer._get_train_sampler()
    if sampler is not None and not hasattr(sampler, "__iter__"):
        raise UsageError(f"_get_train_sampler: returned {type(sampler).__name__}, which is not a sampler")
    return sampler


def sampler_of(dataset: Any, strategy: str) -> Sampler[int]:
    """A sampler with the meaning of a `train_sampling_strategy`, for a subclass that calls the Trainer's own.

    Raises:
        UsageError: There is none.
    """
    if strategy == GROUP_BY_LENGTH:
        raise UsageError(
            "train_sampling_strategy: group_by_length has no sampler that _get_train_sampler could return; choose "
            "random or sequential, or do not override it"
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)
