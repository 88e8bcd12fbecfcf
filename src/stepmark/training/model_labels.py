"""How a model uses its labels: as is declared, or known from its class."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, NoneType
from typing import Any

import torch
from torch import nn

from stepmark.data.loader.labels import POSITIONS, LabelRule
from stepmark.data.tokenize.packing import IGNORED
from stepmark.errors import UsageError
from stepmark.parallel.tensor.vocabulary import VocabParallelLoss

SHIFTS = Path(__file__).with_name("label_shifts.json")  # scripts/label_shifts.py
_OTHER_LOSSES = "ForMaskedLM ForTokenClassification ForSequenceClassification ForQuestionAnswering ForSegmentation"
_SHIFTS_OF_LOSSES = {"ForCausalLM": True, **dict.fromkeys(_OTHER_LOSSES.split(), False)}  # transformers' types


def label_rule(model: nn.Module) -> LabelRule:
    """The rule of a model's own loss. Where nothing says whether its labels are shifted, they are not."""
    model = unwrapped(model)
    return LabelRule(
        names=label_names(model) or ("labels",),
        causal_shift=bool(known_shift(model)),
        ignored=_ignored_label(model),
        by_sample=_is_ctc(model),
        skips_ignored=_skips_ignored(model),
        own_sequence=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
        vocabulary=_vocabulary(model),
    )


def _vocabulary(model: nn.Module) -> int | None:
    """The tokens of a model of transformers; None where inputs of other kinds have token ids too, such as images."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers."):
        return None
    try:
        embeddings = None if model.config.sub_configs else model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None


def _skips_ignored(model: nn.Module) -> bool:
    """Whether rows with ignored labels leave no trace. They do in statistics of a batch, in losses over routers, and in
    regressions; what a forward or a loss that is not of transformers does with them cannot be known."""
    config: Any = getattr(model, "config", None)
    if not has_known_loss(model) or getattr(config, "num_labels", None) == 1:
        return False
    if getattr(config, "problem_type", None) in ("regression", "multi_label_classification"):
        return False
    if getattr(config, "output_router_logits", False):
        return False
    return not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def has_known_loss(model: nn.Module) -> bool:
    """Whether the model computes its loss as transformers does, in a forward and with a function of transformers."""
    from transformers import PreTrainedModel

    loss = getattr(model, "loss_function", None)
    functions = [inspect.unwrap(model.forward), *([] if isinstance(loss, (VocabParallelLoss, NoneType)) else [loss])]
    names = [str(getattr(function, "__module__", "")) for function in functions]
    return isinstance(model, PreTrainedModel) and all(name.startswith("transformers.") for name in names)


def declared(name: str, values: tuple[Any, Any], owners: Iterable[Any]) -> Any:
    """The attribute `name` of the first of `owners` that has one, or None. Raises UsageError if not in `values`."""
    found = next((each for owner in owners if (each := getattr(owner, name, None)) is not None), None)
    if found not in (None, *values):
        raise UsageError(f"{name}: should be {values[0]} or {values[1]}, and is {found!r}")
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and PEFT's wrappers."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def label_names(model: nn.Module) -> tuple[str, ...]:
    """The arguments of `forward` that are labels, by transformers' convention."""
    parameters = inspect.signature(model.forward).parameters
    return tuple(name for name in parameters if "label" in name or name in POSITIONS)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def returns_loss(model: nn.Module) -> bool:
    """Whether `return_loss` of the model's forward is true by default, as CLIP's: such models need no labels."""
    parameter = inspect.signature(unwrapped(model).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def names_num_items(model: nn.Module) -> bool:
    """Whether the model declares that it divides a summed loss by `num_items_in_batch`. A forward that accepts
    arbitrary keyword arguments does not: most heads ignore it."""
    model = unwrapped(model)
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def sums_samples(model: nn.Module) -> bool:
    """Whether the model's own loss is a sum over samples, not a mean."""
    model = unwrapped(model)
    return _is_ctc(model) and getattr(model.config, "ctc_loss_reduction", "mean") == "sum"


def known_shift(model: nn.Module) -> bool | None:
    """Whether position t predicts label t + 1: as the class shows, as a table of transformers' classes says, or by the
    type of loss that transformers gives the model. None where nothing says so."""
    shown = shown_shift(model)
    if shown is not None:
        return shown
    owner, _ = _forward_of(model)
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.") and kind.__name__ in _shifts():
            return _shifts()[kind.__name__]
        if kind is owner:
            break
    return _SHIFTS_OF_LOSSES.get(getattr(model, "loss_type", None) or "")


def _forward_of(model: nn.Module) -> tuple[type, Any]:
    """The class whose `forward` computes, and that function: one that calls its base's passes the loss on."""
    for kind in type(model).__mro__:
        forward: Any = inspect.unwrap(vars(kind)["forward"]) if "forward" in vars(kind) else None
        code: CodeType | None = getattr(forward, "__code__", None)
        if code is not None and not {"super", "forward"} <= {*code.co_names}:
            return kind, forward
    return type(model), inspect.unwrap(type(model).forward)


@cache
def _shifts() -> dict[str, bool]:
    return json.loads(SHIFTS.read_text(encoding="utf-8"))


def shown_shift(model: nn.Module) -> bool | None:
    """Whether position t predicts label t + 1, if the model's class shows it."""
    if not accepts(model.forward, "labels"):
        return False
    _, forward = _forward_of(model)
    code: CodeType | None = getattr(forward, "__code__", None)
    if code is None or not hasattr(model, "loss_function"):
        return None
    if "loss_function" in code.co_names:
        from transformers.loss.loss_utils import LOSS_MAPPING

        if "shift_labels" in (*code.co_varnames, *code.co_names) or "shift_labels" in str(code.co_consts):
            return None
        if isinstance(model.loss_function, VocabParallelLoss):
            return True
        shifts = _SHIFTS_OF_LOSSES.items()
        return next((shift for name, shift in shifts if LOSS_MAPPING.get(name) is model.loss_function), None)
    return False if _has_unshifted_head(model, forward) else None


def _has_unshifted_head(model: nn.Module, forward: Any) -> bool:
    """Whether `forward` belongs to one of transformers' masked or encoder-decoder language models, or classifiers."""
    from transformers.models.auto import modeling_auto as auto

    mappings = [
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # The mapping also lists causal language models with an audio encoder, which shift their labels.
        mappings.append(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    owner = forward.__qualname__.partition(".")[0]
    from_transformers = forward.__module__.startswith("transformers.")
    return from_transformers and any(owner in names.values() for names in mappings)


def _ignored_label(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForSemanticSegmentation"):
        return IGNORED
    return int(getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", IGNORED)))


def _is_ctc(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForCTC")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; every module's mode is restored at the end. Its own `train` is called as well: some
    modules, such as Levit's, drop there what they have computed from weights in eval mode.

    What torch.compile has compiled runs uncompiled: batches and generation have shapes of their own, and numbers are
    then those of a restored model.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled = any(module._compiled_call_impl is not None for module, _ in modes)
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        model.train()
        for module, mode in modes:
            module.training = mode
