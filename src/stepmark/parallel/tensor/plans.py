"""Which modules tensor parallelism cuts, and which part of each parameter a rank then holds. Arithmetic, no devices.

A plan maps module names (with `*` for a layer's number) to styles, as transformers' `tp_plan`s do. A module that a plan
does not name is the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepmark.errors import UsageError
from stepmark.parallel.tensor.architectures import PASSED
from stepmark.sharding.layout import Box, Layout, Shape

COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input")
STYLES = (
    *COLUMN_STYLES,
    *ROW_STYLES,
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "all_reduce",
    "replicate",
)

PLANS: dict[str, dict[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans of ours, by model type, for models that have none; names as seen from the base model."""

ADDED: dict[str, dict[str, str]] = {
    # An activation function with parameters, between columns and rows, which its plan does not speak of.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""What transformers' plan of a model type leaves out; names as seen from the base model."""

REFUSED = {
    "doge": "its attention's mask has parameters for whole heads, which its plan cuts along other lines",
    "youtu": "its plan leaves out the rotary part that all heads share (multi-head latent attention)",
}
"""Model types whose plan in transformers does not give the unsharded model's results, and why."""


@dataclass(frozen=True)
class Style:
    """`kind` is one of STYLES. `packed`: how many projections of one width lie one after the other in the cut dim."""

    kind: str
    packed: int = 1


@dataclass(frozen=True)
class Placement:
    """What this rank holds of a parameter: `layout`, in a local tensor of `shape`. Places of the local tensor that the
    layout does not speak of are padding, and zero. `count` neighbours hold the same."""

    layout: Layout
    shape: Shape
    count: int = 1


def plan_of(model: Any, given: Mapping[str, str] | None = None) -> dict[str, Style]:
    """Module name to style, for a transformers model (a user's plan, `given`, comes before the model's own).

    Raises UsageError for a model without a plan, a plan of its own that has not passed a parity check, styles that are
    not supported, and names of the user's plan that are no modules of the model.
    """
    patterns = dict(given) if given is not None else own_plan(model)
    if not patterns:
        raise UsageError(
            f"tensor_parallel_size: {type(model).__name__} has no tensor parallel plan; models with a tp_plan in "
            f"transformers and {', '.join(sorted(PLANS))} have one, or pass parallelize(plan={{'layers.*.mlp.up_proj': "
            "'colwise', ...})"
        )
    unknown = sorted({style for style in patterns.values() if style.split(":")[0] not in STYLES})
    if unknown:
        raise UsageError(
            f"tensor_parallel_size: the plan of {type(model).__name__} has styles that are not supported: "
            f"{', '.join(unknown)}; supported are {', '.join(STYLES)}"
        )
    found, matched = _match(model, patterns)
    missing = sorted(set(patterns) - matched)
    if given is not None and missing:
        raise UsageError(
            f"plan: {type(model).__name__} has no module {missing[0]!r}; name modules as named_modules() does, with * "
            "for a layer's number"
        )
    kind = _model_type(model)
    if given is None and kind not in PASSED:
        raise UsageError(
            f"tensor_parallel_size: {kind} is not among the architectures whose results were compared with the "
            "unsharded model's (docs/architectures.md); compare them yourself and pass parallelize(plan=...), with "
            "model.tp_plan if that is right"
        )
    return found


def _match(model: Any, patterns: Mapping[str, str]) -> tuple[dict[str, Style], set[str]]:
    """The modules that the patterns mean, and the patterns that mean one."""
    compiled = [(re.compile(_expression(pattern)), pattern, style) for pattern, style in patterns.items()]
    found: dict[str, Style] = {}
    matched = set()
    for name, _ in model.named_modules():
        for expression, pattern, style in compiled:
            if expression.fullmatch(name):
                found[name] = parse_style(style)
                matched.add(pattern)
    return found, matched


def parse_style(text: str) -> Style:
    """`packed_colwise` holds two projections in one; `packed_colwise:3` three."""
    kind, _, count = text.partition(":")
    if not kind.startswith("packed_"):
        return Style(kind)
    return Style(kind.removeprefix("packed_"), int(count or 2))


def own_plan(model: Any) -> dict[str, str]:
    """transformers' plan with what we add, or ours, whether or not it has passed a check; empty if there is none.

    Raises UsageError for a model whose plan is known to be wrong.
    """
    kind = _model_type(model)
    if kind in REFUSED:
        raise UsageError(f"tensor_parallel_size: {type(model).__name__} is not supported: {REFUSED[kind]}")
    own = dict(getattr(model, "_tp_plan", None) or {})
    ours = ADDED.get(kind, {}) if own else PLANS.get(kind, {})
    prefix = "" if getattr(model, "base_model", model) is model else f"{model.base_model_prefix}."
    return {**own, **{prefix + name: style for name, style in ours.items()}}


def _model_type(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def whole(shape: Shape) -> Placement:
    return Placement(Layout.whole(shape), shape)


def cut(shape: Shape, dim: int, rank: int, size: int, packed: int = 1) -> Placement:
    """This rank's equal part along `dim`, of each of `packed` projections. The caller has checked that it divides."""
    dim %= len(shape)
    width = shape[dim] // packed
    part = width // size
    local = tuple(packed * part if index == dim else length for index, length in enumerate(shape))
    boxes = []
    for number in range(packed):
        offsets = tuple(number * width + rank * part if index == dim else 0 for index in range(len(shape)))
        lengths = tuple(part if index == dim else length for index, length in enumerate(shape))
        at = tuple(number * part if index == dim else 0 for index in range(len(shape)))
        boxes.append((Box(offsets, lengths), at))
    if packed == 1:
        return Placement(Layout.box(shape, boxes[0][0].offsets, boxes[0][0].lengths), local)
    return Placement(Layout.boxes(shape, boxes), local)


def cut_shared(shape: Shape, dim: int, rank: int, size: int, groups: int) -> Placement:
    """As `cut`, into fewer parts (`groups`) than ranks: neighbours hold the same part."""
    count = size // groups
    placement = cut(shape, dim, rank // count, groups)
    return Placement(placement.layout, placement.shape, count)


def cut_vocabulary(shape: Shape, rank: int, size: int) -> Placement:
    """ceil(rows / size) rows of a table whose first dim is the vocabulary; the last ranks' are padded to that."""
    rows = vocabulary_rows(shape[0], size)
    begin = min(rank * rows, shape[0])
    held = min(rows, shape[0] - begin)
    local = (rows, *shape[1:])
    if held == rows:
        return Placement(Layout.box(shape, (begin, *(0 for _ in shape[1:])), local), local)
    boxes = [(Box((begin, *(0 for _ in shape[1:])), (held, *shape[1:])), (0,) * len(shape))] if held else []
    return Placement(Layout.boxes(shape, boxes), local)


def vocabulary_rows(vocabulary: int, size: int) -> int:
    """Rows that each of `size` ranks holds, padding included."""
    return -(-vocabulary // size)
