"""`attn_implementation`: the model, its plan, resumptions and evaluations use the attention that the recipe names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stepmark import Trainer, TrainingArguments
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.cli.main import run as call
from stepmark.config.recipe import read_recipe
from stepmark.errors import UsageError
from stepmark.evaluation.restored_model import ModelReader
from stepmark.evaluation.run_options import RunOptions
from stepmark.filesystem.json_files import read_lines
from stepmark.preflight.plan.plan import plan_recipe
from stepmark.runtime.eager import EagerRuntime
from stepmark.training.model_options import attention_of, check_attention
from tests.support.programs import Blocks
from tests.support.recipes import TINY, write_recipe

FIELDS: dict[str, Any] = {"max_steps": 3, "save_steps": 3, "logging_steps": 1, "disable_tqdm": True}
FALCON = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def test_runs_resumptions_and_evaluations_use_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    product = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: (calls.append(1), product(*args, **options))[1],
    )
    runs = {name: tmp_path / name for name in ("eager", "sdpa")}
    for name, run in runs.items():
        calls.clear()
        fields = {**FIELDS, "attn_implementation": name, "output_dir": str(run)}
        assert call(["train", str(write_recipe(tmp_path, **fields))]) == 0
        assert bool(calls) == (name == "sdpa")
        saved = RunOptions.of_checkpoint(checkpoint_path(run, 3))
        assert saved is not None
        assert saved.attn_implementation == name
    eager, sdpa = map(losses_of, runs.values())
    assert eager == pytest.approx(sdpa, abs=1e-5)

    read: list[str | None] = []
    reader = ModelReader.read

    def watched(self: Any, folder: Path) -> Any:
        model = reader(self, folder)
        read.append(attention_of(model))
        return model

    monkeypatch.setattr(ModelReader, "read", watched)
    checkpoint = str(checkpoint_path(runs["eager"], 3))
    assert call(["evaluate", checkpoint, "--device", "cpu"]) == 0
    assert call(["evaluate", checkpoint, "--device", "cpu", "--attn_implementation", "sdpa"]) == 0
    assert read == ["eager", "sdpa"]
    assert call(["evaluate", checkpoint, "--device", "cpu", "--attn_implementation", "flash_attention_2"]) == 2
    assert "cpu has sdpa and eager, and no flash_attention_2" in capsys.readouterr().err

    more = {**FIELDS, "max_steps": 4, "attn_implementation": "sdpa", "output_dir": str(runs["eager"])}
    path = write_recipe(tmp_path, **more, resume_from_checkpoint=True)
    assert call(["train", str(path)]) == 0
    assert "attn_implementation was eager and is now sdpa" in caplog.text
    changed = [event for event in read_lines(runs["eager"] / "events.jsonl") if event["event"] == "attention"]
    assert [(event["step"], event["before"], event["now"]) for event in changed] == [(3, "eager", "sdpa")]


def test_a_class_that_chooses_when_it_is_made_is_evaluated_as_trained(tmp_path: Path) -> None:
    config = AutoConfig.for_model("falcon", **FALCON, vocab_size=512)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", max_steps=1, save_steps=1, disable_tqdm=True)
    Trainer(model, args, train_dataset=Blocks(8)).train()
    checkpoint = checkpoint_path(tmp_path, 1)
    saved = RunOptions.of_checkpoint(checkpoint)
    assert saved is not None
    runtime = EagerRuntime(torch.device("cpu"))
    assert attention_of(ModelReader(runtime, attention=saved.attn_implementation).read(checkpoint)) == "eager"


def test_a_plan_counts_the_scores_of_eager_attention(tmp_path: Path) -> None:
    longer = {"block_size": 64, "config_overrides": {**TINY, "n_positions": 64}}
    sizes = {}
    for name in ("eager", "sdpa"):
        path = write_recipe(tmp_path, **FIELDS, **longer, attn_implementation=name, device="cpu")
        plan = plan_recipe(read_recipe(str(path), {}), 1)
        sizes[name] = json.dumps(plan, default=str)
    assert sizes["eager"] != sizes["sdpa"]


@pytest.mark.parametrize(
    ("name", "device", "half", "message"),
    [
        ("flash_attention_2", "cpu", True, "cpu has sdpa and eager, and no flash_attention_2"),
        ("flex_attention", "xla", True, "xla has sdpa and eager, and no flex_attention"),
        ("flash_attention_2", "cuda", False, "flash_attention_2 has no float32; set bf16"),
    ],
)
def test_what_a_device_has_not_is_refused(name: str, device: str, half: bool, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_attention(name, device, half=half)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation: cpu has sdpa and eager"),
        ({"attn_implementation": "nonsense"}, "attn_implementation: cpu has sdpa and eager, and no nonsense"),
        (
            {"attn_implementation": "eager", "config_name": "falcon", "config_overrides": FALCON},
            "FalconForCausalLM cannot use eager: it computes attention by sdpa alone",
        ),
    ],
)
def test_a_run_is_refused_before_data_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    assert call(["train", str(write_recipe(tmp_path, **FIELDS, **fields, device="cpu"))]) == 2
    assert message in capsys.readouterr().err
