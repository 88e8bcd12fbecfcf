"""Recipes that fine-tune a chat model: conversations, packed or padded, and adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from transformers import AutoModelForCausalLM  # noqa: E402

import stepmark  # noqa: E402
from stepmark.cli.main import run as call  # noqa: E402
from stepmark.data.tokenize.tokenizer import byte_tokenizer  # noqa: E402
from tests.support.models import build  # noqa: E402
from tests.support.programs import Blocks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LORA = ["--peft", "lora", "--lora_r", "4", "--lora_dropout", "0.1"]


@pytest.fixture
def fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe's fields, with a model that was pretrained and conversations to train it on."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    build("llama", vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(tmp_path / "model")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chats = [
        {"prompt": f"{number} and {number}", "completion": f"{2 * number}" * (1 + number % 3)} for number in range(24)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return {
        "model_name_or_path": tmp_path / "model",
        "chat_template_path": tmp_path / "chat.jinja",
        "train_file": tmp_path / "chats.jsonl",
        "messages_column": "messages",
        "assistant_only_loss": "true",
        "block_size": 96,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": "1e-2",
        "logging_steps": 1,
        "save_steps": 3,
        "device": "cpu",
        "disable_tqdm": "true",
    }


def train(folder: Path, fields: dict[str, Any], *more: str) -> list[float]:
    """The losses of a run of the command."""
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    assert call(["train", *flags, "--output_dir", str(folder), *more]) == 0
    return logged(folder, "loss")


def logged(folder: Path, name: str) -> list[float]:
    logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [log[name] for log in logs if name in log]


def adapter(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def test_an_adapter_is_trained_and_resumed_exactly(tmp_path: Path, fields: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", fields, *LORA, "--packing", "true")
    assert whole[-1] < whole[0]
    base = tmp_path / "model"
    trained = adapter(tmp_path / "whole", base)
    assert {name.split(".")[-4] for name in trained} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert any(value.abs().max() > 0 for name, value in trained.items() if "lora_B" in name)
    train(tmp_path / "parts", {**fields, "max_steps": 3, "lr_scheduler_type": "constant"}, *LORA, "--packing", "true")
    constant = {**fields, "lr_scheduler_type": "constant"}
    train(tmp_path / "parts", constant, *LORA, "--packing", "true", "--resume_from_checkpoint", "true")
    train(tmp_path / "at once", constant, *LORA, "--packing", "true")
    resumed, once = adapter(tmp_path / "parts", base), adapter(tmp_path / "at once", base)
    assert all(torch.equal(resumed[name], once[name]) for name in once)


def test_one_module_may_be_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    short = {**fields, "max_steps": 1, "save_strategy": "no"}
    short.pop("save_steps")
    train(tmp_path / "run", short, *LORA, "--lora_target_modules", "q_proj")
    assert {name.split(".")[-4] for name in adapter(tmp_path / "run", tmp_path / "model")} == {"q_proj"}


def test_adapters_are_evaluated_beside_the_run(tmp_path: Path, fields: dict[str, Any]) -> None:
    evaluating = ["--eval_strategy", "steps", "--eval_steps", "3", "--dtype", "bfloat16"]
    train(tmp_path / "run", fields, *LORA, *evaluating)
    assert call(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    lines = map(json.loads, (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines())
    beside = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert beside == pytest.approx(logged(tmp_path / "run", "eval_loss"), rel=1e-5)
    assert len(beside) == 2
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert stepmark.evaluate(tmp_path / "run", Blocks(3), device="cpu")["eval_loss"] > 0


def test_an_adapter_is_not_evaluated_over_another_base(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", fields, *LORA)
    model = build("llama", vocab_size=258, max_position_embeddings=128)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "model")
    assert call(["evaluate", str(tmp_path / "run" / "checkpoint-6"), "--device", "cpu"]) == 1
    assert "is not the base model that the adapter was trained on: its weights differ" in capsys.readouterr().err


def test_a_merged_model_elsewhere_is_evaluated_as_its_run(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluating = ["--eval_strategy", "steps", "--eval_steps", "6", "--validation_file", str(tmp_path / "chats.jsonl")]
    train(tmp_path / "run", fields, *LORA, *evaluating, "--bf16", "true", "--label_smoothing_factor", "0.1")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the adapter is in" in last
    assert f"stepmark consolidate {tmp_path / 'run'} OUT --merge-adapters" in last
    merged, data = tmp_path / "elsewhere" / "merged", ["--data", str(tmp_path / "chats.jsonl"), "--device", "cpu"]
    assert call(["consolidate", str(tmp_path / "run"), str(merged), "--merge-adapters"]) == 0
    shutil.copytree(tmp_path / "run" / "checkpoint-6", tmp_path / "elsewhere" / "checkpoint-6")
    (tmp_path / "elsewhere" / "checkpoint-6" / "used_recipe.yaml").unlink()  # as of a Trainer in Python
    usual = tmp_path / "usual"
    usual.touch()
    assert {path.stat().st_mode for path in merged.iterdir()} == {usual.stat().st_mode}

    def evaluated(folder: Path, *flags: str) -> float:
        capsys.readouterr()
        assert call(["evaluate", str(folder), *data, *flags, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["eval_loss"])

    (inside,) = logged(tmp_path / "run", "eval_loss")
    assert evaluated(merged) == pytest.approx(inside, rel=2e-3)  # merged weights are rounded to bfloat16 as a whole
    everything = evaluated(merged, "--assistant_only_loss", "false")
    assert abs(everything - inside) > 0.05
    (merged / "stepmark_evaluation.json").unlink()
    again = ["--messages_column", "messages", "--block_size", "96"]
    assert abs(evaluated(merged, *again) - inside) > 0.05
    unsmoothed = evaluated(merged, *again, "--assistant_only_loss")
    assert unsmoothed == pytest.approx(inside, rel=0.2)
    assert unsmoothed != inside
    assert call(["evaluate", str(merged), *data, "--assistant_only_loss"]) == 2
    assert "--messages_column" in capsys.readouterr().err


def test_an_adapter_elsewhere_is_evaluated_over_a_base_that_is_named(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluating = ["--eval_strategy", "steps", "--eval_steps", "6"]
    train(tmp_path / "run", fields, *LORA, *evaluating)
    (tmp_path / "model").rename(tmp_path / "moved")
    base = ["--base-model", str(tmp_path / "moved")]
    evaluating = ["evaluate", str(tmp_path / "run" / "checkpoint-6"), "--device", "cpu", "--json"]
    assert call(evaluating) != 0
    assert "--base-model" in capsys.readouterr().err
    assert call([*evaluating, *base]) == 0
    found = json.loads(capsys.readouterr().out)["eval_loss"]
    assert found == pytest.approx(logged(tmp_path / "run", "eval_loss")[0], rel=1e-5)
    evaluating[1] = str(tmp_path / "moved")
    data = ["--data", str(tmp_path / "chats.jsonl"), "--messages_column", "messages"]
    assert call([*evaluating, *base, *data]) == 2
    assert "--base-model: " in capsys.readouterr().err


def test_bytes_are_no_tokens_of_a_model_with_a_large_vocabulary(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    build("llama", vocab_size=2048, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    assert call(["train", *flags, "--output_dir", str(tmp_path / "run"), "--tokenizer_name", "bytes"]) == 2
    assert "tokenizer_name: bytes has 258 tokens" in capsys.readouterr().err


def test_all_weights_are_trained_without_an_adapter(tmp_path: Path, fields: dict[str, Any]) -> None:
    evaluating = ["--eval_strategy", "steps", "--eval_steps", "6", "--gradient_checkpointing", "true"]
    losses = train(tmp_path / "run", fields, *evaluating)
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "checkpoint-6" / "chat_template.jinja").read_text() == TEMPLATE
    inside = logged(tmp_path / "run", "eval_loss")
    assert call(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    beside = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert beside["eval_loss"] == pytest.approx(inside[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--peft", "dora"], "peft: 'dora' is unknown; choose lora"),
        (["--lora_r", "4"], "lora_r: is for an adapter; set peft: lora"),
        (["--peft", "lora", "--lora_target_modules", "[nowhere]"], "lora_target_modules: Target modules"),
        (["--peft", "lora", "--lora_dropout", "1"], "lora_dropout: should be from 0 to below 1"),
        (["--chat_template_path", "absent.jinja"], "chat_template_path: absent.jinja cannot be read"),
        (["--text_column", "prompt"], "text_column and messages_column: "),
    ],
)
def test_what_does_not_fit_is_said(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    assert call(["train", *flags, "--output_dir", str(tmp_path / "run"), *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["true", "false"])
def test_conversations_of_several_sources_are_mixed(
    tmp_path: Path, fields: dict[str, Any], packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [{"prompt": f"say {number}", "completion": f"{number} it is"} for number in range(40)]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, more)))
    mixture = [{"train_file": str(fields.pop("train_file")), "weight": 3}]
    mixture.append({"train_file": str(tmp_path / "more.jsonl"), "weight": 1})
    losses = train(tmp_path / "run", fields, "--packing", packing, "--dataset_mixture", json.dumps(mixture))
    assert losses[-1] < losses[0]
    shown = capsys.readouterr().err
    assert "source 2: tokenized train: 38 conversations" in shown
    assert "mixture, source 1: 7" in shown
