"""Real ranks save and restore together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import RankError, run_ranks
from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.sharding.spec import Box, Layout, Part, Piece, Shard


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 500), nn.LayerNorm(500))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return {"model": module, "optimizer": optimizer, "nest": {"step": 0, "t": torch.randn(3)}}


def step(state: dict[str, Any]) -> float:
    torch.manual_seed(0)
    loss = state["model"](torch.randn(8, 700)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return float(loss.detach())


def save_and_go_on(rank: int, folder: Path) -> list[float]:
    state = make(0)
    step(state)
    with Checkpointer(folder) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state, metadata={"rank": 0}, block=True)
    return [step(state), step(state)]


def restore_and_go_on(rank: int, folder: Path) -> list[float]:
    state = make(1)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.latest() == folder / "checkpoint-2"
        assert checkpointer.restore(state) == 2
    return [step(state), step(state)]


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_any_number_of_ranks_restores_what_any_other_saved(tmp_path: Path, writers: int, readers: int) -> None:
    expected = run_ranks(writers, save_and_go_on, tmp_path)
    found = run_ranks(readers, restore_and_go_on, tmp_path)
    assert expected == [expected[0]] * writers
    assert found == [expected[0]] * readers
    files = json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["files"]
    written = dict.fromkeys(range(writers), 0)
    for entry in files:
        begin = 0
        for rank, end in entry.get("writers", ()):
            written[rank] += end - begin
            begin = end
        assert "writers" not in entry or begin == entry["size"] - entry["header"]
    assert max(written.values()) - min(written.values()) <= 1 << 20
    assert not list(tmp_path.glob(".*checkpoint*"))


def shards(rank: int, size: int, seed: int) -> dict[str, Any]:
    """Tensors cut in every way: rows, columns, fused columns, ranges of a flat buffer, held by one rank, whole."""
    torch.manual_seed(seed)
    full = {name: torch.randn(12, 24) for name in ("rows", "columns", "fused", "flat", "whole")}
    n = 12 // size
    rows = full["rows"][rank * n : (rank + 1) * n].clone()
    m = 24 // size
    columns = full["columns"][:, rank * m : (rank + 1) * m].contiguous()
    third = 8 // size
    starts = [8 * part + rank * third for part in range(3)]
    fused = torch.cat([full["fused"][:, start : start + third] for start in starts], dim=1)
    fused_boxes = [(Box((0, start), (12, third)), (0, part * third)) for part, start in enumerate(starts)]
    cuts = [288 * r // size + (5 if 0 < r < size else 0) for r in range(size + 1)]
    buffer = torch.full((400,), -1.0)
    buffer[7 : 7 + cuts[rank + 1] - cuts[rank]] = full["flat"].view(-1)[cuts[rank] : cuts[rank + 1]]
    return {
        "rows": Shard(rows, Layout.box((12, 24), (rank * n, 0), (n, 24))),
        "columns": Shard(columns, Layout.box((12, 24), (0, rank * m), (12, m))),
        "fused": Shard(fused, Layout.boxes((12, 24), fused_boxes)),
        "flat": Shard(buffer, Layout.range((12, 24), cuts[rank], cuts[rank + 1], at=7)),
        "whole": full["whole"],
    }


def save_shards(rank: int, size: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": shards(rank, size, 0)}, block=True)


def restore_shards(rank: int, size: int, folder: Path) -> None:
    live, expected = shards(rank, size, 1), shards(rank, size, 0)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore({"nest": dict(live)}) == 1
    for name, value in live.items():
        a = value.tensor if isinstance(value, Shard) else value
        b = expected[name].tensor if isinstance(value, Shard) else expected[name]
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 4), (4, 1), (1, 2)])
def test_shards_are_restored_on_another_mesh(tmp_path: Path, writers: int, readers: int) -> None:
    run_ranks(writers, save_shards, writers, tmp_path)
    run_ranks(readers, restore_shards, readers, tmp_path)


def differing_steps(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(rank, {"nest": {}})


def differing_values(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"x": {"y": rank}}})


def failing_rank(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"x": object() if rank else 1}})


def holes(rank: int, folder: Path) -> None:
    piece = Part(Piece.of_range((8,), 0, 4), 0)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"t": Shard(torch.zeros(4), Layout((8,), (piece,)))}})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (differing_steps, "ranks save different steps"),
        (differing_values, "ranks save different values: nest / x / y is 0 on rank 0 and 1 on rank 1"),
        (failing_rank, "rank 1: nest"),
        (holes, "leave parts of it to nobody: 4 of 8"),
    ],
)
def test_what_ranks_cannot_save_together_fails_on_all(tmp_path: Path, function: Any, words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, function, tmp_path, timeout=20)
    message = str(caught.value)
    assert message.count("Traceback") >= 2
    assert words in message
    assert not list(tmp_path.glob("*checkpoint*"))


def restore_damaged(rank: int, folder: Path) -> int | None:
    state = make(1)
    with Checkpointer(folder) as checkpointer:
        return checkpointer.restore(state)


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    run_ranks(2, save_and_go_on, tmp_path)
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(os.stat(path).st_size // 2)
        file.write(b"\xff\xff\xff\xff")
    assert run_ranks(2, restore_damaged, tmp_path) == [1, 1]
    assert (tmp_path / "damaged-checkpoint-2").is_dir()
