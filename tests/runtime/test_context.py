"""How a rank joins the others where the script has created a process group before."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stepmark.launch.signal_listener import INTERRUPTED
from tests.support.processes import free_port
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.script_group_programs"


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("gloo", "cpu"),
        ("accelerate", "cpu"),
        ("file", "cpu"),
        pytest.param("gloo", "xla", marks=pytest.mark.xla),
        pytest.param("env-xla", "xla", marks=pytest.mark.xla),
    ],
)
def test_a_scripts_group_connects_the_ranks(ranks: Ranks, tmp_path: Path, kind: str, device: str) -> None:
    kind = f"file:{tmp_path / 'store'}" if kind == "file" else kind
    found = ranks.run(f"{PROGRAMS}:connected", kind, free_port(), device, nproc=2).check()
    for rank, each in enumerate(found):
        assert each == {"others": ["0", "1"], "leader": rank == 0, "ranks": [0, 1], "total": [2.0, 2.0]}


def test_ranks_agree_on_a_signal_in_a_scripts_group(ranks: Ranks, tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 100, "signal_grace": 60}
    options["signal_at"] = {"event": "on_step_begin", "step": 2, "ranks": [1], "numbers": [int(signal.SIGTERM)]}
    stopped = ranks.run(f"{PROGRAMS}:train", "gloo", free_port(), options, nproc=2)
    assert stopped.codes == [INTERRUPTED, INTERRUPTED], stopped.logs
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


@pytest.mark.xla
def test_ranks_that_an_xla_group_would_leave_alone_are_refused(ranks: Ranks) -> None:
    first, second = ranks.run(f"{PROGRAMS}:refusal", "xla", free_port(), "xla", {}, nproc=2).check()
    assert "process group (backend xla) has this process as rank 0 of 1" in first
    assert "as rank 1 of 2; start the script with torchrun or srun, and remove its init_process_group" in second


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": None, "WORLD_SIZE": None}, "as rank 0 of 1; start the script with torchrun"),
        ({"WORLD_SIZE": "4"}, "of 4; start the script with torchrun"),
    ],
)
def test_a_scripts_group_of_other_ranks_than_the_launchers_is_refused(
    ranks: Ranks, environment: dict[str, str | None], words: str
) -> None:
    messages = ranks.run(f"{PROGRAMS}:refusal", "gloo", free_port(), "cpu", environment, nproc=2).check()
    for rank, message in enumerate(messages):
        assert f"the script's process group (backend gloo) has this process as rank {rank} of 2" in message
        assert words in message
