"""Sequence parallelism: between the blocks of a decoder layer, activations are sharded along the sequence.

They are sharded from the first layer's input to the last norm's output. Norms and residual connections work on a shard
of the sequence, so their weights get partial gradients. Every other module of a layer is a block, which gets the
complete sequence and gives back a shard: attention, a feed-forward network, a mixture of experts with its router, a
convolution. A block's collectives follow from its plan:

| in the block | enters | leaves |
| --- | --- | --- |
| what uses its input is sharded by columns | `gather_partial` | |
| anything else: routers, latents, whole attention | `gather` | |
| only its own children are sharded by rows | | these `reduce_scatter` |
| nothing, or modules deeper inside, are sharded by rows | | `scatter`, after their sums |

Which modules treat each token by itself is tried with random numbers. That a layer's own code does, too, was verified
for the model types of `SEQUENCE_PARALLEL`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.errors import UsageError
from stepmark.parallel import architectures
from stepmark.parallel.tensor.adapted_layers import base_of
from stepmark.parallel.tensor.autograd_collectives import gather, gather_partial, scatter
from stepmark.parallel.tensor.dropout import RegionSeeds
from stepmark.parallel.tensor.plans import COLUMN_STYLES, ROW_STYLES, Style, is_covered, model_type
from stepmark.runtime.collectives import Collectives

SEQUENCE_DIM = 1
ON_OWN_SHARD = (*COLUMN_STYLES, *ROW_STYLES, "replicated_with_grad_allreduce")

STREAMS = "its layers mix several residual streams (hyper-connections)"
REFUSED = {
    "deepseek_v4": STREAMS,
    "hy_v4": STREAMS,
    "inkling2_text": "its layers attend to the hidden states of earlier layers",
}
"""Model types whose layers are no residual connections around blocks, and what they are."""


@dataclass(frozen=True)
class SequenceBlock:
    """A module of a layer that gets the complete sequence."""

    name: str
    module: nn.Module
    partial: bool = False  # whether the gradient of its input is the sum of the ranks' parts, without collectives
    rows: tuple[str, ...] = ()  # its layers that are sharded by rows, if they scatter its output

    @property
    def scatters(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Stack:
    """Layers that are called one after another, and the module whose output is gathered: a norm, or the last layer."""

    layers: nn.ModuleList
    last: nn.Module
    blocks: tuple[SequenceBlock, ...]
    on_shards: tuple[nn.Parameter, ...]

    @property
    def ends_with_norm(self) -> bool:
        return self.last is not self.layers[-1]


def sequence_stacks(model: Any, plan: Mapping[str, Style]) -> list[Stack]:
    """The layers that the plan shards. Raises UsageError, with the reason, where the model type rules that out."""
    kind = model_type(model)
    if kind not in architectures.SEQUENCE_PARALLEL:
        why = REFUSED.get(kind, "it is not among the model types that were verified with it (docs/tables.md)")
        raise UsageError(f"sequence_parallel: {kind} is not supported: {why}; set it to false")
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    width = model.config.get_text_config().hidden_size
    found = {}
    for place in plan:
        parts = place.split(".")
        name = next((each for count in range(len(parts)) if (each := ".".join(parts[:count])) in lists), None)
        if name is not None and name not in found:
            found[name] = _stack(model, name, lists[name], plan, width)
    return list(found.values())


def _stack(model: nn.Module, name: str, layers: nn.ModuleList, plan: Mapping[str, Style], width: int) -> Stack:
    blocks: list[SequenceBlock] = []
    on_shards: list[nn.Parameter] = []
    for number, layer in enumerate(layers):
        on_shards += layer.parameters(recurse=False)
        for own, module in _children(f"{name}.{number}", layer):
            if own in plan and (plan[own].columns or plan[own].rows):
                raise UsageError(f"sequence_parallel: {own} is sharded in no block of its layer; set it to false")
            if _treats_tokens_alone(module, width):
                on_shards += module.parameters()
            else:
                blocks.append(_block(own, module, plan))
    siblings = list(model.get_submodule(name.rpartition(".")[0]).children())
    behind = siblings[siblings.index(layers) + 1 :]
    # One without weights may be called elsewhere as well: that costs nothing.
    norms = [each for each in behind if any(True for _ in each.parameters()) and _treats_tokens_alone(each, width)]
    last = norms[0] if len(norms) == 1 else layers[-1]
    on_shards += last.parameters() if len(norms) == 1 else ()
    rows = [parameter for each in blocks for own in each.rows for parameter in model.get_submodule(own).parameters()]
    return Stack(layers, last, tuple(blocks), (*on_shards, *rows))


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from _children(f"{name}.{key}", child)
        else:
            yield f"{name}.{key}", child


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.Identity)


def _treats_tokens_alone(module: nn.Module, width: int) -> bool:
    """Whether it is a dropout, or like a norm: without matrices, and a token's output depends on that token alone."""
    module = base_of(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if _is_dropout(module) or any(each.dim() > 1 for each in tensors.values()):
        return _is_dropout(module)
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    with _disable_current_modes(), torch.no_grad():  # `stepmark plan` calls this without memory
        given = numbers(2, 4, width)
        values = {name: numbers(*each.shape) for name, each in tensors.items()}
        try:
            complete, shard = (functional_call(module, values, (each,)) for each in (given, given[:, 1:3]))
            return complete.shape == given.shape and torch.allclose(complete[:, 1:3], shard, atol=1e-5)
        except Exception:  # it needs something else: a block may be anything
            return False


def _block(name: str, module: nn.Module, plan: Mapping[str, Style]) -> SequenceBlock:
    inside = {own: style.kind for own, style in plan.items() if f"{own}.".startswith(f"{name}.")}
    kinds = {own: kind for own, kind in inside.items() if kind != "local_params"}  # which says nothing of the module
    rows = [own for own, kind in kinds.items() if kind in ROW_STYLES]
    direct = all(own.rpartition(".")[0] == name for own in kinds)
    on_own_shard = {own for own, kind in kinds.items() if kind in ON_OWN_SHARD}
    covered = all(is_covered(own, on_own_shard) for own, _ in module.named_parameters(name))
    columns = any(kind in COLUMN_STYLES for kind in kinds.values())
    return SequenceBlock(name, module, columns and bool(rows) and direct and covered, tuple(rows) if direct else ())


def shard_sequence(stack: Stack, number: int, axis: Collectives, seeds: RegionSeeds, partial: bool) -> None:
    """Shards activations before the first layer of the stack with this number and gathers them after the last norm.
    `partial`: what follows produces partial gradients, as a sharded head does."""

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        seeds.sharded(module, -1 - number)
        return _with_input(args, kwargs, lambda tensor: _shard(tensor, axis))

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        seeds.replicated(module, -1 - number)
        return _with_first(output, lambda tensor: (gather_partial if partial else gather)(tensor, axis, SEQUENCE_DIM))

    for block in stack.blocks:
        _wire(block, axis, seeds)
    stack.layers[0].register_forward_pre_hook(begin, with_kwargs=True)
    stack.last.register_forward_hook(end)


def refuse_hidden_states(model: Any) -> None:
    """Makes a call that asks for the hidden states of all layers raise UsageError: a rank has shards of them."""

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_hidden_states")
        if getattr(model.config, "output_hidden_states", False) if asked is None else asked:
            raise UsageError(
                "output_hidden_states: with sequence_parallel each rank has a shard of the layers' hidden states; set "
                "one of the two to false"
            )

    model.base_model.register_forward_pre_hook(check, with_kwargs=True)


def _wire(block: SequenceBlock, axis: Collectives, seeds: RegionSeeds) -> None:
    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if block.partial:
            return _with_input(args, kwargs, lambda tensor: gather_partial(tensor, axis, SEQUENCE_DIM))
        seeds.replicated(module, -1, block.name)
        return _with_input(args, kwargs, lambda tensor: gather(tensor, axis, SEQUENCE_DIM))

    def end(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not block.partial:
            seeds.sharded(module, -1, block.name)
        return _with_first(output, lambda tensor: shard(tensor, _input(args, kwargs)[1]))

    def shard(tensor: Tensor, given: Tensor) -> Tensor:
        batch, length = given.shape[:2]
        if tensor.dim() == 2 and len(tensor) == batch * length:  # some give tokens without their batch
            tensor = tensor.unflatten(0, (batch, length))
        if tuple(tensor.shape[:2]) != (batch, length // axis.size if block.scatters else length):
            raise UsageError(
                f"sequence_parallel: {block.name} gives {list(tensor.shape)}, not a vector for each token of "
                f"{list(given.shape)}; set it to false"
            )
        return tensor if block.scatters else scatter(tensor, axis, SEQUENCE_DIM)

    block.module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
    block.module.register_forward_hook(end, with_kwargs=True)


def _input(args: Any, kwargs: dict[str, Any]) -> tuple[str, Tensor]:
    """The hidden states among the arguments of a call, and their name if they are not the first of `args`."""
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
    return ("", args[0]) if args else (name, kwargs[name])


def _with_input(args: Any, kwargs: dict[str, Any], change: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, with other hidden states."""
    name, tensor = _input(args, kwargs)
    return (args, {**kwargs, name: change(tensor)}) if name else ((change(tensor), *args[1:]), kwargs)


def _with_first(output: Any, change: Any) -> Any:
    """A module's output, with other hidden states."""
    return change(output) if isinstance(output, Tensor) else type(output)((change(output[0]), *output[1:]))


def _shard(tensor: Tensor, axis: Collectives) -> Tensor:
    length = tensor.shape[SEQUENCE_DIM]
    if length % axis.size:
        raise UsageError(
            f"sequence_parallel: sequences of {length} tokens cannot be split into {axis.size} equal shards; make "
            "block_size a multiple of tensor_parallel_size"
        )
    return scatter(tensor, axis, SEQUENCE_DIM)
