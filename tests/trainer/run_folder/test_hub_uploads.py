"""Uploads to the hub, received by a stand-in server on the loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from safetensors.torch import load, load_file
from torch import Tensor
from torch.testing import assert_close

from stepmark import Trainer, TrainingArguments
from stepmark.errors import StepmarkError, UsageError
from tests.support.models import build
from tests.support.programs import Blocks, tiny_model

TOKEN = "hf_write"


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert_close(one, other, rtol=0, atol=0)


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that uploads of small files need."""

    commits: list[dict[str, Any]]
    created: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer({"name": "me", "type": "user", "id": "me/run", "sha": "0" * 40, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(content))
            self._answer({"url": f"{constants.ENDPOINT}/me/run", "name": "me/run"})
        elif "/preupload/" in self.path:
            files = json.loads(content)["files"]
            self._answer(
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
            )
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in content.splitlines() if line]
            files = {each["value"]["path"]: each["value"] for each in lines if each["key"] == "file"}
            header = next(each["value"] for each in lines if each["key"] == "header")
            self.commits.append({"message": header["summary"], "files": files, "branch": self.path.rsplit("/", 1)[1]})
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{constants.ENDPOINT}/me/run/commit/1"})
        else:
            self._answer({})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OneHub", (Hub,), {"commits": [], "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for module in (constants, huggingface_hub.hf_api):
        monkeypatch.setattr(module, "ENDPOINT", address, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.utils.close_session()
    yield kind
    server.shutdown()
    server.server_close()
    huggingface_hub.utils.close_session()


def trainer(folder: Path, model: Any = None, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        device="cpu",
        disable_tqdm=True,
        max_steps=4,
        per_device_train_batch_size=2,
        save_steps=2,
        hub_token=TOKEN,
        **options,
    )
    return Trainer(model or tiny_model(), args, train_dataset=Blocks(8, seed=1))


def test_a_model_is_uploaded_with_its_card(tmp_path: Path, hub: type[Hub]) -> None:
    made = trainer(tmp_path, hub_revision="tried", hub_private_repo=True)
    made.train()
    for folder in ("system", "earlier-run-1"):
        (tmp_path / "run" / folder).mkdir(exist_ok=True)
        (tmp_path / "run" / folder / "rank-0.jsonl").write_text("{}")
    made.push_to_hub("Done", tags=["small"])
    assert hub.created[0]["name"] == "run"
    assert "private" in (each for each in (*hub.created[0], hub.created[0].get("visibility")))
    (commit,) = hub.commits
    assert (commit["message"], commit["branch"], made.hub_model_id) == ("Done", "tried", "me/run")
    assert {"model.safetensors", "config.json", "README.md"} <= set(commit["files"])
    assert not any(path.startswith((".", "checkpoint-")) or path.endswith(".jsonl") for path in commit["files"])
    weights = base64.b64decode(commit["files"]["model.safetensors"]["content"])
    assert weights == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert "- small" in base64.b64decode(commit["files"]["README.md"]["content"]).decode()


@pytest.mark.parametrize(
    ("strategy", "folders"), [("every_save", set()), ("checkpoint", {"last-checkpoint"}), ("end", None)]
)
def test_checkpoints_are_uploaded_while_a_run_trains(
    tmp_path: Path, hub: type[Hub], strategy: str, folders: set[str] | None
) -> None:
    made = trainer(tmp_path, push_to_hub=True, hub_strategy=strategy, hub_always_push=True, save_total_limit=1)
    made.train()
    if folders is None:
        assert not hub.commits
        return
    models = [each for each in hub.commits if "model.safetensors" in each["files"]]
    assert [each["message"] for each in models] == [f"Training in progress, step {step}" for step in (2, 4)]
    assert "manifest.json" not in models[0]["files"]
    assert {path.partition("/")[0] for each in hub.commits for path in each["files"] if "/" in path} == folders
    last = load(base64.b64decode(models[1]["files"]["model.safetensors"]["content"]))
    assert_equal(last, load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors"))
    assert not list((tmp_path / "run").glob(".hub-*"))


def test_uploaded_checkpoints_have_the_names_of_save_pretrained(tmp_path: Path, hub: type[Hub]) -> None:
    model = build("mixtral")
    trainer(tmp_path, model, push_to_hub=True, hub_strategy="every_save").train()
    model.save_pretrained(tmp_path / "theirs")
    last = [each["files"]["model.safetensors"]["content"] for each in hub.commits][-1]
    assert_equal(load(base64.b64decode(last)), load_file(tmp_path / "theirs" / "model.safetensors"))


def test_an_upload_that_fails_says_so(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="^hub_strategy: 'often' is unknown; choose one of end, "):
        trainer(tmp_path, push_to_hub=True, hub_strategy="often")
    made = trainer(tmp_path, push_to_hub=True)
    assert TOKEN not in f"{made.args}{made.args.to_json_string()}"
    monkeypatch.setattr("tests.trainer.run_folder.test_hub_uploads.TOKEN", "another")
    made.train()  # the checkpoints are on disk
    assert "push_to_hub: the upload to me/run has failed: " in caplog.text
    with pytest.raises(StepmarkError, match=r"^push_to_hub: .*check the token \(`hf auth login`, or hub_token\)"):
        made.push_to_hub()
