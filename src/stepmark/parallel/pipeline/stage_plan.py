"""How a model would be cut into stages, and whether it can be: decided on the complete model, before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stepmark.errors import UsageError
from stepmark.parallel.architectures import ROUTER_LOSSES, STAGES
from stepmark.parallel.pipeline.balance import (
    CHECKPOINTED,
    EXPERTS,
    ONCE,
    balanced,
    bounds_of,
    checked_sizes,
    end_cost,
    layer_costs,
)
from stepmark.parallel.pipeline.placeholders import RouterColumns
from stepmark.parallel.tensor.dropout import has_dropout
from stepmark.runtime.collectives import Collectives

BEHIND_THE_LAYERS = ("final_layer_norm", "project_out")  # OPT defines these before its layers
OUTPUTS_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions")
ROUTER_LOGITS = "output_router_logits"


@dataclass(frozen=True)
class StagePlan:
    """A model's stages. Modules are given by their names."""

    layers: str  # the list of layers
    before: tuple[str, ...]  # learned modules that are called before the layers
    after: tuple[str, ...]  # those called after them, the head included
    bounds: tuple[tuple[int, int], ...]  # the first layer of each stage, and the one after its last
    returns: str  # what a layer returns: "tensor", "list", or "tuple2" for a tuple of two
    tied: tuple[str, ...]  # embeddings whose table is the head's, too
    draws: bool  # whether training draws random numbers
    routers: RouterColumns | None  # of routers' logits, where the loss needs the routers of all layers

    @property
    def stages(self) -> int:
        return len(self.bounds)


def plan_stages(
    model: Any, stages: int, sizes: Sequence[int] | None = None, along: Collectives | None = None
) -> StagePlan:
    """The plan for a complete causal language model of transformers, on any device. Raises UsageError where it cannot
    be cut, or not into so many stages.

    `sizes`: the layers of each stage; None: balanced by cost, which gradient checkpointing changes. `along`: the ranks
    that share the sequence, under sequence parallelism.
    """
    returns = _verified(model)
    config = model.config.get_text_config(decoder=True)
    name, layers = layers_of(model, config.num_hidden_layers)
    _check_layers(model, layers, stages)
    before, after = _outside(model, layers)
    modules = dict(model.named_modules())
    if sizes is None:
        end = end_cost([modules[each] for each in after])
        passes = CHECKPOINTED if checkpoints_gradients(model) else ONCE
        found = balanced(layer_costs(layers, config), end, stages, passes)
    else:
        found = checked_sizes(sizes, len(layers), stages)
    bounds = bounds_of(found)
    tied = _tied(model, name, before, after, bounds)
    return StagePlan(name, before, after, tuple(bounds), returns, tied, has_dropout(model), _routers(config, along))


def checkpoints_gradients(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on, as transformers' models note it. Their own property for it has another name
    in each major version."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _verified(model: Any) -> str:
    """What the layers of a verified model type return. Raises UsageError for any other."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in STAGES or type(model).__name__ != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind):
        raise UsageError(
            f"pipeline_parallel_size: {type(model).__name__} is not among the models that were verified to compute the "
            "same in stages (docs/tables.md); set it to 1"
        )
    for name in asked_of_all_layers(model):
        if name != ROUTER_LOGITS or kind not in ROUTER_LOSSES:
            raise UsageError(
                f"pipeline_parallel_size: the configuration's {name} asks for outputs of all layers, and no stage has "
                f"them; set {name} to false in config_overrides"
            )
    _check_layers_are_called(config)
    return STAGES[kind]


def asked_of_all_layers(model: Any) -> tuple[str, ...]:
    """The outputs of all layers, or of all their routers, that the configuration asks for."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    names = (*OUTPUTS_OF_ALL_LAYERS, ROUTER_LOGITS)
    return tuple(name for name in names if any(getattr(config, name, False) for config in configs))


def _routers(config: Any, along: Collectives | None) -> RouterColumns | None:
    experts = next((getattr(config, name) for name in EXPERTS if isinstance(getattr(config, name, None), int)), None)
    if not experts or not getattr(config, ROUTER_LOGITS, False):
        return None
    return RouterColumns(config.hidden_size, experts, along)


def _check_layers_are_called(config: Any) -> None:
    """Raises UsageError where training leaves out layers at random: a stage would not get its hidden states."""
    for name, value in vars(config).items():
        if name.endswith("layerdrop") and value:
            raise UsageError(
                f"pipeline_parallel_size: the configuration's {name} of {value} leaves out layers at random, and a "
                f"stage passes on what its layers compute; set {name} to 0 in config_overrides"
            )


def layers_of(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The name of the list of `count` layers, and the list. Raises UsageError where it is not clear which it is."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(True for _ in module.parameters())
    ]
    depth = min((name.count(".") for name, _ in lists), default=0)
    found = [(name, module) for name, module in lists if name.count(".") == depth]
    if len(found) != 1:
        raise UsageError(
            f"pipeline_parallel_size: {type(model).__name__} has {len(found) or 'no'} lists of {count} layers, and one "
            "is needed to cut it into stages; set it to 1"
        )
    return found[0]


def _check_layers(model: nn.Module, layers: nn.ModuleList, stages: int) -> None:
    if len({id(layer) for layer in layers}) < len(layers):
        raise UsageError(
            f"pipeline_parallel_size: {type(model).__name__} uses a layer several times, so that no stage can have it "
            "alone; set it to 1"
        )
    if stages > len(layers):
        raise UsageError(
            f"pipeline_parallel_size: {stages} stages (times pipeline_chunks) are more than the model's {len(layers)} "
            "layers, and each needs one; lower it"
        )


def _outside(model: Any, layers: nn.ModuleList) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The learned modules before and after the layers. Modules are called in the order in which they are defined, which
    holds for all types that were verified; the head is last wherever it is defined."""
    inside = {id(module) for module in layers.modules()}
    head = model.get_output_embeddings()
    before: list[str] = []
    after: list[str] = []
    seen_layers = False
    for own, module in model.named_modules():
        seen_layers |= module is layers
        if id(module) in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(True for _ in module.children()):
            raise UsageError(
                f"pipeline_parallel_size: {own or type(model).__name__} has parameters of its own besides those of its "
                "modules, so it cannot be cut into stages; set it to 1"
            )
        last = module is head or own.rpartition(".")[2] in BEHIND_THE_LAYERS
        (after if seen_layers or last else before).append(own)
    return tuple(before), tuple(after)


def _tied(
    model: nn.Module, name: str, before: Sequence[str], after: Sequence[str], bounds: Sequence[tuple[int, int]]
) -> tuple[str, ...]:
    """The embeddings that share their table with a later module. Raises UsageError where stages share another one."""
    stage_of = {f"{name}.{layer}": stage for stage, (begin, end) in enumerate(bounds) for layer in range(begin, end)}
    stage_of |= {**dict.fromkeys(before, 0), **dict.fromkeys(after, len(bounds) - 1)}
    homes: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        home = next(stage for place, stage in stage_of.items() if full.startswith(f"{place}."))
        homes.setdefault(id(parameter), set()).add(home)
        names.setdefault(id(parameter), []).append(full)
    tied = []
    for key in (key for key, stages in homes.items() if len(stages) > 1):
        owners = [full.rpartition(".")[0] for full in names[key]]
        at_the_ends = all(owner in before or owner in after for owner in owners)
        embeddings = [owner for owner in owners if owner in before]
        if not at_the_ends or not all(isinstance(model.get_submodule(each), nn.Embedding) for each in embeddings):
            raise UsageError(
                f"pipeline_parallel_size: {' and '.join(names[key][:2])} are one parameter in different stages, which "
                "is supported for an embedding tied to the head only; set it to 1, or choose other pipeline_layers"
            )
        tied += embeddings
    return tuple(tied)
