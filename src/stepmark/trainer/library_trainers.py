"""Trainers of other libraries, and their arguments, with Stepmark's in place of transformers' as base.

A class that derives from a library's trainer and from `Base` has Stepmark's Trainer before transformers' in the order
in which Python looks methods up. So `super()` in the library's code finds Stepmark's methods, and an instance is one of
the library's class, of Stepmark's Trainer and of transformers'.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import transformers

from stepmark.config.transformers_defaults import is_absent
from stepmark.errors import UsageError
from stepmark.runtime.context import start
from stepmark.trainer.compat.overrides import RefusedHook
from stepmark.trainer.compat.transformers_arguments import converted
from stepmark.trainer.trainer import Trainer
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.training.one_graph_per_step.deferred_reads import plain

_lacking = [name for name in vars(transformers.Trainer) if not hasattr(Trainer, name) and not name.startswith("__")]
_Refused: Any = type("_Refused", (), {name: RefusedHook(name) for name in _lacking})


class Base(Trainer, _Refused, transformers.Trainer):  # type: ignore[misc, override]
    """Stepmark's Trainer, and transformers' behind it, of which only the name is left."""

    def run_state(self) -> dict[str, Any]:
        """The running sums of TRL's trainers, so that a resumed run logs the same means."""
        sums = getattr(self, "_metrics", None)
        if not isinstance(sums, Mapping) or "train" not in sums:
            return {}
        return {"metrics": plain(dict(sums["train"])), "tokens": plain(getattr(self, "_total_train_tokens", 0))}

    def load_run_state(self, state: dict[str, Any]) -> None:
        own: Any = self
        if getattr(self.args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model: checkpoints do not hold the reference model, which follows the trained one, so the "
                "run cannot be resumed; set it to false, or start again from the checkpoint's model"
            )
        own._metrics["train"].update(state["metrics"])
        own._total_train_tokens = state["tokens"]


class _PassingOn(type(TrainingArguments)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Leaves out what was read of an instance, as `dataclasses.replace` passes it on with `accelerator_config`."""
        if isinstance(options.get("accelerator_config"), SimpleNamespace):
            options = {name: value for name, value in options.items() if name not in cls.read()}
        return super().__call__(*args, **options)


class BaseArguments(  # type: ignore[misc, override]
    TrainingArguments, transformers.TrainingArguments, metaclass=_PassingOn
):
    """Stepmark's TrainingArguments, and transformers' behind them, of which only the name is left."""

    deepspeed_plugin = None

    @property
    def distributed_state(self) -> Any:
        """accelerate's PartialState, which says how the ranks are connected."""
        from accelerate import PartialState

        return PartialState()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__.update(self.read())

    @staticmethod
    def read() -> dict[str, Any]:
        """What libraries read of every instance. A step's loss is the mean over all ranks in any case, so that they
        must not multiply by their number, and accelerate prepares no loader."""
        return {
            "average_tokens_across_devices": False,
            "accelerator_config": SimpleNamespace(dispatch_batches=None, split_batches=False),
        }


def arguments_on_stepmark(kind: type, module: str) -> Any:
    """A library's class of arguments, whose fields that transformers has are Stepmark's, with the library's defaults.

    Args:
        kind: The class, derived from transformers' TrainingArguments.
        module: The name of the module that will export it.
    """
    theirs = {name for each in kind.__mro__ if not _of_transformers(each) for name in inspect.get_annotations(each)}
    hints = typing.get_type_hints(TrainingArguments, include_extras=True)
    fields = [
        field
        for field in dataclasses.fields(TrainingArguments)
        if field.name not in theirs or is_absent(TrainingArguments, field.name)
    ]
    types = {field.name: field.type for field in fields}
    namespace = {
        **{field.name: field for field in fields},
        "__annotations__": {name: hints[name] for name in types},
        "__module__": module,
        "__doc__": kind.__doc__,
    }
    metaclass: Any = type(BaseArguments)
    made: Any = dataclasses.dataclass(repr=False)(metaclass(kind.__name__, (kind, BaseArguments), namespace))
    for field in fields:  # the same objects as in TrainingArguments
        field.type = types[field.name]
    return made


def trainer_on_stepmark(kind: Any, arguments: type, module: str) -> type:
    """A library's trainer with Stepmark's as base.

    Args:
        kind: The class, derived from transformers' Trainer.
        arguments: Its arguments, of `arguments_on_stepmark`. Its constructor also takes the library's own,
            transformers', or Stepmark's.
        module: The name of the module that will export it.
    """
    signature, library = inspect.signature(kind.__init__), kind.__module__.partition(".")[0]

    @functools.wraps(kind.__init__)
    def construct(self: Any, *given: Any, **options: Any) -> None:
        bound = signature.bind(self, *given, **options)
        args = bound.arguments.get("args")
        if args is not None:
            args = bound.arguments["args"] = converted(args, arguments)
        device = "auto" if args is None else args.device_name
        context = start(device, None if args is None else args.join_timeout)
        _show_ranks_to_accelerate(cpu=context.runtime.device.type == "cpu")
        _check_mesh(kind, args)
        kind.__init__(*bound.args, **bound.kwargs)

    namespace = {
        "__init__": construct,
        "__module__": module,
        "__doc__": kind.__doc__,
        "arguments_class": arguments,
        "_library": library,
    }
    metaclass: Any = type(Base)
    made: type = metaclass(kind.__name__, (kind, Base), namespace)
    return made


def _of_transformers(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "transformers"


def _show_ranks_to_accelerate(*, cpu: bool) -> None:
    """Makes accelerate's state of the ranks that have joined: libraries log, and let rank 0 go first, by it."""
    from accelerate import Accelerator

    Accelerator(cpu=cpu)


def _check_mesh(kind: type, args: Any) -> None:
    """Raises UsageError where ranks would have only a slice of what the library's loss reads: TRL multiplies by the
    weight of the language model's head itself."""
    if args is None or kind.__module__.partition(".")[0] != "trl":
        return
    if args.tensor_parallel_size > 1 and args.parallelize_embedding:
        raise UsageError(
            f"tensor_parallel_size: {kind.__name__} multiplies by the head's complete weight; set "
            "parallelize_embedding: false"
        )
    if args.sequence_parallel:
        raise UsageError(f"sequence_parallel: {kind.__name__} computes its loss from complete sequences; leave it out")
    sharded = args.full_sharding is not None
    if getattr(args, "sync_ref_model", False) and (sharded or args.tensor_parallel_size > 1):
        raise UsageError(
            "sync_ref_model: needs the complete weights, of which fsdp and tensor_parallel_size leave a rank a part"
        )
    if getattr(args, "precompute_ref_log_probs", False) and sharded:
        raise UsageError("precompute_ref_log_probs: hashes the complete weights, of which fsdp leaves a rank a part")
