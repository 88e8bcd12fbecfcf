"""Which modules tensor parallelism shards, and which slice of each parameter a rank then holds.

A plan maps names of modules, or of parameters that have no module of their own, to styles (with `*` for a layer's
number), as transformers' `tp_plan`s do. What a plan does not name is replicated.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.errors import UsageError
from stepmark.parallel.architectures import TENSOR_PARALLEL
from stepmark.sharding.layout import Box, Layout, Shape, annotate
from stepmark.sharding.views import local_shard

COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input")
STYLES = (
    *COLUMN_STYLES,
    *ROW_STYLES,
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "all_reduce",
    "replicate",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "local_params",
)
ADDED_ONCE = "added_once"
"""The style of a bias of experts that every rank adds to its part of a sum; no plan names it."""

NOT_INSIDE = ("moe_tp_experts", "local_params")  # styles that say nothing of a module's own parameters

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("plans.toml").read_text(encoding="utf-8"))

PLANS: dict[str, dict[str, str]] = _TABLES["plans"]
"""Our plans, by model type, for models without one; names are relative to the base model."""

ADDED: dict[str, dict[str, str]] = _TABLES["added"]
"""What transformers' plan of a model type lacks or has wrong; names are relative to the base model."""

REFUSED: dict[str, str] = _TABLES["refused"]
"""Model types whose plan in transformers does not reproduce the unsharded model's results, and why."""

LATENT_ATTENTION = ("kv_a_proj_with_mqa", "kv_a_proj", "kv_a_layernorm")
BEFORE_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm")
"""What multi-head latent attention computes for all heads, before a layer that is sharded by columns."""

_INSIDE_SAVED_MODULE = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.)")  # in names, with peft


@dataclass(frozen=True)
class Style:
    """`kind` is one of STYLES. `packed`: equally wide projections that are concatenated in the sharded dim."""

    kind: str
    packed: int = 1

    @property
    def columns(self) -> bool:
        """Whether it shards a layer along its outputs."""
        return self.kind in COLUMN_STYLES

    @property
    def rows(self) -> bool:
        """Whether it shards a layer along its inputs."""
        return self.kind in ROW_STYLES


@dataclass(frozen=True)
class Placement:
    """This rank's shard of a parameter: `layout`, in a local tensor of `shape`, whose other elements are zero padding.
    `count` neighbouring ranks hold the same shard."""

    layout: Layout
    shape: Shape
    count: int = 1

    def replace(self, parameter: nn.Parameter) -> None:
        """Replaces the value of the complete parameter by this rank's shard, which gets its layout."""
        if parameter.is_meta:
            parameter.data = torch.empty(self.shape, dtype=parameter.dtype, device="meta")
        else:
            shard = local_shard(parameter.detach().cpu(), self.layout, self.shape)
            parameter.data = shard.to(parameter.device)
            parameter.grad = None
        annotate(parameter, self.layout)


def plan_of(model: Any, given: Mapping[str, str] | None = None) -> dict[str, Style]:
    """The name of a module or parameter to its style, for a transformers model; the user's plan, `given`, takes
    precedence over the model's own.

    Raises UsageError for a model without a plan, for a model's own plan that was not verified, for unsupported styles,
    and for names in the user's plan that match no module.
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
            f"tensor_parallel_size: the plan of {type(model).__name__} has unsupported styles: {', '.join(unknown)}; "
            f"supported are {', '.join(STYLES)}"
        )
    found, matched = _match(model, patterns)
    missing = sorted(set(patterns) - matched)
    if given is not None and missing:
        raise UsageError(
            f"plan: {type(model).__name__} has no module or parameter {missing[0]!r}; use the names of "
            "named_modules() and named_parameters(), with * for a layer's number"
        )
    kind = model_type(model)
    if given is None and kind not in TENSOR_PARALLEL:
        raise UsageError(
            f"tensor_parallel_size: {kind} is not among the architectures that were verified against the unsharded "
            "model (docs/tables.md); compare the results yourself and pass parallelize(plan=...), with "
            "model.tp_plan if it is right"
        )
    return found


def _match(model: Any, patterns: Mapping[str, str]) -> tuple[dict[str, Style], set[str]]:
    """The modules and parameters that match a pattern, and the patterns that match one."""
    compiled = [(re.compile(expression(pattern)), pattern, style) for pattern, style in patterns.items()]
    found: dict[str, Style] = {}
    matched = set()
    for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)):
        plain = _INSIDE_SAVED_MODULE.sub("", name)
        for compiled_name, pattern, style in compiled:
            if compiled_name.fullmatch(plain) and plain != name:
                raise UsageError(
                    f"tensor_parallel_size: {plain} is inside a module that modules_to_save of the adapter names; name "
                    "the layers in it instead"
                )
            if compiled_name.fullmatch(name):
                found[name] = parse_style(style)
                matched.add(pattern)
    for name in [name for name, style in found.items() if style.kind == "moe_tp_experts"]:
        for own, _ in model.get_submodule(name).named_parameters(prefix=name, recurse=False):
            if own not in found and own.endswith("_bias") and own.removesuffix("_bias") in found:
                found[own] = Style(ADDED_ONCE)
    return found, matched


def parse_style(text: str) -> Style:
    """Parses `packed_colwise` (two projections in one) or `packed_colwise:3` (three)."""
    kind, _, count = text.partition(":")
    if not kind.startswith("packed_"):
        return Style(kind)
    return Style(kind.removeprefix("packed_"), int(count or 2))


def own_plan(model: Any) -> dict[str, str]:
    """transformers' plan with our additions, or our plan, verified or not; empty if there is none.

    Raises UsageError for a model whose plan is known to be wrong.
    """
    kind = model_type(model)
    if kind in REFUSED:
        raise UsageError(f"tensor_parallel_size: {type(model).__name__} is not supported: {REFUSED[kind]}")
    own = dict(getattr(model, "_tp_plan", None) or {})
    ours = {**PLANS.get(kind, {}), **ADDED.get(kind, {})}
    prefix = "" if getattr(model, "base_model", model) is model else f"{model.base_model_prefix}."
    own |= {prefix + name: style for name, style in ours.items()}
    latent = [name.rpartition(".")[0] for name, style in own.items() if style == "mla_kv_a_proj"]
    return {**{f"{name}.{child}": "replicate" for name in latent for child in BEFORE_HEADS}, **own}


def model_type(model: Any) -> str:
    """As its configuration names it."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def expression(pattern: str) -> str:
    """The regular expression of a plan's name."""
    return re.escape(pattern).replace(r"\*", r"\d+")


def check_plan(model: Any, styles: Mapping[str, Style], exempt: Iterable[nn.Module]) -> None:
    """Checks that a plan covers every module that would otherwise train incorrectly without an error.

    Between a layer sharded by columns and one sharded by rows, activations differ among ranks. A module with parameters
    there, if the plan does not name it, would get partial gradients; or its parameters are for all heads, and every
    rank would use the first ones. Neither has to fail. Which modules lie there cannot be seen from outside, so the plan
    must name every module with parameters inside a module that has children whose outputs or inputs stay sharded.

    `exempt`: modules that the plan need not cover (embedding and head). Raises UsageError, naming the module.
    """
    modules = dict(model.named_modules())
    exempt_ids = {id(module) for module in exempt}
    parents = {
        name.rpartition(".")[0]
        for name, style in styles.items()
        if style.kind in ("colwise", "rowwise") and id(modules.get(name)) not in exempt_ids
    }
    covering = {name for name, style in styles.items() if style.kind not in NOT_INSIDE}
    for parent in sorted(parents):
        _check_region(parent, modules[parent], styles, covering, exempt_ids)


def _check_region(
    parent: str, region: nn.Module, styles: Mapping[str, Style], covering: Container[str], exempt_ids: set[int]
) -> None:
    latent = [f"{parent}.{name}" for name, _ in region.named_children() if name in LATENT_ATTENTION]
    if latent and not any(name in styles and styles[name].kind == "mla_kv_a_proj" for name in latent):
        raise UsageError(
            f"tensor_parallel_size: {latent[0]} computes keys that all heads share (multi-head latent attention), and "
            "the plan does not give it the style mla_kv_a_proj; add it to a custom plan"
        )
    for inner, module in region.named_modules(prefix=parent):
        if id(module) in exempt_ids:
            continue
        own = [name for name, _ in module.named_parameters(inner, recurse=False) if not is_covered(name, covering)]
        if own:
            raise UsageError(
                f"tensor_parallel_size: the plan shards modules in {parent or 'the model'} but does not mention "
                f"{own[0]}; add its module to a custom plan: 'replicate' if all ranks "
                "compute the same with it, 'replicated_with_grad_allreduce' if each uses it on its own heads or units"
            )


def is_covered(name: str, styles: Container[str]) -> bool:
    """Whether a plan names the parameter, or a module that contains it."""
    while name not in styles and "." in name:
        name = name.rpartition(".")[0]
    return name in styles


def shard(shape: Shape, dim: int, rank: int, size: int, packed: int = 1, copies: int = 1) -> Placement:
    """This rank's equal shard along `dim`, of each of `packed` projections; `copies` neighbouring ranks have it."""
    dim %= len(shape)
    width = shape[dim] // packed
    part = width * copies // size

    def along(values: Shape, value: int) -> Shape:
        return (*values[:dim], value, *values[dim + 1 :])

    zeros, local = (0,) * len(shape), along(shape, packed * part)
    begins = [number * width + rank // copies * part for number in range(packed)]
    boxes = [Box(along(zeros, begin), along(shape, part)) for begin in begins]
    if packed == 1:
        return Placement(Layout.box(shape, *boxes[0]), local, copies)
    places = [along(zeros, number * part) for number in range(packed)]
    return Placement(Layout.boxes(shape, list(zip(boxes, places, strict=True))), local, copies)


def shard_vocabulary(shape: Shape, rank: int, size: int) -> Placement:
    """ceil(rows / size) rows of a table whose first dim is the vocabulary; the last ranks' shards are padded."""
    rows = vocabulary_rows(shape[0], size)
    begin = min(rank * rows, shape[0])
    held = min(rows, shape[0] - begin)
    local, zeros = (rows, *shape[1:]), (0,) * len(shape)
    box = Box((begin, *zeros[1:]), (held, *shape[1:]))
    if held == rows:
        return Placement(Layout.box(shape, *box), local)
    return Placement(Layout.boxes(shape, [(box, zeros)] if held else []), local)


def vocabulary_rows(vocabulary: int, size: int) -> int:
    """Rows held by each of `size` ranks, padding included."""
    return -(-vocabulary // size)
