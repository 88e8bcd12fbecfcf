"""Makes a transformers model tensor parallel: cuts its parameters and wires its modules, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.attention_heads import Heads, heads_of
from stepmark.parallel.tensor.autograd_collectives import reduce_from
from stepmark.parallel.tensor.dropout import RegionSeeds, has_dropout
from stepmark.parallel.tensor.layers import TensorParallelRegion, cut_columns, cut_rows, input_dim
from stepmark.parallel.tensor.plan_checks import check_plan
from stepmark.parallel.tensor.plans import (
    COLUMN_STYLES,
    ROW_STYLES,
    Placement,
    Style,
    cut,
    cut_shared,
    cut_vocabulary,
    plan_of,
)
from stepmark.parallel.tensor.sequence import cut_sequence, partial_parameters, sequence_modules
from stepmark.parallel.tensor.vocabulary import VocabParallelHead, Vocabulary, cut_embedding, cut_loss
from stepmark.runtime.collectives import Collectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, Shape, annotate, layout_of
from stepmark.sharding.replication import Replication, annotate_replication

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParallelizedModel:
    """How a model was cut."""

    mesh: Mesh
    sequence_parallel: bool
    parallelize_embedding: bool


_applied: WeakKeyDictionary[nn.Module, ParallelizedModel] = WeakKeyDictionary()


def parallelized(model: nn.Module) -> ParallelizedModel | None:
    """How `parallelize` has cut the model; None where it has not."""
    return _applied.get(model)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    parallelize_embedding: bool = True,
    plan: Mapping[str, str] | None = None,
) -> Model:
    """Cuts the model over the mesh's tensor parallel axis, in place, and returns it.

    Every rank gives the same whole model, on the host or on the meta device, before it goes to the device and before
    there is an optimizer. Parameters stay the objects they are (ties stay ties), hold this rank's part afterwards and
    are annotated with its layout. While training with labels the outputs hold a loss and no logits; otherwise logits
    are whole.

    `plan` maps module names to styles, in place of the model's own tp_plan; embedding and head are cut along the
    vocabulary whatever a plan says, unless `parallelize_embedding` is off.

    Raises UsageError, before anything is changed, for a model without a plan that is known to be right, or with
    unsupported styles; for learned modules among cut ones that the plan does not name; for sizes that do not divide;
    and for a model that has no sequence parallelism where that is asked for.
    """
    axis = mesh.tensor_parallel
    if axis.size == 1:
        return model
    work = _Work(model, mesh, plan_of(model, plan), parallelize_embedding, sequence_parallel)
    work.cut_parameters()
    work.wire()
    _applied[model] = ParallelizedModel(mesh, sequence_parallel, parallelize_embedding)
    return model


@dataclass(frozen=True)
class _Cut:
    name: str
    parameter: nn.Parameter
    placement: Placement


class _Work:
    """One call of `parallelize`: everything is checked when it is made, and changed afterwards."""

    def __init__(self, model: Any, mesh: Mesh, plan: dict[str, Style], embedding: bool, sequence: bool) -> None:
        self._model = model
        self._mesh = mesh
        self._axis: Collectives = mesh.tensor_parallel
        if any(layout_of(parameter) is not None for parameter in model.parameters()):
            raise UsageError("parallelize: the model is cut already; give it a whole one")
        if sequence:
            sequence_modules(model)
        self._sequence = sequence
        tables = _tables(model)
        self._tables = tables if embedding else []
        skipped = set(tables)
        modules = dict(model.named_modules())
        self._styles = [(name, modules[name], style) for name, style in plan.items() if modules[name] not in skipped]
        self._heads = self._find_heads(modules)
        self._cuts = [*self._vocabulary_cuts(), *self._plan_cuts()]
        check_plan(model, plan, tables)

    def _find_heads(self, modules: dict[str, nn.Module]) -> dict[str, Heads]:
        """Of each module with heads that are cut."""
        parents = {_parent(name) for name, _, style in self._styles if style.kind == "colwise"}
        found = {}
        for name in sorted(parents):
            heads = heads_of(name, modules[name], self._model.config, self._axis.size)
            if heads is not None:
                found[name] = heads
        return found

    def _vocabulary_cuts(self) -> Iterator[_Cut]:
        for module in self._tables:
            for name, parameter in module.named_parameters(recurse=False):
                shape = tuple(parameter.shape)
                yield _Cut(name, parameter, cut_vocabulary(shape, self._axis.rank, self._axis.size))

    def _plan_cuts(self) -> Iterator[_Cut]:
        for name, module, style in self._styles:
            if style.kind in COLUMN_STYLES or style.kind in ROW_STYLES:
                inputs = input_dim(module)
                rows = style.kind in ROW_STYLES
                heads = self._heads.get(_parent(name))
                groups = heads.groups(name.rpartition(".")[2]) if heads and not rows else None
                for own, parameter in module.named_parameters(recurse=False):
                    if rows and parameter.dim() == 1:
                        continue  # the bias is added once, after the sum
                    dim = 0 if parameter.dim() == 1 else inputs if rows else 1 - inputs
                    yield _Cut(f"{name}.{own}", parameter, self._place(f"{name}.{own}", parameter, dim, style, groups))
            elif style.kind == "embedding_rowwise":
                shape = tuple(module.weight.shape)
                yield _Cut(name, module.weight, cut_vocabulary(shape, self._axis.rank, self._axis.size))

    def _place(self, name: str, parameter: Tensor, dim: int, style: Style, groups: int | None) -> Placement:
        shape, rank, size = tuple(parameter.shape), self._axis.rank, self._axis.size
        if groups is not None and groups < size:
            return cut_shared(shape, dim, rank, size, groups)
        if shape[dim] % (style.packed * size):
            packed = f" of {style.packed} projections" if style.packed > 1 else ""
            raise UsageError(
                f"tensor_parallel_size: {name}, {list(shape)}{packed}, cannot be cut in {size} equal parts along dim "
                f"{dim}; choose a divisor of {shape[dim] // style.packed}"
            )
        return cut(shape, dim, rank, size, style.packed)

    def cut_parameters(self) -> None:
        for each in self._cuts:
            if layout_of(each.parameter) is not None:
                continue  # tied to one that was cut before
            _replace(each.parameter, each.placement)
            annotate(each.parameter, each.placement.layout)
            if each.placement.count > 1:
                annotate_replication(each.parameter, Replication(each.placement.count, partial=True))
        partial = [m for _, m, style in self._styles if style.kind == "replicated_with_grad_allreduce"]
        whole = [parameter for module in partial for parameter in module.parameters()]
        whole += partial_parameters(self._model) if self._sequence else []
        for parameter in whole:
            if layout_of(parameter) is None:
                annotate_replication(parameter, Replication(self._axis.size, partial=True))

    def wire(self) -> None:
        model, axis, runtime = self._model, self._axis, self._mesh.runtime
        seeds = RegionSeeds(runtime, axis.rank, has_dropout(model))
        model.register_forward_pre_hook(lambda module, args: seeds.begin(module))
        modules = dict(model.named_modules())
        regions: dict[str, TensorParallelRegion] = {}
        for name, module, style in self._styles:
            parent = _parent(name)
            if (style.kind in COLUMN_STYLES or style.kind in ROW_STYLES) and parent not in regions:
                regions[parent] = TensorParallelRegion(modules[parent], axis, seeds, len(regions), self._sequence)
            if style.kind in COLUMN_STYLES:
                cut_columns(module, regions[parent], style.kind == "colwise_gather_output")
            elif style.kind in ROW_STYLES:
                cut_rows(module, regions[parent], style.kind == "rowwise_split_input")
            elif style.kind == "embedding_rowwise":
                assert isinstance(module, nn.Embedding)
                cut_embedding(module, Vocabulary(module.num_embeddings, axis, runtime))
            elif style.kind == "all_reduce":
                module.register_forward_hook(lambda module, args, output: reduce_from(output.clone(), axis))
        for name, heads in self._heads.items():
            heads.adapt(modules[name])
        self._wire_vocabulary()
        if self._sequence:
            head = model.get_output_embeddings()
            cut_sequence(model, axis, seeds, any(module is head for module in self._tables))

    def _wire_vocabulary(self) -> None:
        head = self._model.get_output_embeddings()
        for module in self._tables:
            size = next(c.placement.layout.shape[0] for c in self._cuts if c.parameter is module.weight)
            vocabulary = Vocabulary(size, self._axis, self._mesh.runtime)
            if isinstance(module, nn.Embedding):
                cut_embedding(module, vocabulary)
            else:
                cut = VocabParallelHead(module, vocabulary, self._sequence)
                if module is head:
                    cut_loss(self._model, cut)


def _tables(model: Any) -> list[Any]:
    """The input embedding, the head, and whatever is tied to one of them."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(module.weight) for module in ends if isinstance(module, nn.Embedding | nn.Linear)}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.Linear) and id(module.weight) in weights
    ]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _replace(parameter: nn.Parameter, placement: Placement) -> None:
    """Gives the parameter this rank's part as its value."""
    if parameter.is_meta:
        parameter.data = torch.empty(placement.shape, dtype=parameter.dtype, device="meta")
        return
    part = local_part(parameter.detach().cpu(), placement.layout, placement.shape)
    parameter.data = part.to(parameter.device)
    parameter.grad = None


def local_part(whole: Tensor, layout: Layout, shape: Shape) -> Tensor:
    """The local tensor of `shape` that `layout` describes, taken from the whole one, on the host; padding is zero."""
    part = torch.zeros(shape, dtype=whole.dtype)
    for each in layout.parts:
        box = each.piece.box
        at = each.at if isinstance(each.at, tuple) else (0,) * part.dim()
        target = tuple(slice(start, start + length) for start, length in zip(at, box.lengths, strict=True))
        source = tuple(slice(start, start + length) for start, length in zip(box.offsets, box.lengths, strict=True))
        part[target] = whole[source]
    return part
