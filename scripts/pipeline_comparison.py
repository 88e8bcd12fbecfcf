"""Runs the stages of a pipeline in one process, and compares them with the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.pipeline.staged_model import StagedModel, staged
from stepmark.runtime.collectives import NoCollectives
from stepmark.runtime.context import Context
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import DATA, PIPELINE, TENSOR, Mesh
from stepmark.runtime.rank_grid import RankGrid


class Coordinate(NoCollectives):
    """A place on an axis whose other ranks are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def pipeline_mesh(rank: int, ranks: int) -> Mesh:
    """The mesh of one rank of a pipeline."""
    context = Context(World(rank, ranks, rank, ranks), EagerRuntime(torch.device("cpu")), HostGroup(rank, ranks))
    axes = {PIPELINE: Coordinate(rank, ranks), DATA: NoCollectives(), TENSOR: NoCollectives()}
    return Mesh(context, RankGrid({PIPELINE: ranks, DATA: 1, TENSOR: 1}), axes)  # type: ignore[arg-type]


class Pipeline:
    """Copies of a model, each cut as one rank's part."""

    def __init__(self, model: Any, ranks: int, chunks: int = 1) -> None:
        self.meshes = [pipeline_mesh(rank, ranks) for rank in range(ranks)]
        self.parts = [copy.deepcopy(model) for _ in range(ranks)]
        self._stages: list[StagedModel] = []
        for part, mesh in zip(self.parts, self.meshes, strict=True):
            parallelize(part, mesh, pipeline_chunks=chunks)
            found = staged(part)
            assert found is not None
            self._stages.append(found)

    def forward(self, body: dict[str, Any], last: dict[str, Any]) -> tuple[Any, list[tuple[Tensor | None, Tensor]]]:
        """The outputs of the last stage, which is called with `last`, and what each stage started from and gave.
        `body`: what the others are called with."""
        hidden: Tensor | None = None
        passes: list[tuple[Tensor | None, Tensor]] = []
        for number in range(self._stages[0].plan.stages):
            stages = self._stages[number % len(self._stages)]
            start = None if hidden is None else hidden.detach().requires_grad_(torch.is_grad_enabled())
            received = None if start is None else _giving(start)
            if number == stages.last:
                assert received is not None
                outputs = stages.final(received, lambda stages=stages: stages.model(**last))
                return outputs, [*passes, (start, outputs.loss if "loss" in outputs else outputs.logits)]
            hidden = stages.hidden_states(number, received, lambda stages=stages: stages.model(**body))
            passes.append((start, hidden))
        raise AssertionError("a pipeline has a last stage")

    def backward(self, passes: list[tuple[Tensor | None, Tensor]]) -> None:
        """The backward passes of all stages."""
        gradient = None
        for start, output in reversed(passes):
            torch.autograd.backward([output], None if gradient is None else [gradient])
            gradient = None if start is None else start.grad


def _giving(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def tokens_for(vocabulary: int) -> Tensor:
    """Two samples of eight tokens."""
    return torch.randint(3, vocabulary, (2, 8), generator=torch.Generator().manual_seed(0))


def difference(model: Any, ranks: int, chunks: int = 1) -> str:
    """What the stages compute differently from the whole model, "" if nothing: logits in evaluation with padding, the
    loss and the gradient of every parameter in training. Everything is equal bit for bit, except the gradient of a tied
    table, a sum in another order."""
    tokens = tokens_for(model.config.get_text_config(decoder=True).vocab_size)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    pipeline = Pipeline(model, ranks, chunks)
    options = {"use_cache": False}
    with torch.no_grad():
        padded = {"input_ids": tokens, "attention_mask": mask, **options}
        for each in (model, *pipeline.parts):
            each.eval()
        outputs, _ = pipeline.forward(padded, padded)
        if not torch.equal(outputs.logits, model(**padded).logits):
            return "logits of padded samples differ"
    for each in (model, *pipeline.parts):
        each.train()
    return training_difference(model, pipeline, {"input_ids": tokens, **options}, tokens)


def router_difference(model: Any, ranks: int, chunks: int = 1) -> str:
    """The same of training with the loss over the routers of all layers, without padded tokens."""
    config = model.config.get_text_config(decoder=True)
    config.output_router_logits = True
    model.zero_grad()
    tokens = tokens_for(config.vocab_size)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    try:
        if model(**inputs, labels=tokens).aux_loss is None:
            return "there is no loss over routers"
        return training_difference(model, Pipeline(model, ranks, chunks), inputs, tokens)
    finally:
        config.output_router_logits = False


def training_difference(model: Any, pipeline: Pipeline, inputs: dict[str, Any], labels: Tensor) -> str:
    """What stages compute differently in one step of training, "" if nothing."""
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    outputs, passes = pipeline.forward(inputs, {**inputs, "labels": labels})
    pipeline.backward(passes)
    if not torch.equal(outputs.loss, loss):
        return f"the loss differs by {abs(float(outputs.loss - loss)):.1e}"
    return _gradient_difference(model, pipeline.parts)


def _gradient_difference(model: Any, parts: list[Any]) -> str:
    held = [dict(part.named_parameters()) for part in parts]
    for name, parameter in model.named_parameters():
        found = [each[name].grad for each in held if name in each]
        if not found:
            return f"no stage has {name}"
        given = [gradient for gradient in found if gradient is not None]
        if parameter.grad is None:
            if given:
                return f"{name} has a gradient"
            continue
        if not given:
            return f"{name} has no gradient"
        scale = float(parameter.grad.abs().max())
        gap = float((sum(given) - parameter.grad).abs().max())
        if gap > (0 if len(found) == 1 else 1e-6 * scale):
            return f"the gradient of {name} differs by {gap / max(scale, 1e-12):.1e} of its largest value"
    return ""
