"""The last batch of an epoch, where no label can say that a row does not count: the same losses on a lazy device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks


@pytest.mark.xla
def test_samples_count_once_on_a_lazy_device(ranks: Ranks, tmp_path: Path) -> None:
    program = "tests.support.smaller_batches:losses_of"
    lazy, eager = (ranks.run(program, str(tmp_path / device), device).check()[0] for device in ("xla", "cpu"))
    assert lazy.keys() == eager.keys()
    for name, expected in eager.items():
        assert len(expected) == 2 * (3 + 1), name
        assert lazy[name] == pytest.approx(expected, rel=1e-3), name
