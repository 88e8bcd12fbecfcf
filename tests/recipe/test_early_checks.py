"""What a recipe names is looked for before torch is imported, and the hub is asked at most once."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stepmark.config.recipe import read_recipe
from stepmark.errors import UsageError
from stepmark.recipe.early_checks import check_early, check_model_folder, work_offline_without_hub
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

REFUSED = """
import json, sys
from stepmark.cli.main import run
for arguments in json.loads(sys.argv[1]):
    print(run(arguments))
heavy = {"torch", "torch_xla", "transformers", "numpy", "pyarrow"} & set(sys.modules)
print(sorted(heavy))
"""


def test_what_is_missing_or_in_the_way_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    (tmp_path / "used" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    flags = {
        f"train_file: file {tmp_path}/none.txt does not exist": ["--train_file", f"{tmp_path}/none.txt"],
        f"validation_file: no file matches {tmp_path}/*.csv": ["--validation_file", f"{tmp_path}/*.csv"],
        f"output_dir: {tmp_path}/used has checkpoints": ["--output_dir", f"{tmp_path}/used"],
        f"resume_from_checkpoint: there is no {tmp_path}/x": ["--resume_from_checkpoint", f"{tmp_path}/x"],
        "device: 'gpu' is unknown": ["--device", "gpu", "--nproc", "2"],
        "metric_for_best_model: evaluations have no eval_accuracy without a function": [
            *("--eval_strategy", "epoch", "--metric_for_best_model", "accuracy")
        ],
        "metrics and eval_strategy: metrics need evaluations": ["--metrics", "module:function"],
    }
    calls = [["train", recipe, *each] for each in flags.values()]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, json.dumps(calls)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:-1] == ["2"] * len(calls) + ["[]"]
    for line, words in zip(done.stderr.splitlines(), flags, strict=True):
        assert line.startswith(f"error: {words}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{}/missing.yaml"],
        ["train", "{}/recipe.yaml", "--train_file", "{}/missing.txt"],
        ["train", "{}/recipe.yaml", "--resume_from_checkpoint", "{}/missing"],
        ["evaluate", "{}/missing"],
        ["evaluate", "{}", "--data", "{}/missing.txt"],
        ["inspect", "{}/missing"],
        ["verify", "{}/missing"],
        ["consolidate", "{}/missing", "{}/out"],
        ["report", "{}/missing"],
    ],
    ids=lambda arguments: "-".join(part.strip("{}/").replace("/", "") for part in arguments),
)
def test_a_path_that_does_not_exist_is_wrong_usage_in_every_command(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from stepmark.cli.main import run

    write_recipe(tmp_path)
    assert run([part.format(tmp_path) for part in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing" in line


CPU_RUN = """
import sys
from stepmark.cli.main import run
print(run(["train", *sys.argv[1:]]))
print("stepmark.trainer.trainer" in sys.modules, "torch_xla" in sys.modules)
"""


def test_a_run_on_the_cpu_does_not_import_torch_xla(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, eval_strategy="epoch", validation_split_percentage=0)
    done = subprocess.run([sys.executable, "-c", CPU_RUN, str(recipe)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\nTrue False\n", done.stderr
    assert "there is no validation data" in done.stderr


class TestHub:
    """Whether the hub answers decides whether its client may ask it."""

    @pytest.fixture
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
        def offline(endpoint: str, **flags: str) -> bool:
            monkeypatch.setenv("HF_ENDPOINT", endpoint)
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
            monkeypatch.setattr("stepmark.recipe.early_checks.SECONDS", 1.0)
            names = {"config_name": "gpt2", "tokenizer_name": "bytes", "dataset_name": "python-stdlib", **flags}
            return work_offline_without_hub(read_recipe(None, names))

        return offline

    def test_a_hub_that_does_not_answer_is_not_asked_again(
        self, offline: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import os

        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            began = time.monotonic()
            assert offline(endpoint, tokenizer_name="owner/mistyped")
            assert time.monotonic() - began < 60
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        for name in ("config_name", "dataset_name"):
            assert offline(endpoint, **{name: "owner/mistyped"})  # now the connection is refused
        assert offline(endpoint, config_name="gpt9")

    def test_a_hub_that_answers_is_asked(self, offline: Callable[..., bool]) -> None:
        class NotFound(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), NotFound) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            assert not offline(f"http://127.0.0.1:{server.server_port}", tokenizer_name="owner/name")
            server.shutdown()

    def test_nothing_is_asked_where_nothing_can_be_on_the_hub(
        self, offline: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("stepmark.recipe.early_checks._hub_answers", lambda: pytest.fail("asked"))
        assert not offline("http://127.0.0.1:9")
        assert not offline("http://127.0.0.1:9", tokenizer_name=str(tmp_path))

    @pytest.mark.parametrize("field", ["model_name_or_path", "tokenizer_name", "config_name", "dataset_name"])
    def test_a_name_that_is_nowhere_is_refused_before_anything_is_imported(
        self, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        names = {"config_name": "gpt2", "tokenizer_name": "bytes", "dataset_name": "python-stdlib"}
        if field == "model_name_or_path":
            del names["config_name"]
        recipe = read_recipe(None, {**names, field: "owner/mistyped"})
        with pytest.raises(UsageError, match=f"^{field}: .*'owner/mistyped'.*; it was not .* hub does not answer"):
            check_early(recipe)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(UsageError, match="is not asked"):
            check_early(recipe)
        kind = "datasets" if field == "dataset_name" else "models"
        (tmp_path / "hub" / f"{kind}--owner--mistyped").mkdir(parents=True)
        check_early(recipe)


def test_a_checkpoint_of_tensor_parallel_ranks_is_refused_with_what_makes_a_model_of_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    """One without tensor parallelism is a model folder as it is."""
    for tp, nproc in ((1, 1), (2, 2)):
        options = {"model": {"kind": "llama"}, "tp": tp}
        ranks.run("tests.support.mesh_checkpoints:save", str(tmp_path / f"{tp}"), options, nproc=nproc).check()
        (folder,) = (tmp_path / f"{tp}").glob("checkpoint-*")
        if tp == 1:
            check_model_folder(str(folder))
    with pytest.raises(UsageError, match=f"model_name_or_path: .*stepmark consolidate {re.escape(str(folder))}"):
        check_model_folder(str(folder))
