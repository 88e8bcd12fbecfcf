"""The experts of a mixture without a shape that depends on the routing, for graphs that are made once.

transformers sorts tokens by expert, and the sizes of the groups are values. Here the tokens of an expert are padded to
whole blocks of B rows; none is dropped (as in Gale et al., "MegaBlocks", 2022, arXiv:2211.15841). Every expert has one
block of its own, with its weights where they are. T tokens with k experts each fill at most (T k - 1) / B more blocks,
however they are routed, and the weights of these are gathered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

BLOCK_COST = 100
"""What a block with gathered weights costs beyond its rows, in rows of arithmetic: weights are copied, and their
gradients added to those of other blocks. Measured by benchmarks/experts.py."""

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 4096


def count_blocks(pairs: int, rows: int) -> int:
    """The most blocks of `rows` rows that `pairs` pairs of a token and an expert can fill beside each expert's own."""
    return max(pairs - 1, 0) // rows


@functools.cache
def block_rows(tokens: int, chosen: int, experts: int) -> int | None:
    """The rows of a block that make the least work for `chosen` experts a token; None for all experts at once."""

    def cost(rows: int) -> int:
        return experts * rows + count_blocks(tokens * chosen, rows) * (rows + BLOCK_COST)

    sizes = [1 << power for power in range(SMALLEST_BLOCK.bit_length() - 1, LARGEST_BLOCK.bit_length())]
    best = min(sizes, key=cost)
    return best if cost(best) < experts * tokens else None


def static_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs, (tokens, hidden), in whichever form is less work.

    Args:
        experts: a module of transformers with the weights of all experts, (experts, out, in), or (experts, in, out)
            where `experts.is_transposed`.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k), the chosen experts, each once.
        top_k_weights: (tokens, k), their weights.
    """
    rows = block_rows(*top_k_index.shape, experts.num_experts)
    if rows is None:
        return all_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return padded_blocks_forward(experts, hidden_states, top_k_index, top_k_weights, rows)


def all_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """See `static_experts_forward`: every expert sees every token, and outputs that the router did not choose have
    weight 0. It takes (experts / experts per token) times the arithmetic."""
    outputs = _feed_forward(experts, hidden_states, None)  # (experts, tokens, hidden)
    chosen = top_k_index[..., None] == torch.arange(experts.num_experts, device=top_k_index.device)
    weights = (chosen * top_k_weights[..., None]).sum(1)  # (tokens, experts)
    return (outputs * weights.T[..., None]).sum(0).to(hidden_states.dtype)


def padded_blocks_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, rows: int
) -> Tensor:
    """See `static_experts_forward`: each block of `rows` rows holds tokens of one expert, and rows of zeros."""
    tokens, chosen = top_k_index.shape
    pair_slots, expert_of_block = _assign_slots(top_k_index.reshape(-1), experts.num_experts, rows)
    slots = (experts.num_experts + len(expert_of_block)) * rows
    pairs = torch.arange(tokens * chosen, device=top_k_index.device)
    empty = torch.full((slots,), tokens * chosen, dtype=pairs.dtype, device=pairs.device)
    pair_of_slot = empty.scatter(0, pair_slots, pairs)
    inputs = _ToBlocks.apply(hidden_states, pair_of_slot, pair_slots.view(tokens, chosen))
    outputs = _feed_forward(experts, inputs.view(-1, rows, inputs.shape[-1]), expert_of_block)
    of_pairs = _FromBlocks.apply(outputs.reshape(slots, -1), pair_of_slot, pair_slots)
    weighted = of_pairs.view(tokens, chosen, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def _assign_slots(expert_of_pair: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The row of all blocks where each pair of a token and an expert goes, and the experts of the blocks that follow
    each expert's own. The blocks that are left over count as the last expert's."""
    device = expert_of_pair.device
    numbers = torch.arange(experts, device=device)
    chosen = (expert_of_pair[:, None] == numbers).to(torch.int32)
    count = chosen.sum(0, dtype=torch.int32)
    end = experts + ((count - 1).clamp(min=0) // rows).cumsum(0, dtype=torch.int32)  # of each expert's further blocks
    start = torch.cat([end.new_full((1,), experts), end[:-1]])
    before = ((chosen.cumsum(0, dtype=torch.int32) - 1) * chosen).sum(1)  # pairs of the same expert that come earlier
    block = torch.where(before < rows, expert_of_pair, start[expert_of_pair] + before // rows - 1)
    further = experts + torch.arange(count_blocks(len(expert_of_pair), rows), device=device)
    return block * rows + before % rows, (further[:, None] >= end[:-1]).sum(1)


def _feed_forward(experts: Any, inputs: Tensor, expert_of_block: Tensor | None) -> Tensor:
    """The outputs of blocks of rows, (blocks, rows, hidden): one of each expert, then those of `expert_of_block`.
    Without it, every expert's of all `inputs`."""
    projected = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", inputs, expert_of_block)
    with _LimitsAsTensors():
        activated = experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)
    outputs = _linear(experts, "down_proj", activated, expert_of_block)
    return experts.post_expert_norm(outputs) if experts.has_post_expert_norm else outputs


class _LimitsAsTensors(TorchFunctionMode):
    """Where the limits of a clamp become tensors of its input's type: its gradient compares with them, and torch_xla
    compares with a number in 64 bits, which compilers for accelerators reject."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _clamp if function in (torch.clamp, Tensor.clamp) else function
        return call(*args, **(kwargs or {}))


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    limits = [each if each is None or isinstance(each, Tensor) else input.new_full((), each) for each in (min, max)]
    return torch.clamp(input, *limits)


def _linear(experts: Any, name: str, inputs: Tensor, expert_of_block: Tensor | None) -> Tensor:
    weight = getattr(experts, name)
    weight = weight if experts.is_transposed else weight.transpose(-2, -1)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    if expert_of_block is None:
        outputs = torch.matmul(inputs, weight)
    else:
        outputs = _BlockLinear.apply(inputs, weight, expert_of_block)
        bias = None if bias is None else torch.cat([bias, bias[expert_of_block]])
    return outputs if bias is None else outputs + bias[:, None]


def _rows_or_zeros(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows of `tensor` at `index`, zeros for an index that is their number."""
    return torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])[index]


class _ToBlocks(Function):
    """Rows of tokens in their slots. A gather in both directions: its transpose would add in place."""

    @staticmethod
    def forward(context: Any, tokens: Tensor, pair_of_slot: Tensor, slots: Tensor) -> Tensor:
        context.save_for_backward(slots)
        return _rows_or_zeros(tokens, pair_of_slot // slots.shape[1])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = context.saved_tensors
        return gradient[slots.view(-1)].view(*slots.shape, -1).sum(1), None, None


class _FromBlocks(Function):
    """The rows of the pairs of a token and an expert, from their slots."""

    @staticmethod
    def forward(context: Any, rows: Tensor, pair_of_slot: Tensor, slots: Tensor) -> Tensor:
        context.save_for_backward(pair_of_slot)
        return rows[slots]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (pair_of_slot,) = context.saved_tensors
        return _rows_or_zeros(gradient, pair_of_slot), None, None


class _BlockLinear(Function):
    """Blocks, (blocks, rows, in): one times the weights of each expert, (in, out), then those of `expert_of_block`.
    Gathered weights are not kept for the backward pass, which gathers them again."""

    @staticmethod
    def forward(context: Any, blocks: Tensor, weight: Tensor, expert_of_block: Tensor) -> Tensor:
        context.save_for_backward(blocks, weight, expert_of_block)
        return _times(blocks, weight, expert_of_block)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        blocks, weight, expert_of_block = context.saved_tensors
        dtype = gradient.dtype  # under autocast, the products' own
        of_blocks = of_weight = None
        if context.needs_input_grad[0]:
            of_blocks = _times(gradient, weight.to(dtype).transpose(1, 2), expert_of_block).to(blocks.dtype)
        if context.needs_input_grad[1]:
            rows = blocks.to(dtype).transpose(1, 2)
            own = torch.bmm(rows[: len(weight)], gradient[: len(weight)]).to(weight.dtype)
            further = torch.bmm(rows[len(weight) :], gradient[len(weight) :]).to(weight.dtype)
            of_weight = own.index_add(0, expert_of_block, further)
        return of_blocks, of_weight, None


def _times(blocks: Tensor, weight: Tensor, expert_of_block: Tensor) -> Tensor:
    own = torch.bmm(blocks[: len(weight)], weight)
    return torch.cat([own, torch.bmm(blocks[len(weight) :], weight[expert_of_block])])
