"""Makes a transformers model tensor parallel: shards its parameters, then inserts the collectives.

On a mesh with a pipeline it is cut into stages afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stepmark.config.full_sharding import FullSharding, full_sharding
from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import shard_fully
from stepmark.parallel.pipeline.stage_plan import plan_stages
from stepmark.parallel.pipeline.staged_model import cut_into_stages
from stepmark.parallel.tensor.adapted_layers import (
    AdaptedLayer,
    AddedAdapters,
    adapted_layers,
    called_models,
    check_adapters,
    is_wrapper,
    unwrapped,
)
from stepmark.parallel.tensor.attention_heads import Heads, heads_of
from stepmark.parallel.tensor.autograd_collectives import reduce_from
from stepmark.parallel.tensor.dropout import RegionSeeds, has_dropout, seed_regions
from stepmark.parallel.tensor.expert_parallel import ExpertParallelism
from stepmark.parallel.tensor.experts import (
    check_experts,
    check_grouped,
    divide_input,
    rotary_width,
    share_rotary_part,
    sum_experts,
)
from stepmark.parallel.tensor.layers import TensorParallelRegion, input_dim, shard_columns, shard_rows
from stepmark.parallel.tensor.plans import (
    ADDED_ONCE,
    COLUMN_STYLES,
    ROW_STYLES,
    Placement,
    Style,
    check_plan,
    plan_of,
    shard,
    shard_among_groups,
    shard_vocabulary,
)
from stepmark.parallel.tensor.sequence import Stack, refuse_hidden_states, sequence_stacks, shard_sequence
from stepmark.parallel.tensor.vocabulary import VocabParallelHead, Vocabulary, shard_embedding, use_vocab_parallel_loss
from stepmark.runtime.collectives import Collectives
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import agree_on_weights
from stepmark.sharding.layout import Layout, Shape, annotate, layout_of
from stepmark.sharding.replication import Replication, annotate_replication
from stepmark.sharding.views import copy_slices

logger = logging.getLogger("stepmark")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParallelizedModel:
    """How a model was parallelized."""

    mesh: Mesh
    sequence_parallel: bool
    parallelize_embedding: bool
    pipeline_layers: list[int] | None = None
    pipeline_chunks: int = 1
    fsdp: FullSharding | None = None


_applied: WeakKeyDictionary[nn.Module, ParallelizedModel] = WeakKeyDictionary()


def parallelized(model: nn.Module) -> ParallelizedModel | None:
    """How the model was parallelized; None where it was not."""
    return _applied.get(model)


def check_adapted(model: nn.Module, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
    """Raises UsageError for adapters that axes of these sizes rule out, and for a model that got one after it was
    sharded, as far as that is seen before it is called: one in a PeftModel, or one in a pipeline."""
    applied = _applied.get(model)
    staged = applied is not None and applied.mesh.pipeline.size > 1
    if (applied is None and unwrapped(model) in _applied) or (staged and any(map(is_wrapper, model.modules()))):
        raise UsageError(
            "model: it got an adapter of peft after it was sharded, which would train incorrectly; add adapters to the "
            "complete model, before Trainer or parallelize shards it"
        )
    check_adapters(model, tensor_parallel_size, pipeline_parallel_size)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    parallelize_embedding: bool = True,
    plan: Mapping[str, str] | None = None,
    pipeline_layers: Sequence[int] | None = None,
    pipeline_chunks: int = 1,
    fsdp: FullSharding | bool | str | None = None,
) -> Model:
    """Shards a transformers model over the mesh's tensor parallel axis, divides experts over its expert parallel ranks,
    and cuts it into stages along the pipeline, in place; or shards the parameters of any model over the data parallel
    axis (`fsdp`).

    Every rank passes the same complete model, before it is moved to the device and before an optimizer is created.
    Parameters stay the same objects, so ties are preserved; afterwards each holds this rank's shard and is annotated
    with its layout, which the Checkpointer reads. While the model trains with labels, its outputs contain a loss and no
    logits; otherwise the logits are complete. On a mesh with a pipeline each rank keeps the modules of its own stages,
    and `TrainStep` or `Trainer` runs them; the model cannot be called. On a mesh that has neither the model is returned
    unchanged.

    LoRA adapters of peft are sharded with their layers, and have to be in the model by then. Where the ranks have drawn
    different ones, all use those of rank 0.

    Args:
        model: A complete model, on the host or on the meta device.
        mesh: The mesh from `Mesh.create`.
        sequence_parallel: Shard activations between layers along the sequence, whose length must then be a multiple
            of the axis size. Default False.
        parallelize_embedding: Shard embedding and head along the vocabulary, whatever the plan says. Default True.
        plan: Module name (with `*` for a layer's number) to style, instead of the model's own `tp_plan`.
        pipeline_layers: The number of layers of each stage. Default: so that all stages cost as much, the embedding,
            the head and the loss counted.
        pipeline_chunks: Stages of each rank, for the interleaved schedule; rank r has the stages r, r + ranks and so
            on. Default 1.
        fsdp: Shard parameters over the data parallel ranks, on eager devices without the other two axes: true, a
            strategy such as `shard_grad_op`, or a `FullSharding`. Parameters become DTensors, other objects than
            before. Default None.

    Returns:
        The model that was passed.

    Raises:
        UsageError: Before anything is changed: the model has no plan that was verified, the plan has unsupported
            styles or misses a module with parameters among sharded ones, sizes are not divisible, the model does not
            support sequence parallelism, or it cannot be cut into stages.
    """
    tensor, pipeline, divided = mesh.tensor_parallel.size > 1, mesh.pipeline.size > 1, mesh.expert_parallel_size > 1
    sharding = fsdp if isinstance(fsdp, FullSharding) else full_sharding(fsdp, None)
    fully = sharding is not None and (tensor or pipeline or mesh.data_parallel.size > 1)
    if not tensor and not pipeline and not fully and not divided:
        return model
    if model in _applied:
        raise UsageError("parallelize: the model is already sharded; pass a complete one")
    check_adapted(model, mesh.tensor_parallel.size, mesh.pipeline.size)
    if divided and sharding is not None:
        raise UsageError("fsdp and expert_parallel_size: both shard experts; leave one of them out")
    if sharding is not None:
        shard_fully(model, mesh, sharding)
    along = mesh.tensor_parallel if tensor and sequence_parallel else None
    stages = plan_stages(model, mesh.pipeline.size * pipeline_chunks, pipeline_layers, along) if pipeline else None
    experts = ExpertParallelism(unwrapped(model), mesh, verified=plan is None) if divided else None
    if tensor:
        own = experts.modules if experts is not None else {}
        work = _Parallelization(model, mesh, plan, parallelize_embedding, sequence_parallel, own)
        _agree_on_adapters(model, mesh)
        work.shard_parameters()
        work.wire()
    if experts is not None:
        _divide(experts)
    if stages is not None:
        cut_into_stages(model, stages, mesh)
    sizes = None if pipeline_layers is None else list(pipeline_layers)
    for each in (model, unwrapped(model)):
        _applied[each] = ParallelizedModel(
            mesh, sequence_parallel, parallelize_embedding, sizes, pipeline_chunks, sharding
        )
        vars(each)["save_pretrained"] = _refuse_saving
    return model


def _divide(experts: ExpertParallelism) -> None:
    for parameter, placement, replication in list(experts.placements()):
        _replace(parameter, placement)
        annotate(parameter, placement.layout)
        annotate_replication(parameter, replication)
    experts.wire()


def _agree_on_adapters(model: nn.Module, mesh: Mesh) -> None:
    """Makes adapters equal on all ranks: unlike the base, which is read from files, each rank may have drawn others.
    Collective if there are any."""
    trained = nn.ParameterList([each for each in model.parameters() if each.requires_grad and not each.is_meta])
    if not any(map(is_wrapper, model.modules())):
        return
    if agree_on_weights(trained, mesh.runtime, mesh.context.host) and mesh.context.host.rank == 0:
        logger.warning("the ranks had different adapters; all use those of rank 0")


def _refuse_saving(*args: Any, **options: Any) -> None:
    """In place of the model's `save_pretrained`, which would write this rank's part of it as if it were complete."""
    raise UsageError(
        "save_pretrained: this rank has a part of the model; call the Trainer's save_model, or save with a "
        "Checkpointer and run stepmark consolidate"
    )


class _Parallelization:
    """One call of `parallelize`: the constructor checks everything, the other methods change the model."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        given: Mapping[str, str] | None,
        embedding: bool,
        sequence: bool,
        experts: Mapping[str, nn.Module],
    ) -> None:
        """`experts`: modules that are divided otherwise, whatever the plan says."""
        self._called = called_models(model)
        self._model = model = unwrapped(model)
        self._mesh = mesh
        self._axis: Collectives = mesh.tensor_parallel
        if any(layout_of(parameter) is not None for parameter in model.parameters()):
            raise UsageError("parallelize: the model is already sharded; pass a complete one")
        complete = plan_of(model, given)
        self._stacks: list[Stack] = sequence_stacks(model, complete) if sequence else []
        plan = {name: style for name, style in complete.items() if not {name, _parent(name)} & set(experts)}
        tables = _tables(model)
        self._tables = tables if embedding else []
        skipped = {id(each.layer) for each in tables}
        modules = dict(model.named_modules())
        self._styles = [
            (name, each, style)
            for name, style in plan.items()
            if name in modules
            for each in adapted_layers(name, modules[name])
            if id(each.layer) not in skipped
        ]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._own = {name: (parameters[name], style) for name, style in plan.items() if name not in modules}
        self._heads = self._find_heads(modules)
        self._sharded = list(self._shards())
        ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if is_wrapper(each)]
        exempt = [*ends, *(table.called for table in tables), *experts.values()]
        check_plan(model, plan, [part for each in exempt for part in each.modules()])

    def _find_heads(self, modules: dict[str, nn.Module]) -> dict[str, Heads]:
        """The heads of every module whose heads are sharded, by module name."""
        parents = {_parent(name) for name, _, style in self._styles if style.kind == "colwise"}
        found = {}
        for name in sorted(parents):
            heads = heads_of(name, modules[name], self._model.config, self._axis.size)
            if heads is not None:
                found[name] = heads
        return found

    def _shards(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        for table in self._tables:
            for _, parameter in (*table.own_parameters(), *table.parameters_of("b")):
                yield parameter, self._vocabulary_shard(parameter)
        for name, each, style in self._styles:
            if style.kind in COLUMN_STYLES or style.kind in ROW_STYLES:
                yield from self._linear_shards(name, each, style)
            elif style.kind == "moe_tp_experts":
                check_experts(name, each.called, any(_parent(own) == name for own in self._own))
            elif style.kind == "all_reduce" and any(is_wrapper(module) for module in each.called.modules()):
                raise UsageError(f"tensor_parallel_size: adapters in {name} are not supported; leave them out")
            elif style.kind == "embedding_rowwise":
                yield each.layer.weight, self._vocabulary_shard(each.layer.weight)
        summed = {name for name, _, style in self._styles if style.kind in ("moe_tp_experts", "all_reduce")}
        for name, (parameter, style) in self._own.items():
            if parameter.dim() == 3 and _parent(name) not in summed:
                raise UsageError(
                    f"plan: parameters of {_parent(name)} are sharded, but it does not have the style moe_tp_experts"
                )
            if style.kind in COLUMN_STYLES or style.kind in ROW_STYLES:
                dim = -1 if style.kind in ROW_STYLES or parameter.dim() == 1 else -2
                yield parameter, self._place(name, parameter, dim, style, None)
                if parameter.dim() == 3 and not self._mesh.runtime.lazy:
                    check_grouped(name, parameter, parameter.shape[dim] // style.packed // self._axis.size)

    def _vocabulary_shard(self, parameter: nn.Parameter) -> Placement:
        return shard_vocabulary(tuple(parameter.shape), self._axis.rank, self._axis.size)

    def _linear_shards(self, name: str, each: AdaptedLayer, style: Style) -> Iterator[tuple[nn.Parameter, Placement]]:
        """The shards of a linear layer and, along the same outputs or inputs, of its adapters."""
        rows = style.kind in ROW_STYLES
        heads = self._heads.get(_parent(name))
        groups = heads.groups(name.rpartition(".")[2]) if heads and not rows else None
        inputs = input_dim(each.layer)
        found = [(own, parameter, inputs if rows else 1 - inputs) for own, parameter in each.own_parameters()]
        found += [(own, parameter, int(rows)) for own, parameter in each.parameters_of("a" if rows else "b")]
        for own, parameter, dim in found:
            if rows and parameter.dim() == 1:
                continue  # the bias stays complete: it is added once, after the sum
            yield parameter, self._place(own, parameter, 0 if parameter.dim() == 1 else dim, style, groups)

    def _place(self, name: str, parameter: Tensor, dim: int, style: Style, groups: int | None) -> Placement:
        shape, rank, size = tuple(parameter.shape), self._axis.rank, self._axis.size
        if groups is not None and groups < size:
            return shard_among_groups(shape, dim, rank, size, groups)
        if shape[dim] % (style.packed * size):
            packed = f" of {style.packed} projections" if style.packed > 1 else ""
            raise UsageError(
                f"tensor_parallel_size: {name}, {list(shape)}{packed}, cannot be split into {size} equal shards "
                f"along dim {dim % len(shape)}; choose a divisor of {shape[dim] // style.packed}"
            )
        return shard(shape, dim, rank, size, style.packed)

    def shard_parameters(self) -> None:
        for parameter, placement in self._sharded:
            if layout_of(parameter) is not None:
                continue  # tied to one that is sharded already
            _replace(parameter, placement)
            annotate(parameter, placement.layout)
            if placement.count > 1:
                annotate_replication(parameter, Replication(placement.count, partial=True))
        partial = [each for _, each, style in self._styles if style.kind == "replicated_with_grad_allreduce"]
        replicated = [parameter for each in partial for parameter in each.called.parameters()]
        added = (ADDED_ONCE, "replicated_with_grad_allreduce")
        replicated += [parameter for parameter, style in self._own.values() if style.kind in added]
        columns = [each for _, each, style in self._styles if style.kind in COLUMN_STYLES]
        replicated += [parameter for each in (*columns, *self._tables) for _, parameter in each.parameters_of("a")]
        replicated += [parameter for stack in self._stacks for parameter in stack.on_shards]
        for parameter in replicated:
            if layout_of(parameter) is None:
                annotate_replication(parameter, Replication(self._axis.size, partial=True))

    def wire(self) -> None:
        model, axis, runtime = self._model, self._axis, self._mesh.runtime
        seeds = RegionSeeds(runtime, axis.rank, has_dropout(model))
        for called in self._called:
            seed_regions(called, seeds)
        modules = dict(model.named_modules())
        blocks = {block.name: block for stack in self._stacks for block in stack.blocks}
        regions: dict[str, TensorParallelRegion] = {}
        for name, each, style in self._styles:
            parent = _parent(name)
            if (style.kind in COLUMN_STYLES or style.kind in ROW_STYLES) and parent not in regions:
                regions[parent] = TensorParallelRegion(modules[parent], axis, seeds, len(regions), blocks.get(parent))
            if style.kind in COLUMN_STYLES:
                shard_columns(each, regions[parent], style.kind == "colwise_gather_output")
            elif style.kind in ROW_STYLES:
                shard_rows(each, regions[parent], style.kind == "rowwise_split_input")
            elif style.kind == "embedding_rowwise":
                shard_embedding(each.layer, Vocabulary(each.layer.num_embeddings, axis, runtime))
            elif style.kind == "all_reduce":
                each.called.register_forward_hook(lambda module, args, output: reduce_from(output.clone(), axis))
            elif style.kind == "moe_tp_experts":
                own = [own for own, (_, style) in self._own.items() if style.kind == ADDED_ONCE]
                sum_experts(each.called, axis, [own.rpartition(".")[2] for own in own if _parent(own) == name])
            elif style.kind == "moe_identity_expert":
                divide_input(each.called, axis)
            elif style.kind == "mla_kv_a_proj":
                share_rotary_part(each.called, axis, rotary_width(name, modules[parent], model.config))
        for name, heads in self._heads.items():
            heads.adapt(modules[name])
        before_head = len(self._stacks) == 1 and self._stacks[0].ends_with_norm
        has_head = self._wire_vocabulary(before_head)
        if self._stacks:
            refuse_hidden_states(model)
        for number, stack in enumerate(self._stacks):
            shard_sequence(stack, number, axis, seeds, has_head and before_head)
        added = AddedAdapters(model)  # which calls the modules in the model, whatever calls the latter
        for module in [modules[parent] for parent in regions][:1] or [each.called for each in self._tables]:
            module.register_forward_pre_hook(lambda module, args: added.check())

    def _wire_vocabulary(self, gathered: bool) -> bool:
        """Returns whether the head is sharded. `gathered`: its input comes from a gather that sums its gradient."""
        output = self._model.get_output_embeddings()
        heads = {id(each.layer) for each in adapted_layers("", output)} if output is not None else set()
        head: VocabParallelHead | None = None
        for each in self._tables:
            size = next(place.layout.shape[0] for held, place in self._sharded if held is each.layer.weight)
            vocabulary = Vocabulary(size, self._axis, self._mesh.runtime)
            if isinstance(each.layer, nn.Embedding):
                shard_embedding(each.layer, vocabulary)
            elif id(each.layer) not in heads:
                VocabParallelHead(vocabulary, gathered).attach(each.called)
            else:
                head = head or VocabParallelHead(vocabulary, gathered)
                head.attach(each.called)
        if head is not None:
            use_vocab_parallel_loss(self._model, head, self._called)
        return head is not None


def _tables(model: Any) -> list[AdaptedLayer]:
    """The input embedding, the head, and all layers tied to one of them."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    layers = [each.layer for end in ends for each in adapted_layers("", end)]
    weights = {id(layer.weight) for layer in layers if isinstance(layer, nn.Embedding | nn.Linear)}
    found: dict[int, AdaptedLayer] = {}  # by layer; what is called comes before what is in it
    for name, module in model.named_modules():
        for each in adapted_layers(name, module):
            if isinstance(each.layer, nn.Embedding | nn.Linear) and id(each.layer.weight) in weights:
                found.setdefault(id(each.layer), each)
    return list(found.values())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _replace(parameter: nn.Parameter, placement: Placement) -> None:
    """Replaces the parameter's value by this rank's shard."""
    if parameter.is_meta:
        parameter.data = torch.empty(placement.shape, dtype=parameter.dtype, device="meta")
        return
    shard = local_shard(parameter.detach().cpu(), placement.layout, placement.shape)
    parameter.data = shard.to(parameter.device)
    parameter.grad = None


def local_shard(complete: Tensor, layout: Layout, shape: Shape) -> Tensor:
    """The local tensor of `shape` that `layout` describes, copied from the complete one; padding is zero."""
    local = torch.zeros(shape, dtype=complete.dtype)
    copy_slices(complete, local, layout)
    return local
