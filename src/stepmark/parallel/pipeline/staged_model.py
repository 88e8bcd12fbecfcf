"""Cuts a model into pipeline stages, in place, and runs one of them.

A rank keeps the modules of its own stages, at their places and under their names, so that optimizers and checkpoints
see parameters with global names; everything else that is learned is replaced by a placeholder (placeholders.py). Where
a rank has several stages (chunks), the others are swapped out while one of them runs.

The last stage keeps an embedding that is tied to the head, without calling it: its gradient is a part of the table's,
and the first stage has the other part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from stepmark.errors import UsageError
from stepmark.parallel.pipeline.balance import active_experts, is_of_experts, routed_experts
from stepmark.parallel.pipeline.placeholders import (
    EndingLayer,
    ReceivingLayer,
    SkippedLayer,
    StageEnd,
    collect_router_logits,
    skipped,
)
from stepmark.parallel.pipeline.stage_plan import StagePlan, asked_of_all_layers
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of
from stepmark.sharding.replication import annotate_replication, replication_of

Result = TypeVar("Result")
# Places in the module tree, what is there for a time, and what is there else.
Swaps = list[tuple[dict[str, nn.Module | None], str, nn.Module, nn.Module]]


@dataclass(frozen=True)
class ModelSize:
    """Sums over the parameters of a complete model, each counted once, over all shards: elements, and bytes. In the
    last three, experts count as far as a token goes through them, where the config tells."""

    elements: int
    trained: int  # of those that require gradients
    nbytes: int  # in their own dtypes
    multiplied: int  # of those in matrix products: not an embedding that is only looked up, but one tied to the head
    outside_embeddings: int  # of those that are not an embedding's, whatever else it is tied to
    active: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """The size of a model that was not cut into pipeline stages; it may be sharded otherwise."""
        sizes = {id(each): math.prod((layout_of(each) or each).shape) for each in model.parameters()}
        nbytes = sum(sizes[id(parameter)] * parameter.element_size() for parameter in model.parameters())
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        used = {
            id(parameter)
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }
        config: Any = getattr(model, "config", None)
        share = active_experts(config.get_text_config()) if hasattr(config, "get_text_config") else None
        routed = {id(each): sizes[id(each)] for name, each in model.named_parameters() if is_of_experts(name)}
        idle = round((1 - (share or 1.0)) * sum(routed.values()))
        multiplied = sum(size for key, size in sizes.items() if key not in looked_up - used)
        trained = sum(sizes[id(parameter)] for parameter in model.parameters() if parameter.requires_grad)
        outside = sum(size for key, size in sizes.items() if key not in looked_up)
        total = sum(sizes.values())
        return cls(total, trained, nbytes, multiplied - idle, outside - idle, total - idle)


class StagedModel:
    """One rank's stages of a model, of which `plan`, `size` and `experts` are those of the complete one."""

    def __init__(self, model: nn.Module, plan: StagePlan, mesh: Mesh) -> None:
        self.model = model
        self.plan = plan
        self.size = ModelSize.of(model)
        self.experts = routed_experts(model)
        self.own = list(range(mesh.pipeline.rank, plan.stages, mesh.pipeline.size))  # the numbers of its stages
        self._active = False
        self._asked = asked_of_all_layers(model)
        if plan.routers is not None:
            collect_router_logits(model)
        self._receivers: dict[int, ReceivingLayer] = {}
        layers: Any = model.get_submodule(plan.layers)
        found: dict[str, nn.Module] = {f"{plan.layers}.{index}": layer for index, layer in enumerate(layers)}
        found |= {name: model.get_submodule(name) for name in (*plan.before, *plan.after)}
        running = {stage: self._arrangement(stage, found) for stage in self.own}
        resting = self._resting(found, running)
        homes = {name: model.get_submodule(name.rpartition(".")[0])._modules for name in found}

        def swaps(modules: dict[str, nn.Module]) -> Swaps:
            others = [(name, module) for name, module in modules.items() if module is not resting[name]]
            return [(homes[name], name.rpartition(".")[2], module, resting[name]) for name, module in others]

        self._swaps = {stage: swaps(running[stage]) for stage in self.own}  # while a stage runs
        self._away = swaps(found)  # while the model is complete
        for parameter in self.tied_parameters():  # both ends have a part of its gradient
            annotate_replication(parameter, replace(replication_of(parameter, mesh.tensor_parallel.size), stages=2))
        complete = list(model.parameters())
        for name, module in resting.items():
            homes[name][name.rpartition(".")[2]] = module
        own = {id(parameter) for parameter in model.parameters()}
        others = [each for each in complete if id(each) not in own]
        outline = {id(each): nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in others}
        # Parameters that only other ranks have.
        self.elsewhere = WeakIdKeyDictionary(dict.fromkeys((*others, *outline.values())))
        away = {each for _, _, module, _ in self._away for each in module.modules()}
        for module in away.difference(model.modules()):
            module._parameters.update({key: outline.get(id(each), each) for key, each in module._parameters.items()})
            module._buffers.update({key: each.to("meta") for key, each in module._buffers.items() if each is not None})
        self._host = mesh.context.host
        model.register_forward_pre_hook(self._check_active, prepend=True)

    @property
    def last(self) -> int:
        """The number of the stage that computes logits and loss."""
        return self.plan.stages - 1

    def tied_parameters(self) -> list[nn.Parameter]:
        """The tables that both ends hold; none on ranks between them."""
        names = self.plan.tied if {0, self.last} & set(self.own) else ()
        return [parameter for name in names for parameter in self.model.get_submodule(name).parameters()]

    def _arrangement(self, stage: int, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """What is at each place while a stage runs."""
        plan, (begin, end) = self.plan, self.plan.bounds[stage]
        like = next(found[f"{plan.layers}.{begin}"].parameters())
        arranged: dict[str, nn.Module] = {}
        for index in range(plan.bounds[-1][1]):
            name = f"{plan.layers}.{index}"
            layer = found[name]
            if begin <= index < end:
                arranged[name] = layer
            elif index == begin - 1:
                arranged[name] = self._receivers[stage] = ReceivingLayer(layer, plan.returns, plan.routers, like.dtype)
            else:
                arranged[name] = EndingLayer(layer, plan.routers) if index == end else SkippedLayer(layer, plan.returns)
        for name in plan.before:
            arranged[name] = found[name] if stage == 0 else skipped(found[name], like)
        for name in plan.after:
            arranged[name] = found[name] if stage == self.last else skipped(found[name], like)
        return arranged

    def _resting(self, found: dict[str, nn.Module], running: dict[int, dict[str, nn.Module]]) -> dict[str, nn.Module]:
        """What is at each place between runs: everything that this rank keeps."""
        resting = dict(running[self.own[0]])
        for arranged in running.values():
            resting |= {name: module for name, module in arranged.items() if module is found[name]}
        if self.last in self.own:
            resting |= {name: found[name] for name in self.plan.tied}
        return resting

    @contextmanager
    def complete(self) -> Iterator[None]:
        """In the block the model has the modules of all ranks, whose parameters are on the meta device where this rank
        has none, so that what goes by the positions of parameters is the same on all ranks. Collective."""
        flags = [(name, each.requires_grad) for name, each in self.model.named_parameters()]
        trained = dict(pair for pairs in self._host.all_gather(flags) for pair in pairs)
        with _swapped(self._away):
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(trained.get(name, parameter.requires_grad))
            yield

    def leave_out_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the parameters that only other ranks have now out of an optimizer made before the model was cut."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.elsewhere:
                    optimizer.state.pop(parameter, None)
            group["params"] = [each for each in group["params"] if each not in self.elsewhere]

    def _check_active(self, module: nn.Module, args: Any) -> None:
        if not self._active:
            raise UsageError(
                "the model is cut into pipeline stages, of which this rank has only some; train it with TrainStep or "
                "Trainer, which run all of them, instead of calling it"
            )

    def _check_unchanged(self) -> None:
        """Raises UsageError where a part of the layers would answer what the configuration asks of all of them."""
        for name in asked_of_all_layers(self.model):
            if name not in self._asked:
                raise UsageError(
                    f"{name}: it was turned on after the model was cut into pipeline stages, which pass on what they "
                    "were cut for; turn it on in the configuration before"
                )

    @contextmanager
    def _arranged(self, stage: int, received: Callable[[], Tensor] | None) -> Iterator[None]:
        self._check_unchanged()
        if received is not None:
            self._receivers[stage].received = received
        self._active = True
        try:
            with _swapped(self._swaps[stage]):
                yield
        finally:
            self._active = False
            if received is not None:
                self._receivers[stage].received = None

    def hidden_states(self, stage: int, received: Callable[[], Tensor] | None, call: Callable[[], Any]) -> Tensor:
        """Runs a stage other than the last, and returns the hidden states after its last layer. `received` gives those
        that it starts from, when it needs them; None for the first stage. `call` calls the model."""
        with self._arranged(stage, received):
            try:
                call()
            except StageEnd as end:
                return end.hidden
        raise AssertionError("the model did not call the layer after the stage")

    def final(self, received: Callable[[], Tensor], call: Callable[[], Result]) -> Result:
        """Runs the last stage: what `call`, which calls the model, returns. `received`: see `hidden_states`."""
        with self._arranged(self.last, received):
            return call()


@contextmanager
def _swapped(swaps: Swaps) -> Iterator[None]:
    for modules, key, module, _ in swaps:
        modules[key] = module
    try:
        yield
    finally:
        for modules, key, _, resting in swaps:
            modules[key] = resting


_staged: WeakKeyDictionary[nn.Module, StagedModel] = WeakKeyDictionary()


def cut_into_stages(model: nn.Module, plan: StagePlan, mesh: Mesh) -> StagedModel:
    """Cuts the model, in place, after its parameters were sharded over the tensor parallel axis."""
    _staged[model] = StagedModel(model, plan, mesh)
    return _staged[model]


def complete_size(model: nn.Module) -> ModelSize:
    """The size of the complete model, of which this rank may have a part."""
    found = staged(model)
    return ModelSize.of(model) if found is None else found.size


def staged(model: nn.Module) -> StagedModel | None:
    """This rank's stages of a model that was cut; None for any other."""
    return _staged.get(model)
