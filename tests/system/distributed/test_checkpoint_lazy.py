"""On a lazy device saving and restoring change no value, replace no tensor, and compile no graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.restore import tensor_reader as reader
from stepmark.runtime.context import start
from tests.support.ranks import Ranks


@pytest.mark.xla
def test_memory_on_the_way_to_the_device_is_not_lent_too_early(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(fill_large, str(tmp_path)).check() == [[]]


# What ranks run


SIDE = 2048  # elements of each dimension of a tensor of 16 MiB


def fill_large(folder: str) -> list[str]:
    """Restores more tensors than are on their way at a time, so that their memory on the host is lent several times;
    the names of those that differ."""
    reader.IN_FLIGHT = 3 * SIDE * SIDE * 4
    context = start("xla")
    runtime = context.runtime

    def made(number: int) -> Tensor:
        return torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE).roll(number)

    state = {"nest": {f"t{number}": runtime.place(made(number)) for number in range(10)}}
    with Checkpointer(Path(folder), group=context.host, runtime=runtime) as checkpointer:
        checkpointer.save(1, state, block=True)
        for name in state["nest"]:
            state["nest"][name] = runtime.place(torch.zeros(SIDE, SIDE))
        checkpointer.restore(state)
    return [name for number, (name, tensor) in enumerate(state["nest"].items()) if not tensor.cpu().equal(made(number))]
