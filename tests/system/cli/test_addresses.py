"""Every command that reads a checkpoint or a run gets the same from object storage as from a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stepmark.cli.main import run
from stepmark.filesystem.objects import Bucket
from stepmark.preflight.doctor import shared_folder
from tests.support.buckets import SECRET, Proxy, make_bucket
from tests.support.recipes import write_recipe

OUT = "OUT"
COMMANDS = (
    ["inspect", "RUN"],
    ["inspect", "RUN/checkpoint-2"],
    ["inspect", "RUN/checkpoint-2", "--json"],
    ["verify", "RUN"],
    ["verify", "RUN/checkpoint-1", "--json"],
    ["consolidate", "RUN", OUT],
    ["consolidate", "RUN/checkpoint-1", OUT],
    ["export", "RUN", OUT, "--to", "dcp"],
    ["export", "RUN/checkpoint-1", OUT, "--to", "hf-trainer"],
    ["evaluate", "RUN", "--max_samples", "2"],
    ["evaluate", "RUN/checkpoint-1", "--max_samples", "2", "--json"],
    ["report", "RUN", "--out", f"{OUT}/page.html"],
    ["rows", "RUN", "--step", "1"],
)


@pytest.fixture(scope="module")
def trained(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and its address."""
    folder, place = tmp_path_factory.mktemp("trained"), f"{make_bucket(proxy)}/team/run"
    fields = {"save_steps": 1, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    recipe = write_recipe(folder, output_dir=str(folder / "run"), **fields, validation_file=str(folder / "text.txt"))
    assert run(["train", str(recipe)]) == 0
    assert run(["copy", str(folder / "run"), place]) == 0
    return folder / "run", place


def told(
    words: list[str], place: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, dict[str, int]]:
    """The exit code, what is printed without paths and times, and the files that are written, with their sizes."""
    out = folder / "out"
    code = run([each.replace("RUN", place).replace(OUT, str(out)) for each in words])
    printed = capsys.readouterr().out.replace(str(out), OUT)
    printed = re.sub(r"[^\s\"]*/(run|team/run)\b", "RUN", printed)
    printed = re.sub(r"\d+\.?\d* (s|tokens/s)\b|\d\d:\d\d:\d\d|\"\w*(time|per_second)\": [\d.]+", "#", printed)
    files = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    return code, printed, {name: size for name, size in files.items() if not name.endswith((".html", ".metadata"))}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_address_is_read_like_a_folder(
    trained: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    folder, place = trained
    (tmp_path / "there").mkdir()
    of_folder = told(words, str(folder), tmp_path, capsys)
    assert of_folder[0] == 0
    assert told(words, place, tmp_path / "there", capsys) == of_folder
    assert list((tmp_path / "cache" / "fetched").rglob("*")) == []
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3:")]


def test_a_checkpoint_of_another_tool(
    trained: tuple[Path, str], proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["export", str(trained[0]), "theirs", "--to", "hf-trainer"]) == 0
    bucket = Bucket(f"{make_bucket(proxy)}/checkpoint-2")
    for path in (tmp_path / "theirs").rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(tmp_path / "theirs")), path.read_bytes())
    assert run(["import", bucket.url, "ours"]) == 0
    assert run(["import", "theirs", "same"]) == 0
    weights = [(tmp_path / name).rglob("model*.safetensors") for name in ("ours", "same")]
    assert [path.stat().st_size for path in weights[0]] == [path.stat().st_size for path in weights[1]]


def test_what_is_damaged_is_found_there(
    trained: tuple[Path, str], proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{make_bucket(proxy)}/run"
    assert run(["copy", str(trained[0]), place]) == 0
    bucket = Bucket(place)
    files = ("/model.safetensors", "/state.json")
    names = [each.name for each in bucket.objects("checkpoint-1") if each.name.endswith(files)]
    bucket.put(names[0], bucket.read(names[0])[:-1] + b"?")
    bucket.delete(names[1:])
    capsys.readouterr()
    assert run(["verify", place]) == 1
    printed = capsys.readouterr().out
    assert f"{place}/checkpoint-1: corrupted, 2 faults" in printed
    assert "state.json: is missing" in printed
    assert f"{place}/checkpoint-2: good" in printed
    assert run(["verify", f"{place}/checkpoint-7"]) == 2
    assert "there is no complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["inspect", "RUN"], "there is no run"),
        (["verify", "RUN"], "there are no checkpoints"),
        (["import", "RUN", "out"], "there is nothing"),
        (["consolidate", "RUN/checkpoint-1", "out"], "there is no complete checkpoint"),
    ],
)
def test_what_is_not_there_is_named(
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"{make_bucket(proxy)}/run"
    assert run([each.replace("RUN", place) for each in words]) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert place in printed
    assert SECRET not in printed
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == "[]"


def test_a_run_in_a_bucket_is_not_watched(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", trained[1], "--watch"]) == 2
    assert "--watch: follows a run's folder" in capsys.readouterr().err


def test_the_doctor_and_the_plan_know_the_place(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_folder, "MEASURED_BYTES", 1 << 20)
    place = f"{make_bucket(proxy)}/run"
    recipe = str(write_recipe(tmp_path, mirror_to=place))
    assert run(["plan", recipe]) == 0
    assert re.search(
        r"^bucket +2\d requests and 0 s at 1 Gbit/s a checkpoint; up to 192 MiB", capsys.readouterr().out, re.M
    )
    run(["doctor", "--recipe", recipe])
    printed = capsys.readouterr().out
    assert "objects are made, replaced under a condition, read, listed and deleted" in printed
    assert re.search(r"bucket +\d+ MB/s up and \d+ MB/s down for an object of 1 MiB", printed)
    assert Bucket(place).objects() == []
    proxy.fault = lambda _, request: 403 if request[0] == "PUT" else None
    assert run(["doctor", "--recipe", recipe]) == 1
    assert "on purpose (Fault403); see to the permissions of these credentials" in capsys.readouterr().out
    assert run(["train", recipe]) == 1
    assert "mirror_to: on purpose (Fault403)" in capsys.readouterr().err
    proxy.fault = lambda *_: None


def test_a_list_that_fails_is_no_empty_run(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{make_bucket(proxy)}/run"
    recipe = write_recipe(tmp_path, mirror_to=place, resume_from_checkpoint=True)
    proxy.fault = lambda _, request: 403 if "delimiter" in request[1] else None
    assert run(["train", str(recipe)]) == 1
    assert f"on purpose (Fault403); see to the permissions of these credentials: {place}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    proxy.fault = lambda *_: None
