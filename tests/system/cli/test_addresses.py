"""Every command that reads a checkpoint or a run gets the same from object storage as from a folder."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

import stepmark
from stepmark.checkpoint import downloads, mirror
from stepmark.checkpoint.format.checkpoint_folders import STOP_REQUEST
from stepmark.cli.main import run
from stepmark.filesystem.objects import Bucket
from stepmark.preflight.doctor import shared_folder
from stepmark.trainer.run_folder import run_mirror
from stepmark.watcher.evaluation_records import read_evaluations
from tests.support.buckets import SECRET, Proxy, make_bucket
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest, read_losses, read_status

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
    if words[:2] == ["evaluate", "RUN"] and place.startswith("s3:"):
        assert "evaluations.csv" not in printed, "it is only in what was downloaded"
        printed = printed.replace(" failed\n", " failed; see RUN/evaluations.csv\n")
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
        (["inspect", "RUN"], "there is nothing"),
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


def test_a_run_in_a_bucket_is_watched(
    trained: tuple[Path, str],
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may begin later. Its evaluations, and the best by its metric, are there as in a folder; again, nothing is left
    to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPMARK_CACHE", "../" + tmp_path.name + "/cache")
    shutil.copytree(trained[0], tmp_path / "whole", symlinks=True)
    with (tmp_path / "whole" / "used_recipe.yaml").open("a") as file:
        file.write("metric_for_best_model: perplexity\ngreater_is_better: true\n")
    place, sleep, waits = f"{make_bucket(proxy)}/run", time.sleep, 0
    words, told = ["--watch", "--max_samples", "2", "--interval", "0.1"], []
    for each in (str(tmp_path / "run"), place):
        waits = 0

        def wait(seconds: float, each: str = each) -> None:
            nonlocal waits
            if threading.current_thread() is threading.main_thread():
                waits += 1
                if waits == 1:  # before it has written its recipe
                    (tmp_path / "run").mkdir() if each != place else Bucket(place).put("status.json", b"{}")
                elif waits == 2 and each == place:
                    assert run(["copy", str(tmp_path / "whole"), place]) == 0
                elif waits == 2:
                    shutil.copytree(tmp_path / "whole", each, symlinks=True, dirs_exist_ok=True)
            sleep(seconds)

        capsys.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr(time, "sleep", wait)
            assert run(["evaluate", each, *words]) == 0
        printed = "".join(capsys.readouterr())
        told.append(re.sub(r"\d+(\.\d+)? MB.*|.* files, .*\n", "", printed.replace(each, "RUN")))
    assert told[0] == told[1]
    assert "RUN to appear\nwaiting for the first checkpoint in RUN\n" in told[0]
    bucket, names = Bucket(place), ("step", "status", "save", "setup", "eval_loss")
    there = [json.loads(line) for line in bucket.read("evaluations.jsonl").splitlines()]
    assert [[line.get(name) for name in names] for line in there] == [
        [line.get(name) for name in names] for line in read_evaluations(tmp_path / "run")
    ]
    assert bucket.read("best").decode() == (tmp_path / "run" / "best").readlink().name == "checkpoint-1"
    assert bucket.stat("evaluations.csv") is not None
    proxy.requests.clear()
    assert run(["evaluate", place, *words]) == 0
    written = {path.rpartition("/")[2].partition("-")[0] for method, path in proxy.requests if method == "PUT"}
    assert written <= {"best", "check"}
    assert not [path for _, path in proxy.requests if path.endswith("model.safetensors") and "checkpoint-1" in path]
    assert list((tmp_path / "cache" / "fetched").rglob("*")) == []


@pytest.mark.parametrize("there", [True, False], ids=["address", "folder"])
def test_a_run_is_asked_to_stop(
    trained: tuple[Path, str], proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    """By its folder or its address, while it is running."""
    bucket, folder = Bucket(f"{make_bucket(proxy)}/run"), tmp_path / "run"
    folder.mkdir()
    place = bucket.url if there else str(folder)

    def status(content: bytes) -> None:
        bucket.put("status.json", content)
        (folder / "status.json").write_bytes(content)

    assert run(["stop", place]) == 2
    assert f"{place}: no run has begun there" in capsys.readouterr().err
    assert run(["stop", str(trained[there])]) == 2
    assert f"{trained[there]}: the run has ended (done)" in capsys.readouterr().err
    for content in (b'{"state": "running"}', b"half of"):
        status(content)
        assert run(["stop", place, "--reason", "good enough"]) == 0
        assert capsys.readouterr().out.startswith(f"{place}: a live run will stop after its next save; ")
        found = bucket.read(STOP_REQUEST) if there else (folder / STOP_REQUEST).read_bytes()
        assert json.loads(found)["reason"] == "good enough"
    assert run(["stop", f"{place}/checkpoint-1"]) == 2
    assert "name its folder, or its address" in capsys.readouterr().err


def test_a_run_sees_in_its_bucket_that_it_is_asked_to_stop(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PUSH", 0.0)
    monkeypatch.setattr(run_mirror, "_push_late", lambda mirror: None)  # at the end of this process
    bucket, steps = Bucket(f"{make_bucket(proxy)}/run"), 2000

    def ask() -> None:
        while bucket.stat("status.json") is None:
            time.sleep(0.05)
        bucket.put(STOP_REQUEST, b'{"reason": "good enough"}')

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    fields = {"mirror_to": bucket.url, "max_steps": steps, "save_steps": 1, "save_total_limit": 2}
    assert run(["train", str(write_recipe(tmp_path, **fields))]) == 0
    asking.join()
    status = read_status(tmp_path / "out")
    assert (status["state"], status["reason"]) == ("done", f"stopped after step {status['step']}: good enough")
    assert status["step"] < steps
    assert json.loads(bucket.read("status.json"))["reason"] == status["reason"]
    assert bucket.stat(STOP_REQUEST) is None


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
    assert "not seen by this client: whether a rule of the bucket removes unfinished uploads" in printed
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


def train(folder: Path, **fields: object) -> str:
    """The digest of what the recipe's run ends with."""
    folder.mkdir(exist_ok=True)
    recipe = write_recipe(folder, **{"learning_rate": 1e-2, **fields})
    assert run(["train", str(recipe)]) == 0
    return model_digest(folder / "out")


@pytest.mark.parametrize("what", ["", "/checkpoint-1"])
def test_a_model_is_loaded_from_an_address(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The run's final model, or one of its checkpoints; and the recipe keeps the address."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "models", {})
    fields = {"config_name": None, "config_overrides": None}
    folder, place = (f"{each}{what}" for each in trained)
    there = train(tmp_path / "there", model_name_or_path=place, tokenizer_name=place, **fields)
    assert there == train(tmp_path / "here", model_name_or_path=folder, tokenizer_name=folder, **fields)
    assert f"model_name_or_path: {place}\n" in (tmp_path / "there" / "out" / "used_recipe.yaml").read_text()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3:")]


def test_a_model_in_a_bucket_is_evaluated(
    trained: tuple[Path, str], proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, which has a folder of it, and by the function."""
    model, bucket = tmp_path / "model", Bucket(f"{make_bucket(proxy)}/model")
    assert run(["consolidate", str(trained[0]), str(model)]) == 0
    for path in model.iterdir():
        bucket.put(path.name, path.read_bytes())
    data, told = str(trained[0].parent / "text.txt"), []
    for place in (str(model), bucket.url):
        capsys.readouterr()
        assert run(["evaluate", place, "--data", data, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert told[0] == told[1]
    samples = [{"input_ids": list(range(5, 13)), "labels": list(range(5, 13))}]
    found = [stepmark.evaluate(place, samples)["eval_loss"] for place in (str(model), bucket.url)]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_an_adapter_names_the_address_of_its_base(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "models", {})
    fields = {"config_name": None, "config_overrides": None, "peft": "lora", "save_steps": 1}
    recipe = write_recipe(tmp_path, model_name_or_path=trained[1], tokenizer_name=trained[1], **fields)
    assert run(["train", str(recipe)]) == 0
    saved = tmp_path / "out" / "checkpoint-1"
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == trained[1]
    shutil.rmtree(tmp_path / "cache")
    downloads.models.clear()
    for words in (["evaluate", str(saved)], ["consolidate", str(saved), str(tmp_path / "m"), "--merge-adapters"]):
        assert run([*words, *(["--data", str(tmp_path / "text.txt")] if words[0] == "evaluate" else [])]) == 0


def test_a_model_that_has_changed_is_downloaded_again(
    trained: tuple[Path, str], proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    bucket = Bucket(f"{make_bucket(proxy)}/model")
    for content in (b"{}", b"[]"):
        bucket.put("config.json", content)
        bucket.put("sub/file", b"same")
        monkeypatch.setattr(downloads, "models", {})
        copy = downloads.local_model(bucket.url)
        assert (Path(copy) / "config.json").read_bytes() == content
        proxy.requests.clear()
        monkeypatch.setattr(downloads, "models", {})
        assert downloads.local_model(bucket.url) == copy
        assert not [each for each in proxy.requests if each[0] == "GET" and "list-type" not in each[1]]
        time.sleep(1.0)  # the store's times are in seconds


@pytest.mark.parametrize("what", ["", "/checkpoint-1"])
def test_a_run_resumes_from_an_address(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of a run, the newest checkpoint."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    fields = {"eval_strategy": "steps", "eval_steps": 1, "validation_file": str(trained[0].parent / "text.txt")}
    fields |= {"train_file": str(trained[0].parent / "text.txt"), "max_steps": 3, "save_steps": 1}
    fields |= {"load_best_model_at_end": True, "learning_rate": 5e-5, "logging_steps": 1}
    named = f"{trained[0]}{what or '/checkpoint-2'}"
    there = train(tmp_path / "there", resume_from_checkpoint=f"{trained[1]}{what}", **fields)
    assert there == train(tmp_path / "here", resume_from_checkpoint=named, **fields)
    assert read_losses(tmp_path / "there" / "out") == read_losses(tmp_path / "here" / "out")


def test_a_run_goes_back_in_its_own_place(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an empty machine, to a checkpoint that is named by its address: with the logs up to it."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_mirror, "_push_late", lambda mirror: None)  # at the end of this process
    place, fields = f"{make_bucket(proxy)}/run", {"max_steps": 3, "save_steps": 1, "logging_steps": 1}
    train(tmp_path / "a", mirror_to=place, **fields)
    before = read_losses(tmp_path / "a" / "out")
    shutil.rmtree(tmp_path / "a" / "out")
    train(tmp_path / "a", mirror_to=place, resume_from_checkpoint=f"{place}/checkpoint-1", **fields)
    assert read_losses(tmp_path / "a" / "out") == before
    left = [each.name.partition("/left-")[0] for each in Bucket(place).objects() if "/left-" in each.name]
    assert left == ["checkpoint-2", "checkpoint-3"]
    assert sorted(before) == [1, 2, 3]
    recipe = write_recipe(tmp_path / "a", mirror_to=place, resume_from_checkpoint=f"{place}/checkpoint-7", **fields)
    assert run(["train", str(recipe)]) == 2
    assert f"there is no complete checkpoint {place}/checkpoint-7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "there", "fault", "error"),
    [
        ("model_name_or_path", {}, None, "error: PLACE: there is nothing"),
        ("model_name_or_path", {"a.txt"}, None, "model_name_or_path: PLACE has no config.json"),
        ("model_name_or_path", {"config.json"}, 403, "error: PLACE: on purpose (Fault403)"),
        ("resume_from_checkpoint", {}, None, "error: PLACE: there is no complete checkpoint"),
        ("resume_from_checkpoint", {"a.txt"}, None, "error: PLACE: there is no complete checkpoint"),
        ("resume_from_checkpoint", {}, 403, "error: PLACE: on purpose (Fault403)"),
    ],
)
def test_what_cannot_be_downloaded_is_named_before_training(
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    field: str,
    there: set[str],
    fault: int | None,
    error: str,
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    place = f"{make_bucket(proxy)}/run"
    for name in there:
        Bucket(place).put(name, b"{}")
    if field == "model_name_or_path":
        recipe = write_recipe(tmp_path, config_name=None, config_overrides=None, model_name_or_path=place)
    else:
        recipe = write_recipe(tmp_path, resume_from_checkpoint=place)
    proxy.fault = lambda *_: fault
    code = run(["train", str(recipe)])
    proxy.fault = lambda *_: None
    printed = capsys.readouterr().err
    assert code == (1 if fault else 2), printed
    assert error.replace("PLACE", place) in printed
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
