"""The examples do what they say."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import ROOT, Ranks

STEPS, EVERY = 6, 2  # the loop keeps two checkpoints, those of steps 4 and 6


@pytest.mark.parametrize(
    ("device", "nproc"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.prove),
        pytest.param("cpu", 2, marks=pytest.mark.prove),
        pytest.param("xla", 1, marks=pytest.mark.xla),
    ],
)
def test_custom_loop_carries_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, cache: dict[str, str], device: str, nproc: int
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"

    def run(folder: Path) -> list[str]:
        arguments = (str(folder), device, STEPS, EVERY)
        outcome = ranks.run("examples.custom_loop:main", *arguments, nproc=nproc, environment=cache)
        outcome.check()
        return [line for line in outcome.logs[0].splitlines() if line.startswith("step ")]

    told = run(whole)
    assert [line.split(":")[0] for line in told] == ["step 2", "step 4", "step 6"]
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-6")
    assert run(again) == told[2:]
    files = [folder / "checkpoint-6" / "model.safetensors" for folder in (whole, again)]
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"STEPMARK_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The demo's module, with two runs in `tmp_path` that are the same."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    monkeypatch.setattr(demo, "STEPS", 4)
    for name, steps in (("RUN", [1, 2, 3, 3, 4]), ("UNDISTURBED", [1, 2, 3, 4])):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(demo, name, folder)
        lines: list[dict[str, Any]] = [{"step": step, "loss": 1 / step, "grad_norm": 0.1 * step} for step in steps]
        if name == "RUN":
            lines.insert(3, {"resumed": 2, "attempt": 1})
        lines.append({"step": 4, "eval_loss": 0.3})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "model.safetensors").write_bytes(b"weights")
    return demo


def compared(demo: Any) -> bool:
    return bool(demo.compare(demo.read_history(demo.RUN), demo.read_history(demo.UNDISTURBED)))


def test_demo_finds_equal_runs_equal(demo: Any) -> None:
    assert demo.read_history(demo.RUN).resumed == [2]
    assert compared(demo)


@pytest.mark.parametrize("key", ["loss", "grad_norm", "eval_loss"])
def test_demo_finds_one_bit(demo: Any, key: str) -> None:
    path = demo.RUN / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in reversed(lines) if key in line)
    line[key] = math.nextafter(line[key], math.inf)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not compared(demo)


def test_demo_finds_other_weights_and_missing_steps(demo: Any) -> None:
    (demo.RUN / "model.safetensors").write_bytes(b"Weights")
    assert not compared(demo)
    (demo.RUN / "model.safetensors").write_bytes(b"weights")
    path = demo.RUN / "metrics.jsonl"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"step": 4, "loss"' not in line))
    assert not compared(demo)


def test_demo_draws_its_curve(demo: Any) -> None:
    path = demo.RUN / "loss.png"
    demo.draw(demo.read_history(demo.RUN), demo.read_history(demo.UNDISTURBED), 3, path)
    assert path.read_bytes().startswith(b"\x89PNG")
