"""How the layers are divided among stages: by what they cost, so that no stage makes the others wait.

Costs are multiplications a token of the forward pass; the backward pass takes a multiple of that everywhere. A layer's
are its parameters that are multiplied (of experts as many as a token goes through) and its attention scores; those of
the last stage's end are the norm, the head and the loss over the vocabulary. Looking up an embedding costs nothing.

With gradient checkpointing stages do not repeat the same. In units of a forward pass, a backward pass counting two:

| part                         | forward | again from the stage's input | again layer by layer | backward | sum |
| ---------------------------- | ------- | ---------------------------- | -------------------- | -------- | --- |
| layers                       | 1       | 1                            | 1                    | 2        | 5   |
| layers of the last stage     | 1       |                              | 1                    | 2        | 4   |
| the end                      | 1       |                              |                      | 2        | 3   |

since the last stage's backward pass follows its forward pass at once (with gpipe it does so on lazy devices only; it is
counted like this all the same, as the schedule is not known when a model is cut).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from stepmark.errors import UsageError
from stepmark.sharding.layout import layout_of

CONTEXT = 1024  # tokens of which attention scores are counted, half of them on average
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of their number
ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")  # and of how many a token goes through
BIASES = ("e_score_correction_bias", "expert_bias")  # names of what balances a router's choice outside the optimizer
LOSS_PER_WORD = 4  # elementwise operations of the loss for each word of the vocabulary, beside the head's product


# What a training step repeats of the last stage's layers, and of its end, beside what it repeats of the other layers.
ONCE = 1.0, 1.0
CHECKPOINTED = 4 / 5, 3 / 5


def layer_costs(layers: nn.ModuleList, config: Any) -> list[float]:
    """The cost of each layer."""
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    scores = float(heads * width * CONTEXT) if isinstance(heads, int) else 0.0
    share = active_experts(config) or 1.0
    return [multiplied(layer, share) + scores for layer in layers]


def end_cost(modules: Sequence[nn.Module]) -> float:
    """The cost of what follows the layers: `modules`, the head among them, and the loss."""
    vocabulary = max((int(getattr(module, "out_features", 0)) for module in modules), default=0)
    return sum(multiplied(module, 1.0) for module in modules) + float(LOSS_PER_WORD * vocabulary)


def multiplied(module: nn.Module, share_of_experts: float) -> float:
    """Elements of the module's parameters, of experts only that share."""
    return sum(
        parameter.numel() * (share_of_experts if is_of_experts(name) else 1.0)
        for name, parameter in module.named_parameters()
    )


def is_of_experts(name: str) -> bool:
    """Whether a parameter is one of experts among which a router chooses."""
    return "experts" in name.split(".")


class RoutedExperts(NamedTuple):
    """The number of a layer's experts on all ranks, and the name of the bias that balances the router's choice among
    them and is not trained; None without one."""

    number: int
    bias: str | None


def routed_experts(model: nn.Module) -> dict[str, RoutedExperts]:
    """The modules that are called with the chosen experts of each token, as transformers' are: `forward(hidden_states,
    top_k_index, top_k_weights)`, by name."""
    found = {}
    for name, module in model.named_modules():
        weight = next((each for each in module.parameters(recurse=False) if each.ndim == 3), None)
        if weight is None or not (hasattr(module, "has_gate") and hasattr(module, "is_transposed")):
            continue
        number = (layout_of(weight) or weight).shape[0]
        block = name.rpartition(".")[0]
        inside = model.get_submodule(block)
        tensors = [*inside.named_buffers(), *(each for each in inside.named_parameters() if not each[1].requires_grad)]
        biases = [each for each, bias in tensors if each.rpartition(".")[2] in BIASES and bias.numel() == number]
        found[name] = RoutedExperts(number, f"{block}.{biases[0]}".removeprefix(".") if len(biases) == 1 else None)
    return found


def active_experts(config: Any) -> float | None:
    """The share of a mixture's experts that a token goes through, 1 for other models; None if the config is silent."""
    counts = [count for name in EXPERTS if isinstance(count := getattr(config, name, None), int) and count > 0]
    if not counts:
        return 1.0
    active = next((value for name in ACTIVE if isinstance(value := getattr(config, name, None), int)), 0)
    return active / counts[0] if 0 < active <= counts[0] else None


def balanced(costs: Sequence[float], end: float, stages: int, passes: tuple[float, float] = ONCE) -> list[int]:
    """The number of layers of each stage, 1 or more, so that the most expensive stage is as cheap as possible; of
    several ways the most even one. `end`: what the last stage has besides its layers. `passes`: ONCE, or
    CHECKPOINTED."""
    count = len(costs)
    of_last_layers, of_end = passes
    before = [0.0, *accumulate(costs)]

    @cache
    def best(stage: int, begin: int) -> tuple[float, float, tuple[int, ...]]:
        """Of this stage and all after it, from layer `begin` on: the highest cost, the sum of squares, the sizes."""
        if stage == stages - 1:
            cost = of_last_layers * (before[count] - before[begin]) + of_end * end
            return cost, cost**2, (count - begin,)
        ways = []
        for stop in range(begin + 1, count - (stages - stage - 1) + 1):
            cost = before[stop] - before[begin]
            highest, squares, sizes = best(stage + 1, stop)
            ways.append((max(cost, highest), cost**2 + squares, (stop - begin, *sizes)))
        return min(ways)

    return list(best(0, 0)[2])


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage and the one after its last, from the numbers of layers."""
    return list(pairwise([0, *accumulate(sizes)]))


def checked_sizes(given: Sequence[int], layers: int, stages: int) -> list[int]:
    """`pipeline_layers`, which must fit the model. Raises UsageError."""
    if len(given) != stages or min(given) < 1 or sum(given) != layers:
        raise UsageError(
            f"pipeline_layers: {list(given)} should be {stages} numbers of 1 or more, one for each stage "
            "(pipeline_parallel_size times pipeline_chunks), whose sum is the model's "
            f"{layers} layers, and it is {sum(given)}"
        )
    return list(given)
