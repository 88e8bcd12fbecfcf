"""ZeRO-1 by whole parameters against one rank with the same global batch, and against itself, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_checkpoints import checksums
from tests.support.programs import logged
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.whole_parameter_programs"


def test_twenty_steps_are_those_of_one_rank(ranks: Ranks) -> None:
    names = ["Adafactor", "TorchAdafactor", "Muon", "Lamb"]
    (expected,) = ranks.run(f"{PROGRAMS}:train_each", names, False).check()
    for nproc in (2, 3):
        found = ranks.run(f"{PROGRAMS}:train_each", names, True, nproc=nproc).check()
        for number, name in enumerate(names):
            first = found[0][number]["weights"]
            assert all(rank[number]["weights"] == first for rank in found)
            for parameter, values in expected[number]["weights"].items():
                assert first[parameter] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, nproc, parameter)


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


def test_eight_bit_states_are_sharded_and_resumed(ranks: Ranks, tmp_path: Path) -> None:
    """A killed and resumed run is bit for bit the same, as one that does not shard."""
    pytest.importorskip("bitsandbytes")
    options = {"device": "cpu", "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "zero_1": True}

    def run(name: str, **more: Any) -> dict[str, Any]:
        told = {**options, "optim": "adamw_8bit", **more, "output_dir": str(tmp_path / name)}
        ranks.run("tests.support.programs:train", told, nproc=2)
        return logged(tmp_path / name)["losses"]

    whole = run("whole", zero_1=False)
    undisturbed = run("undisturbed")
    assert undisturbed == whole
    run("killed", kill_at=5)
    assert run("killed", resume_from_checkpoint=True) == undisturbed
    assert len(undisturbed) == 8
