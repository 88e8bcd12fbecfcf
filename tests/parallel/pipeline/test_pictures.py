"""The pictures and numbers in docs/pipelines.md are those of the schedules."""

from __future__ import annotations

import re
from pathlib import Path

from stepmark.parallel.pipeline.schedules import SCHEDULES, ideal_idle_share, make_schedule
from tests.support.schedules import picture

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "pipelines.md").read_text(encoding="utf-8")


def test_pictures() -> None:
    found = re.findall(r"<!-- schedule (\S+) (\d+) (\d+) (\d+) -->\n```\n(.*?)\n```", PAGE, re.DOTALL)
    assert sorted(kind for kind, *_ in found) == sorted(SCHEDULES)
    for kind, ranks, micro_batches, chunks, shown in found:
        assert shown == picture(make_schedule(kind, int(ranks), int(micro_batches), int(chunks)))


def test_idle_shares() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+)% \| (\d+)% \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert rows
    for ranks, micro_batches, plain, interleaved, gpipe, one_f_one_b in (map(int, row) for row in rows):
        assert f"{plain}%" == f"{ideal_idle_share(ranks, micro_batches):.0%}"
        assert f"{interleaved}%" == f"{ideal_idle_share(ranks, micro_batches, 2):.0%}"
        assert gpipe == make_schedule("gpipe", ranks, micro_batches).in_flight(0)
        assert one_f_one_b == make_schedule("1f1b", ranks, micro_batches).in_flight(0)
