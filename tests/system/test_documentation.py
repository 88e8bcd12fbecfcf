"""The training loops of the documentation train, and end every step on a lazy device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stepmark.runtime.context import Context, start
from stepmark.runtime.mesh import Mesh
from tests.support.programs import LENGTH, VOCABULARY, Blocks, tiny_model
from tests.support.ranks import ROOT, Ranks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
TRAINS = re.compile(r"\.backward\(|\.train\(")
STAND_INS = {"README.md": "trainer", "parallelism.md": "loop"}  # of py
RANKS = {"README.md": [1], "parallelism.md": [1, 2]}
LOOPS = [
    (page.name, block)
    for page in PAGES
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
    if TRAINS.search(block)
]


def test_every_training_loop_is_run() -> None:
    assert sorted(page for page, _ in LOOPS) == sorted(STAND_INS)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("page", "block", "nproc"),
    [pytest.param(page, block, n, id=f"{page}-{n}") for page, block in LOOPS for n in RANKS[page]],
)
def test_a_training_loop_of_the_documentation(ranks: Ranks, tmp_path: Path, page: str, block: str, nproc: int) -> None:
    program = run
    for found in ranks.run(program, block, STAND_INS[page], str(tmp_path), nproc=nproc).check():
        assert found["trained"]
        assert found["finite"]
        assert found["executions"] >= found["steps"]
        assert found["compilations"] < found["steps"]


# What ranks run


STEPS = 21


def run(code: str, stand_ins: str, folder: str) -> dict[str, Any]:
    """Runs a code block on a lazy device, which "auto" then means, in `folder`.

    Returns the steps that it should have trained, the graphs that it compiled and executed after its parts were made,
    and whether the weights changed.
    """
    os.chdir(folder)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("stepmark.runtime.device._default_device", return_value="xla"))
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            stack.enter_context(_one_rank())
        context = start()
        runtime = context.runtime
        names: dict[str, Any] = {"loop": _loop, "trainer": _trainer}[stand_ins](context)
        exec(compile(code, "documentation", "exec"), names)
        after = runtime.counters()
    before, model = names["counted"][0], names["model"]
    assert after is not None
    (weight,) = runtime.to_host([next(model.parameters())])
    return {
        "steps": STEPS,
        "compilations": after.compilations - before.compilations,
        "executions": after.executions - before.executions,
        "finite": bool(weight.isfinite().all()),
        "trained": not torch.equal(weight, names["start"][0]),
    }


@contextmanager
def _one_rank() -> Iterator[None]:
    """A mesh of several ranks becomes one of a single rank."""
    create = Mesh.create

    def alone(*, tensor_parallel_size: int = 1, **options: Any) -> Mesh:
        return create(**options)

    with mock.patch.object(Mesh, "create", alone):
        yield


def _loop(context: Context) -> dict[str, Any]:
    """For a loop over `batches`, with a model from `folder`."""
    runtime = context.runtime
    tiny_model(dropout=0.0).save_pretrained("model")  # rank 0 writes
    context.host.barrier()
    names: dict[str, Any] = {"folder": "model", "counted": [], "start": []}

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        names["counted"].append(runtime.counters())
        names["start"] += runtime.to_host([next(names["model"].parameters())])
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}

    names["batches"] = batches()
    return names


def _trainer(context: Context) -> dict[str, Any]:
    """For the Trainer: as many samples as three epochs of batches of 8 need."""
    model = tiny_model(dropout=0.0)
    weight = next(model.parameters()).detach().clone()
    samples = STEPS // 3 * 8
    return {"model": model, "dataset": Blocks(samples), "counted": [context.runtime.counters()], "start": [weight]}
