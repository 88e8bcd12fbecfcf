"""Shards a model's layers over the tensor parallel axis by its plan, then inserts the collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.adapted_layers import (
    AdaptedLayer,
    adapted_layers,
    called_models,
    is_wrapper,
    refuse_adapters,
    unwrapped,
)
from stepmark.parallel.tensor.attention_heads import heads_of
from stepmark.parallel.tensor.autograd_collectives import reduce_from
from stepmark.parallel.tensor.dropout import RegionSeeds, has_dropout, seed_regions
from stepmark.parallel.tensor.experts import (
    check_experts,
    check_grouped,
    divide_input,
    rotary_width,
    share_rotary_part,
    sum_experts,
)
from stepmark.parallel.tensor.layers import TensorParallelRegion, input_dim, shard_columns, shard_rows
from stepmark.parallel.tensor.plans import ADDED_ONCE, Placement, Style, check_plan, plan_of, shard, shard_vocabulary
from stepmark.parallel.tensor.sequence import Stack, refuse_hidden_states, sequence_stacks, shard_sequence
from stepmark.parallel.tensor.vocabulary import VocabParallelHead, Vocabulary, shard_embedding, use_vocab_parallel_loss
from stepmark.runtime.collectives import Collectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of
from stepmark.sharding.replication import Replication, annotate_replication


class TensorParallelism:
    """The sharded layers of one model on a mesh: the constructor checks everything, the other methods change the model.
    For `given` see `plan` of `parallelize`."""

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
        complete = plan_of(model, given)
        self._stacks: list[Stack] = sequence_stacks(model, complete) if sequence else []
        plan = {name: style for name, style in complete.items() if not {name, _parent(name)} & set(experts)}
        tables = _tables(model)
        self._tables = tables if embedding else []
        skipped = {id(each.layer) for each in tables}
        modules = dict(model.named_modules())
        linear = {name: part for name, part in modules.items() if isinstance(part, nn.Linear | nn.Embedding)}
        derived = next((name for name, part in linear.items() if "weight" not in part._parameters), None)
        if derived is not None:
            raise UsageError(
                f"tensor_parallel_size: the weight of {derived} is computed from other parameters, such as by "
                "weight_norm, which is not sharded; remove that, or set it to 1"
            )
        self._styles = [
            (name, each, style)
            for name, style in plan.items()
            if name in modules
            for each in adapted_layers(name, modules[name])
            if id(each.layer) not in skipped
        ]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._own = {name: (parameters[name], style) for name, style in plan.items() if name not in modules}
        parents = {_parent(name) for name, _, style in self._styles if style.kind == "colwise"}
        heads = {name: heads_of(name, modules[name], model.config, self._axis.size) for name in sorted(parents)}
        self._heads = {name: each for name, each in heads.items() if each is not None}  # by the modules that have them
        self._sharded = list(self._shards())
        ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if is_wrapper(each)]
        exempt = [*ends, *(table.called for table in tables), *experts.values()]
        check_plan(model, plan, [part for each in exempt for part in each.modules()])

    def _shards(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        for table in self._tables:
            for _, parameter in (*table.own_parameters(), *table.parameters_of("b")):
                yield parameter, shard_vocabulary(tuple(parameter.shape), self._axis.rank, self._axis.size)
        for name, each, style in self._styles:
            if style.columns or style.rows:
                yield from self._linear_shards(name, each, style)
            elif style.kind == "moe_tp_experts":
                check_experts(name, each.called, any(_parent(own) == name for own in self._own))
            elif style.kind == "all_reduce" and any(is_wrapper(module) for module in each.called.modules()):
                raise UsageError(f"tensor_parallel_size: adapters in {name} are not supported; leave them out")
            elif style.kind == "embedding_rowwise":
                weight = each.layer.weight
                yield weight, shard_vocabulary(tuple(weight.shape), self._axis.rank, self._axis.size)
        summed = {name for name, _, style in self._styles if style.kind in ("moe_tp_experts", "all_reduce")}
        for name, (parameter, style) in self._own.items():
            if parameter.dim() == 3 and _parent(name) not in summed:
                raise UsageError(
                    f"plan: parameters of {_parent(name)} are sharded, but it does not have the style moe_tp_experts"
                )
            if style.columns or style.rows:
                dim = -1 if style.rows or parameter.dim() == 1 else -2
                yield parameter, self._place(name, parameter, dim, style)
                if parameter.dim() == 3 and not self._mesh.runtime.lazy:
                    check_grouped(name, parameter, parameter.shape[dim] // style.packed // self._axis.size)

    def _linear_shards(self, name: str, each: AdaptedLayer, style: Style) -> Iterator[tuple[nn.Parameter, Placement]]:
        """The shards of a linear layer and, along the same outputs or inputs, of its adapters."""
        heads, rows = self._heads.get(_parent(name)), style.rows
        copies = heads.copies(name.rpartition(".")[2]) if heads and not rows else 1
        inputs = input_dim(each.layer)
        found = [(own, parameter, inputs if rows else 1 - inputs) for own, parameter in each.own_parameters()]
        found += [(own, parameter, int(rows)) for own, parameter in each.parameters_of("a" if rows else "b")]
        for own, parameter, dim in found:
            if rows and parameter.dim() == 1:
                continue  # the bias stays complete: it is added once, after the sum
            yield parameter, self._place(own, parameter, 0 if parameter.dim() == 1 else dim, style, copies)

    def _place(self, name: str, parameter: Tensor, dim: int, style: Style, copies: int = 1) -> Placement:
        shape, rank, size = tuple(parameter.shape), self._axis.rank, self._axis.size
        if shape[dim] * copies % (style.packed * size):
            packed = f" of {style.packed} projections" if style.packed > 1 else ""
            raise UsageError(
                f"tensor_parallel_size: {name}, {list(shape)}{packed}, cannot be split into {size} equal shards "
                f"along dim {dim % len(shape)}; choose a divisor of {shape[dim] // style.packed}"
            )
        return shard(shape, dim, rank, size, style.packed, copies)

    def shard_parameters(self) -> None:
        for parameter, placement in self._sharded:
            if layout_of(parameter) is not None:
                continue  # tied to one that is sharded already
            placement.replace(parameter)
            if placement.count > 1:
                annotate_replication(parameter, Replication(placement.count, partial=True))
        partial = [each for _, each, style in self._styles if style.kind == "replicated_with_grad_allreduce"]
        replicated = [parameter for each in partial for parameter in each.called.parameters()]
        added = (ADDED_ONCE, "replicated_with_grad_allreduce")
        replicated += [parameter for parameter, style in self._own.values() if style.kind in added]
        columns = [each for _, each, style in self._styles if style.columns]
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
            if (style.columns or style.rows) and parent not in regions:
                regions[parent] = TensorParallelRegion(modules[parent], axis, seeds, len(regions), blocks.get(parent))
            if style.columns:
                shard_columns(each, regions[parent], style.kind == "colwise_gather_output")
            elif style.rows:
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
        # These are called whatever calls the model.
        refuse_adapters(model, [modules[parent] for parent in regions][:1] or [each.called for each in self._tables])

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
