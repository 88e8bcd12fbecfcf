"""Trainers of other libraries, and their arguments, with Stepmark's in place of transformers' as base.

A class that derives from a library's trainer and from `Base` has Stepmark's Trainer before transformers' in the order
in which Python looks methods up. So `super()` in the library's code finds Stepmark's methods, and an instance is one of
the library's class, of Stepmark's Trainer and of transformers'.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves

from stepmark.config.contradictions import SHARING
from stepmark.config.fields import fields_of, refuse
from stepmark.config.training_fields import TrainingFields
from stepmark.config.transformers_defaults import is_absent
from stepmark.data.loader.batch import is_filler
from stepmark.errors import UsageError
from stepmark.runtime.context import start
from stepmark.trainer.compat.overrides import RefusedHook
from stepmark.trainer.compat.transformers_arguments import converted
from stepmark.trainer.run import Run
from stepmark.trainer.trainer import Trainer
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.training.one_graph_per_step.deferred_reads import read_numbers

ARGUMENTS = {"trl": "Config", "sentence_transformers": "TrainingArguments"}  # what they are called in a library

HOSTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer")  # of TRL, whose losses join nothing of ranks but metrics

# Hooks of transformers that libraries override, and whose work is done otherwise or refused where it is asked for.
_REPLACED = """
    get_optimizer_cls_and_kwargs call_model_init _load_best_model _load_from_checkpoint _push_from_checkpoint
"""

_lacking = [name for name in vars(transformers.Trainer) if not hasattr(Trainer, name) and not name.startswith("__")]
_Refused: Any = type("_Refused", (), {name: RefusedHook(name) for name in _lacking})


class Base(Trainer, _Refused, transformers.Trainer):  # type: ignore[misc, override]
    """Stepmark's Trainer, and transformers' behind it, of which only the name is left."""

    _hosts_ranks = False  # losses and metrics join what all ranks have computed

    def __init__(self, *given: Any, eval_dataset: Any = None, **options: Any) -> None:
        """Libraries pass a word in place of data that an evaluator of theirs does without."""
        options["eval_dataset"] = None if isinstance(eval_dataset, str) else eval_dataset
        super().__init__(*given, **options)

    def _complete_run_state(self) -> dict[str, Any]:
        """Also the running sums of libraries, so that a resumed run logs the same means: TRL's, which are the same on
        all ranks, and each rank's own of sentence-transformers' losses with several parts."""
        found, own = self.run_state(), vars(self)
        if "train" in own.get("_metrics", ()) and self._joins_at_logs:
            found["metrics"], found["tokens"] = self._of_ranks("train")
            found["of_each_rank"] = True
        elif "train" in own.get("_metrics", ()):
            found["metrics"] = read_numbers(dict(own["_metrics"]["train"]))
            found["tokens"] = read_numbers(own.get("_total_train_tokens", 0))
        if "accum_loss_components" in own:
            parts = {name: each.item() for name, each in own["accum_loss_components"]["train"].items()}
            found["loss_parts"] = self.context.host.all_gather(parts)
        return found

    def _load_complete_run_state(self, state: dict[str, Any]) -> None:
        own: Any = self
        self.load_run_state(state)
        sums: dict[str, Any] = {}
        for saved in state.get("loss_parts", [])[self.context.host.rank :: self.context.world.size]:
            for name, value in saved.items():
                sums[name] = sums.get(name, 0) + torch.tensor(value, device=self.context.runtime.device)
        if "loss_parts" in state:
            own.accum_loss_components["train"] = sums
        if getattr(self.args, "sync_ref_model", False):
            raise UsageError(
                "sync_ref_model: checkpoints do not hold the reference model, which follows the trained one, so the "
                "run cannot be resumed; set it to false, or start again from the checkpoint's model"
            )
        if "metrics" in state and not (self._joins_at_logs and self.context.host.rank):  # else rank 0 has all of them
            values = state["metrics"]
            if self._joins_at_logs and not state.get("of_each_rank"):  # each of all ranks
                values = {name: each * self.mesh.ranks.total for name, each in values.items()}
            own._metrics["train"].update(values)
            own._total_train_tokens = state["tokens"]

    @property
    def _joins_at_logs(self) -> bool:
        """Whether TRL's metrics are those of each logical rank alone until they are logged."""
        return self._hosts_ranks and (self.mesh.ranks.given or self.mesh.ranks.total > self.mesh.ranks.processes)

    def _own_loss(self, compute: Any, *given: Any, **options: Any) -> Any:
        """TRL's `compute_loss`, with the logical rank's metrics; none where it joins others' passes or has no rows."""
        own: Any = self
        kept = (copy.deepcopy(own._metrics), own._total_train_tokens) if is_filler() else None
        own.accelerator.keeps_own = self._joins_at_logs and own.compute_loss_func is None  # which may join more
        try:
            return compute(self, *given, **options)
        finally:
            own.accelerator.keeps_own = False
            if kept is not None and (self._joins_at_logs or not own.accelerator.has_samples):
                own._metrics, own._total_train_tokens = kept

    def _own_log(self, log: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`, with the means over logical ranks: of a sum that is rounded once, whatever its order."""
        own: Any = self
        if self._joins_at_logs:
            mode = "train" if own.model.training else "eval"
            values, tokens = self._of_ranks(mode)
            own._metrics[mode].update({name: [math.fsum(each) / len(each)] for name, each in values.items()})
            if values:
                own._metrics[mode]["num_tokens"] = [tokens]
        log(self, logs, start_time)

    def _of_ranks(self, mode: str) -> tuple[dict[str, list[float]], int]:
        """TRL's metrics of all logical ranks since the last log, and the tokens of all since the first. Collective."""
        own, joined = vars(self), defaultdict[str, list[float]](list)
        told = self.mesh.gather_reported((read_numbers(dict(own["_metrics"][mode])), own["_total_train_tokens"]))
        for values, _ in told:
            for name, each in values.items():
                joined[name] += each
        return dict(joined), sum(tokens for _, tokens in told)


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
        for name, field in fields_of(TrainingFields).items():
            if getattr(self, name) is None and type(None) not in field.types:  # unset, in a library's own field
                setattr(self, name, field.default)
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
    """A library's class of arguments, derived from transformers', for the module that will export it. Its fields that
    transformers has are Stepmark's, with the library's defaults."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("transformers", "builtins")]
    theirs = {name for each in own for name in inspect.get_annotations(each)}
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
    """A library's trainer, derived from transformers', with Stepmark's as base, for the module that will export it.
    Besides `arguments`, of `arguments_on_stepmark`, its constructor takes the library's own, transformers', or
    Stepmark's."""
    signature, library = inspect.signature(kind.__init__), kind.__module__.partition(".")[0]

    @functools.wraps(kind.__init__)
    def construct(self: Any, *given: Any, run: Run | None = None, **options: Any) -> None:
        from accelerate import Accelerator
        from accelerate.state import is_initialized

        bound = signature.bind(self, *given, **options)
        args = bound.arguments.get("args")
        if args is not None:
            args = bound.arguments["args"] = converted(args, arguments)
        device = "auto" if args is None else args.device_name
        context = start(device, None if args is None else args.join_timeout) if run is None else run.context
        vars(self)["_run"] = run
        # accelerate's state of the ranks that have joined: libraries log, and let rank 0 go first, by it.
        if not is_initialized():  # where torch_xla is installed, it refuses `cpu` the second time
            Accelerator(cpu=context.runtime.device.type == "cpu")
        if library == "trl" and args is not None:
            refuse(_contradictions_of_trl(args, kind.__name__, bound.arguments, ranks=context.world.size))
        if library == "sentence_transformers":
            asked = args or TrainingArguments(), kind.__name__, bound.arguments
            refuse(_contradictions_of_sentence_transformers(*asked, lazy=context.runtime.lazy))
        kind.__init__(*bound.args, **bound.kwargs)
        _check_losses(self)

    namespace = {
        **{name: RefusedHook(name) for name in _REPLACED.split()},
        "__init__": construct,
        "__module__": module,
        "__doc__": kind.__doc__,
        "arguments_class": arguments,
        "_library": library,
    }
    if library == "trl":
        namespace["compute_loss"] = functools.wraps(kind.compute_loss)(
            lambda self, *given, **options: self._own_loss(kind.compute_loss, *given, **options)
        )
    if library == "trl" and kind.__name__ in HOSTED:
        namespace |= {
            "_hosts_ranks": True,
            "log": lambda self, *given, **options: self._own_log(kind.log, *given, **options),
        }
    metaclass: Any = type(Base)
    return metaclass(kind.__name__, (kind, Base), namespace)


def _contradictions_of_trl(args: Any, name: str, given: Mapping[str, Any], *, ranks: int) -> Iterator[str]:
    """TRL multiplies by the weight of the language model's head itself, and leaves what rank 0 has computed of the
    reference model in a file beside the data."""
    if args.tensor_parallel_size > 1 and args.parallelize_embedding:
        yield (
            f"tensor_parallel_size: {name} multiplies by the head's complete weight; set parallelize_embedding: false"
        )
    if args.sequence_parallel:
        yield f"sequence_parallel: {name} computes its loss from complete sequences; leave it out"
    sharded = args.full_sharding is not None
    if getattr(args, "sync_ref_model", False) and (sharded or args.tensor_parallel_size > 1):
        yield "sync_ref_model: needs the complete weights, of which fsdp and tensor_parallel_size leave a rank a part"
    if getattr(args, "precompute_ref_log_probs", False) and sharded:
        yield "precompute_ref_log_probs: hashes the complete weights, of which fsdp leaves a rank a part"
    data = tree_leaves([given.get("train_dataset"), given.get("eval_dataset")])
    in_memory = any(getattr(each, "cache_files", None) == [] for each in data)
    if getattr(args, "precompute_ref_log_probs", False) and ranks > 1 and in_memory:
        yield (
            "precompute_ref_log_probs: the data are in memory, so that other ranks would not find the cache of rank 0: "
            "pass a dataset that was read from files (datasets.load_from_disk), or start one rank"
        )


def _contradictions_of_sentence_transformers(
    args: Any, name: str, given: Mapping[str, Any], *, lazy: bool
) -> Iterator[str]:
    """What would be ignored, and where ranks would have only a slice of what the library reads."""
    if lazy:
        yield f"device: {name} makes batches of many shapes, each of which is another graph; use cpu or cuda"
    for field in (*(each for each in SHARING if getattr(args, each) > 1), *(["fsdp"] if args.full_sharding else [])):
        yield f"{field}: {name} evaluates and saves the complete model on one rank; leave it out, or use zero_1"
    if getattr(args, "learning_rate_mapping", None):
        yield "learning_rate_mapping: is not read; pass optimizers=(optimizer, None) with groups of your own"
    if given.get("model_init") is not None:
        yield "model_init: the loss holds the model that it was made for; pass model"


def _check_losses(trainer: Any) -> None:
    """Raises UsageError for parameters of a loss that are not the model's: the optimizer and checkpoints lack them."""
    own = {id(parameter) for parameter in trainer.model.parameters()}
    losses = vars(trainer).get("loss")
    for loss in losses.values() if isinstance(losses, Mapping) else filter(None, [losses]):
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad and id(parameter) not in own and not name.startswith("guide."):
                raise UsageError(
                    f"loss: {type(loss).__name__}.{name} is not a parameter of the model, so it would be neither "
                    "trained nor saved; freeze it (requires_grad_), or give its module to the model: model[0].head = …"
                )


def exported(module: str, library: str, name: str) -> Any:
    """The class of a library's trainer, or of its arguments, on Stepmark's, for a module that exports both. Raises
    ImportError where the library is not installed."""
    if importlib.util.find_spec(library) is None:
        extra = library.replace("_", "-")
        raise ImportError(f"{module}: {extra} is not installed; pip install 'stepmark[{extra}]'")
    theirs = getattr(importlib.import_module(library), name)
    if not name.endswith("Trainer"):
        return arguments_on_stepmark(theirs, module)
    arguments = ARGUMENTS[library]
    return trainer_on_stepmark(theirs, getattr(sys.modules[module], name.replace("Trainer", arguments)), module)
