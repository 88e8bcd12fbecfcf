"""Figures of what the machine did: processor, memory, disk and network of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.filesystem.files import files_in
from stepmark.filesystem.json_files import read_lines
from stepmark.report.figures import POINTS, Figure, line_of
from stepmark.report.history import History, Line
from stepmark.trainer.run_folder.run_log import SYSTEM, is_number

RANKS = 8  # of one run, at most
GIGA, MEGA = 1e9, 1e6


def system_figures(histories: Sequence[History], *, points: int = POINTS) -> list[Figure]:
    """Each rank of one run, or rank 0 of several; of many ranks those that differ most in their processor time."""
    figures = [
        Figure("processor", "Processor", "cores that a rank's process used", zero=True),
        Figure("rank_memory", "Memory of the ranks", "GB resident", zero=True),
        Figure("rank_device_memory", "Device memory of the ranks", "GB", zero=True),
        Figure("disk", "Disk", "MB per second, read and written by a rank's process", zero=True),
        Figure("network", "Network", "MB per second, received and sent by a rank's host", zero=True),
    ]
    sources = [("processor",), ("memory",), ("device_memory",), ("disk_read", "disk_written")]
    sources.append(("network_received", "network_sent"))
    scales = (1.0, 1 / GIGA, 1 / GIGA, 1 / MEGA, 1 / MEGA)
    for run, history in enumerate(histories):
        samples = read_samples(history.folder)
        ranks = _shown(samples) if len(histories) == 1 else sorted(samples)[:1]
        for rank in ranks:
            for figure, fields, scale in zip(figures, sources, scales, strict=True):
                lines = [
                    {**line, "value": total} for line in samples[rank] if (total := _sum(line, fields)) is not None
                ]
                if lines:
                    figure.series.append(line_of(history, run, lines, f"rank {rank}", "value", points, scale))
        if len(ranks) < len(samples) and len(histories) == 1:
            for figure in figures:
                figure.unit += f"; {len(ranks)} of {len(samples)} ranks, those with the least and most processor time"
    return [figure for figure in figures if figure.series]


def read_samples(folder: Path) -> dict[int, list[Line]]:
    """The samples of each rank, by step and time; of steps that were trained again, all."""
    found = {}
    for path in files_in(folder / SYSTEM, "rank-*.jsonl"):
        match = re.fullmatch(r"rank-(\d+)\.jsonl", path.name)
        lines = [line for line in read_lines(path) if line.get("step") is not None]
        if match and lines:
            found[int(match[1])] = sorted(lines, key=lambda line: (line["step"], line.get("time") or 0.0))
    return found


def _shown(samples: Mapping[int, Sequence[Line]]) -> list[int]:
    if len(samples) <= RANKS:
        return sorted(samples)
    by_use = sorted(
        samples, key=lambda rank: sum(line.get("processor") or 0.0 for line in samples[rank]) / len(samples[rank])
    )
    return sorted((*by_use[: RANKS // 2], *by_use[-RANKS // 2 :]))


def _sum(line: Line, fields: Sequence[str]) -> float | None:
    numbers = [float(line[field]) for field in fields if is_number(line.get(field))]
    return sum(numbers) if numbers else None
