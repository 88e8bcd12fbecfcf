"""Every listed architecture computes the same in stages as in one piece: logits of padded samples in evaluation, the
loss, and every gradient; those that are listed for it also with a loss over the routers of all layers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.parallel.architectures import ROUTER_LOSSES, STAGES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.prove
def test_all_that_are_listed(record_property: Callable[[str, object], None]) -> None:
    command = [sys.executable, "scripts/architectures.py", "--pipeline", "--only", *STAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    verdicts = {line.split()[1]: line for line in done.stdout.splitlines() if line.split()[1:2]}
    assert {kind: line for kind, line in verdicts.items() if not line.startswith("passed")} == {}
    assert set(verdicts) == set(STAGES), done.stderr[-2000:]
    assert {kind for kind, line in verdicts.items() if line.endswith("router losses")} == ROUTER_LOSSES
    record_property("architectures", len(verdicts))
