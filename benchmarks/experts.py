"""A layer of experts on a lazy device: padded blocks beside all experts and beside a dense layer of the active size.

    OMP_NUM_THREADS=1 PJRT_DEVICE=CPU .venv/bin/python benchmarks/experts.py --save

Forward and backward pass of one layer, for several numbers of experts of which every token has 4. The forms take turns,
round after round, in one process. Counted are the processor's seconds in all threads, on which other processes have
little influence. Printed are the medians, and medians of ratios within a round: how many times faster the form that
`static_experts_forward` chooses is than all experts, and what it takes beside a dense layer written by hand that does
the active experts' arithmetic. `--rows` measures blocks of more sizes, from which BLOCK_COST is taken: seconds beyond
the arithmetic, in rows of the dense layer, for each further block.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
from keeping import keep, machine  # noqa: E402
from transformers import MixtralConfig  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

from stepmark.training.one_graph_per_step.experts import (  # noqa: E402
    all_experts_forward,
    block_rows,
    padded_blocks_forward,
    static_experts_forward,
)

CHOSEN = 4
GOAL = 4.0  # times faster than all experts, where there are 8 times as many experts as a token has
Form = Callable[[], torch.Tensor]


def make_forms(tokens: int, experts: int, width: int, rows: list[int]) -> tuple[dict[str, Form], list[Any]]:
    """The forms by name, and the tensors that get gradients."""
    device = torch_xla.device()
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=width, intermediate_size=width, num_local_experts=experts)
    layer = MixtralExperts(config)
    for parameter in layer.parameters():
        parameter.data.normal_(std=width**-0.5)
    layer.to(device)
    hidden = torch.randn(tokens, width).to(device).requires_grad_()
    weights, index = (each.to(device) for each in torch.randn(tokens, experts).softmax(-1).topk(CHOSEN))
    active = CHOSEN * width
    up, down = torch.randn(2 * active, width) * width**-0.5, torch.randn(width, active) * active**-0.5
    up, down = up.to(device).requires_grad_(), down.to(device).requires_grad_()

    def dense() -> torch.Tensor:
        return layer._apply_gate(hidden @ up.T) @ down.T

    given = (layer, hidden, index, weights)
    forms: dict[str, Form] = {"dense": dense, "all experts": lambda: all_experts_forward(*given)}
    forms["chosen form"] = lambda: static_experts_forward(*given)
    forms |= {f"blocks of {each}": partial(padded_blocks_forward, *given, each) for each in rows}
    return forms, [hidden, *layer.parameters(), up, down]


def measure(forms: dict[str, Form], wanted: list[Any], rounds: int) -> dict[str, list[float]]:
    """The seconds of each form, round by round; each is compiled in a round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, form in forms.items():
            for tensor in wanted:
                tensor.grad = None
            torch_xla.sync()
            xm.wait_device_ops()
            begin = time.process_time()
            form().square().sum().backward()
            torch_xla.sync()
            xm.wait_device_ops()
            if number:
                seconds[name].append(time.process_time() - begin)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256, help="of the hidden states, and of each expert")
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="blocks to measure beside the chosen ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/experts.csv")
    arguments = parser.parse_args()
    lines = ["| experts | form | rows a block | seconds | times faster than all | times the dense layer |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    reached = None
    for experts in arguments.experts:
        forms, wanted = make_forms(arguments.tokens, experts, arguments.width, arguments.rows)
        seconds = measure(forms, wanted, arguments.rounds)
        for name, taken in seconds.items():
            faster, beside = ratio(seconds["all experts"], taken), ratio(taken, seconds["dense"])
            rows = block_rows(arguments.tokens, CHOSEN, experts) if name == "chosen form" else ""
            cells = (f"{statistics.median(taken):.3f}", f"{faster:.2f}", f"{beside:.2f}")
            lines.append(f"| {experts} | {name} | {rows} | {' | '.join(cells)} |")
            if name == "chosen form" and experts == 8 * CHOSEN:
                reached = faster
    if reached is not None:
        verdict = "holds" if reached >= GOAL else "MISSED"
        lines += ["", f"- {verdict}: times faster than all, of 8 times the experts (at least {GOAL:g}): {reached:.2f}"]
    text = "\n".join((f"{machine()}, {arguments.tokens} tokens, medians of {arguments.rounds} rounds.", "", *lines))
    print(text)
    if arguments.save:
        keep("experts", "", text)


if __name__ == "__main__":
    main()
