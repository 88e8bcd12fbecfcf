"""ZeRO-1 by whole parameters against one rank with the same global batch, and against itself, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_checkpoints import checksums
from tests.support.programs import logged
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.whole_parameter_programs"


@pytest.mark.parametrize("name", ["Adafactor", "TorchAdafactor", "Muon", "Lamb"])
def test_twenty_steps_are_those_of_one_rank(ranks: Ranks, name: str) -> None:
    (expected,) = ranks.run(f"{PROGRAMS}:train", name, False).check()
    for nproc in (2, 3):
        found = ranks.run(f"{PROGRAMS}:train", name, True, nproc=nproc).check()
        assert all(each["weights"] == found[0]["weights"] for each in found)
        for parameter, values in expected["weights"].items():
            assert found[0]["weights"][parameter] == pytest.approx(values, rel=1e-5, abs=1e-6), (nproc, parameter)


def test_a_rank_holds_the_state_of_its_parameters_alone(ranks: Ranks) -> None:
    """Moments of 35, 45, 27, 5 and 1 elements, and as many masters of bf16; rounds of one parameter change no bit."""
    found = ranks.run(f"{PROGRAMS}:train", "Lamb", True, "bfloat16", nproc=2).check()
    first, second = 45 + 5 + 1, 35 + 27  # the largest first, each to the rank with the least so far
    assert [each["bytes"] for each in found] == [3 * 4 * first, 3 * 4 * second]
    small = {"bucket_cap_mb_all_gather": 1e-5}
    again = ranks.run(f"{PROGRAMS}:train", "Lamb", True, "bfloat16", small, nproc=2).check()
    assert again == found


SAVED = [(2, True), (1, False)]  # number of ranks, and whether they share the optimizer's state
MESHES = [(2, True), (3, True), (1, True), (1, False)]


@pytest.mark.parametrize(
    "name", ["Adafactor", *(pytest.param(each, marks=pytest.mark.prove) for each in ("Lamb", "Muon"))]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.prove)])
def test_a_checkpoint_of_any_mesh_restores_on_any_other(ranks: Ranks, tmp_path: Path, name: str, dtype: str) -> None:
    close = {"rel": 1e-4, "abs": 1e-5} if dtype == "float32" else {"rel": 3e-2, "abs": 3e-2}
    for nproc, sharded in SAVED:
        folder = tmp_path / f"{nproc}"
        expected = ranks.run(f"{PROGRAMS}:save", name, str(folder), sharded, dtype, nproc=nproc).check()[0]
        stored = checksums(folder / "checkpoint-6")
        for other, other_sharded in MESHES:
            if dtype == "bfloat16" and sharded != other_sharded:
                continue  # without ZeRO-1 a custom loop has no masters
            found = ranks.run(f"{PROGRAMS}:restore", name, str(folder), other_sharded, dtype, nproc=other).check()
            assert checksums(Path(found[0]["again"])) == stored
            if (other, other_sharded) == (nproc, sharded):
                assert found[0]["weights"] == expected
            for parameter, values in expected.items():
                assert found[0]["weights"][parameter] == pytest.approx(values, **close)


def test_a_state_dict_continues_on_its_own_rank(ranks: Ranks) -> None:
    for same, message in ranks.run(f"{PROGRAMS}:own_state", "Lamb", nproc=2).check():
        assert same
        assert message.startswith("state_dict: its rank is 7")


def test_a_parameter_that_is_frozen_later_stays_as_it_is(ranks: Ranks) -> None:
    assert ranks.run(f"{PROGRAMS}:frozen_later").check() == [[False, True]]


def test_gradients_are_accumulated_in_fp32_with_the_hook(ranks: Ranks) -> None:
    found = [ranks.run(f"{PROGRAMS}:accumulated", hook).check() for hook in (False, True)]
    assert found == [[1.0], [pytest.approx(1 + 999 / 256)]]


@pytest.mark.parametrize("optim", ["adafactor", pytest.param("muon", marks=pytest.mark.prove), "adamw_8bit"])
def test_the_trainer_shards_and_resumes(ranks: Ranks, tmp_path: Path, optim: str) -> None:
    """A killed and resumed run is bit for bit the same, and close to one that does not shard."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    options = {"device": "cpu", "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "zero_1": True}

    def run(name: str, **more: Any) -> dict[str, Any]:
        told = {**options, "optim": optim, **more, "output_dir": str(tmp_path / name)}
        ranks.run("tests.support.programs:train", told, nproc=2)
        return logged(tmp_path / name)["losses"]

    whole = run("whole", zero_1=False)
    undisturbed = run("undisturbed")
    assert undisturbed == whole
    run("killed", kill_at=5)
    assert run("killed", resume_from_checkpoint=True) == undisturbed
    assert len(undisturbed) == 8


@pytest.mark.prove
@pytest.mark.parametrize("optim", ["adafactor", "muon"])
def test_pipeline_stages_divide_their_own_parameters(ranks: Ranks, tmp_path: Path, optim: str) -> None:
    """Bit for bit what the same stages compute without ZeRO-1, also resumed; and on two ranks without stages, close."""
    common = {"device": "cpu", "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "layers": 4, "optim": optim}
    stages = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}

    def run(name: str, nproc: int = 4, **more: Any) -> dict[str, Any]:
        told = {**common, **more, "output_dir": str(tmp_path / name)}
        ranks.run("tests.support.programs:train", told, nproc=nproc)
        return logged(tmp_path / name)["losses"]

    whole = run("whole", **stages)
    assert len(whole) == 8
    assert run("undisturbed", zero_1=True, **stages) == whole
    run("killed", zero_1=True, kill_at=5, **stages)
    assert run("killed", zero_1=True, resume_from_checkpoint=True, **stages) == whole
    run("moved", zero_1=True, kill_at=5, **stages)
    moved = run("moved", nproc=2, zero_1=True, resume_from_checkpoint=True, gradient_accumulation_steps=2)
    for step, values in whole.items():
        assert moved[step] == pytest.approx(values, rel=1e-4)
