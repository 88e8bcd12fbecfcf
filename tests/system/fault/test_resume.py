"""A killed run that is started again goes on as if nothing had happened, bit for bit.

In `make test` every two values of QUICK meet in a run; `make prove` takes each mesh, optimizer, data and precision of
AXES, the other values in turn, and lazy devices.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.pairwise import Cell, pairwise
from tests.support.ranks import Ranks

PROGRAM, EACH = "tests.support.programs:train", "tests.support.programs:train_each"
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp": (2, {}),
    "zero_1": (2, {"zero_1": True}),
    "fsdp": (2, {"fsdp": True}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2, "layers": 2}),
}
SPLIT = ("tp", "pp")  # over ranks that train on the same samples
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "autocast": {"bf16": True},
    "rounded": {"reduce_dtype": "bfloat16"},
}
AXES: dict[str, list[Any]] = {
    "mesh": list(MESHES),
    "optim": ["adamw_torch", "sgd", "adafactor", "muon"],
    "data": ["list", "workers", "drawn", "stream", "loader"],
    "precision": list(PRECISIONS),
    "accumulation": [1, 2],
    "saves": ["now", "behind"],
    "killed": ["all", "the last"],
}


def possible(cell: Cell) -> bool:
    mesh, elementwise = cell["mesh"], cell["optim"] in ("adamw_torch", "sgd")
    if cell.get("device") == "xla":
        works = elementwise and mesh in ("one", "dp", "zero_1") and cell["precision"] in ("float32", "bfloat16")
        return works and cell["data"] == "workers"
    return (
        (elementwise or mesh != "fsdp")
        and (cell["data"] == "list") == (mesh in SPLIT)
        and (cell["precision"] != "rounded" or mesh in ("dp", "zero_1"))
        and (cell["accumulation"] > 1 or mesh != "pp")
        and (cell["killed"] == "all" or mesh != "one")
    )


LAZY: Cell = {"device": "xla", "mesh": "one", "optim": "adamw_torch", "data": "workers", "precision": "float32"}
LAZY |= {"accumulation": 2, "saves": "behind", "killed": "all"}
WORKERS = {**LAZY, "device": "cpu", "saves": "now"}
QUICK = {**AXES, "data": ["list", "drawn", "stream", "loader"]}
QUICK |= {"optim": ["adamw_torch", "adafactor"], "precision": ["float32", "bfloat16"]}
TABLE = [*pairwise(QUICK, possible), WORKERS, LAZY]


def in_turn() -> list[Cell]:
    """Each mesh, optimizer, data and precision, on each device."""
    turns, found = ("accumulation", "saves", "killed"), []
    axes = {"device": ["cpu", "xla"], **{name: values for name, values in AXES.items() if name not in turns}}
    for number, values in enumerate(product(*axes.values())):
        cell = dict(zip(axes, values, strict=True))
        cell |= {name: AXES[name][(number >> shift) % 2] for shift, name in enumerate(turns)}
        cell |= {"accumulation": 2} if cell["mesh"] == "pp" else {}
        cell |= {"killed": "all"} if cell["mesh"] == "one" else {}
        found += [cell] if possible(cell) else []
    return found


def cases() -> list[Any]:
    marked = [(cell, []) for cell in TABLE] + [(cell, [pytest.mark.prove]) for cell in in_turn()]
    xla = {"xla": [pytest.mark.xla]}
    return [
        pytest.param(
            cell, marks=[*marks, *xla.get(cell.get("device", "cpu"), [])], id="-".join(map(str, cell.values()))
        )
        for cell, marks in marked
    ]


def options(folder: Path, cell: Cell) -> dict[str, Any]:
    """10 steps over an epoch and a half, saved every 3 steps, logged every 2, dropout on."""
    nproc, mesh = MESHES[cell["mesh"]]
    replicas = 1 if cell["mesh"] in SPLIT else nproc
    return {
        "output_dir": str(folder),
        "device": cell.get("device", "cpu"),
        "optim": cell.get("optim", "adamw_torch"),
        "data": cell.get("data", "list"),
        "gradient_accumulation_steps": cell.get("accumulation", 1),
        "per_device_train_batch_size": 4 // replicas // cell.get("accumulation", 1),
        "samples": 25,
        "max_steps": 10,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "async_save": cell.get("saves") == "behind",  # else it is certain which checkpoint a kill finds
        "eval_strategy": "epoch",
        "resume_from_checkpoint": True,
        **mesh,
        **PRECISIONS[cell.get("precision", "float32")],
    }


@pytest.mark.parametrize("cell", cases())
def test_a_killed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, cell: Cell) -> None:
    nproc = MESHES[cell["mesh"]][0]
    killed = options(tmp_path / "killed", cell)
    victims = {"all": None, "the last": [nproc - 1]}[cell["killed"]]
    assert -9 in ranks.run(PROGRAM, {**killed, "kill_at": 5, "kill_ranks": victims}, nproc=nproc).codes
    both = ranks.run(EACH, killed, options(tmp_path / "whole", cell), nproc=nproc).check()
    resumed, undisturbed = zip(*both, strict=True)
    if cell["saves"] == "now":
        assert resumed[0]["resumed"] == [3]
    else:
        assert set(resumed[0]["resumed"]) <= {0, 3}  # 0 where the save had not ended, and all began again
    check_same(resumed, undisturbed)


def check_same(resumed: Any, undisturbed: Any) -> None:
    assert len(undisturbed[0]["losses"]) >= 5
    assert resumed[0]["losses"] == undisturbed[0]["losses"]
    assert resumed[0]["evaluations"] == undisturbed[0]["evaluations"]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in undisturbed]


INTERLEAVED = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
PIPELINES = [
    pytest.param("cpu", 2, {}, id="cpu"),
    *(pytest.param("cpu", 4, {"zero_1": True, "optim": name}, id=f"cpu, ZeRO-1, {name}") for name in AXES["optim"]),
    pytest.param("xla", 2, {}, id="xla", marks=pytest.mark.xla),
    pytest.param("xla", 2, INTERLEAVED, id="xla, interleaved", marks=pytest.mark.xla),
]


@pytest.mark.prove
@pytest.mark.parametrize(("device", "nproc", "more"), PIPELINES)
def test_a_killed_pipeline_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int, more: dict[str, Any]
) -> None:
    """Killed in its first stage, and then in its last one; with dropout, whose numbers travel with hidden states."""
    cell = {"device": device, "mesh": "pp", "accumulation": 2}
    pipeline = {"layers": 4, "max_steps": 14, "per_device_train_batch_size": 4 // nproc, **more}
    killed = {**options(tmp_path / "killed", cell), **pipeline}
    for step, rank in ((5, 0), (11, nproc - 1)):
        assert -9 in ranks.run(PROGRAM, {**killed, "kill_at": step, "kill_ranks": [rank]}, nproc=nproc).codes
    both = ranks.run(EACH, killed, {**options(tmp_path / "whole", cell), **pipeline}, nproc=nproc).check()
    resumed, undisturbed = zip(*both, strict=True)
    assert resumed[0]["resumed"] == [3, 9]
    check_same(resumed, undisturbed)


def test_resuming_at_an_epochs_end_still_ends_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    """Killed between the save at an epoch's last step and the evaluation that the epoch's end asks for."""
    steps = {"save_steps": 7, "max_steps": 9}  # 7 steps an epoch
    killed = {**options(tmp_path / "killed", {"mesh": "one"}), **steps}
    assert ranks.run(PROGRAM, {**killed, "kill_at_event": "on_epoch_end"}).codes == [-9]
    ((resumed, undisturbed),) = ranks.run(
        EACH, killed, {**options(tmp_path / "whole", {"mesh": "one"}), **steps}
    ).check()
    assert resumed["resumed"] == [7]
    assert resumed["evaluations"] == undisturbed["evaluations"]
    assert resumed["weights"] == undisturbed["weights"]


def test_resuming_on_another_mesh_sees_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    """One rank, then two with the same global batch, then one again: the losses of one rank throughout."""
    plain = {**options(tmp_path / "whole", {"mesh": "one"}), "dropout": 0.0}
    moved = {**options(tmp_path / "moved", {"mesh": "one"}), "dropout": 0.0}
    ranks.run(PROGRAM, {**moved, "kill_at": 4})
    two = {**moved, "per_device_train_batch_size": 2, "kill_at": 10}
    ranks.run(PROGRAM, two, nproc=2)
    moved["data_parallel_replicas"] = 1  # those of two ranks would be twice as many samples
    ((resumed, undisturbed),) = ranks.run(EACH, moved, plain).check()
    assert resumed["resumed"] == [3, 9]
    for step, (loss, norm) in undisturbed["losses"].items():
        assert resumed["losses"][step] == pytest.approx([loss, norm], rel=1e-5)


def test_a_finished_run_of_two_ranks_that_is_started_again_stays_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    given = {**options(tmp_path / "run", {"mesh": "dp"}), "max_steps": 4}
    ranks.run(PROGRAM, given, nproc=2).check()
    names = ("trainer_state.json", "train_results.json")
    before = [(tmp_path / "run" / name).read_text() for name in names]
    for again in ranks.run(PROGRAM, given, nproc=2).check():
        assert again["resumed"] == [4]
    assert [(tmp_path / "run" / name).read_text() for name in names] == before
