"""Training PEFT adapters: what is saved, that peft loads it, and that a resumed run continues exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from stepmark import Trainer, TrainingArguments  # noqa: E402
from stepmark.cli.main import run as call  # noqa: E402
from stepmark.errors import CheckpointMismatch, UsageError  # noqa: E402
from tests.support.models import build  # noqa: E402
from tests.support.programs import Blocks, StopsAt  # noqa: E402
from tests.trainer.compat.test_strategies import steps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
NAMES = ("c_attn",)


def base(folder: Path, seed: int = 0) -> Path:
    """A small model that was pretrained, in `folder`."""
    model = build("gpt2")
    torch.manual_seed(seed)
    if seed:
        with torch.no_grad():
            model.transformer.wpe.weight.add_(0.1)
    model.save_pretrained(folder)
    return folder


def trainer(folder: Path, pretrained: Path, *callbacks: Any, **options: Any) -> Trainer:
    torch.manual_seed(5)
    config = {
        "r": 4,
        "target_modules": list(NAMES),
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.1,
        "fan_in_fan_out": True,
    }
    config |= options.pop("lora", {})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(pretrained), peft.LoraConfig(**config))
    fields = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "device": "cpu",
        **steps("save", 2),
        **options,
    }
    data = {"train_dataset": Blocks(10), "eval_dataset": Blocks(3, seed=1)}
    return Trainer(model, TrainingArguments(**fields), callbacks=list(callbacks), **data)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(8)[None]).logits
    return found


def test_peft_loads_checkpoints_and_the_final_model(tmp_path: Path) -> None:
    pretrained = base(tmp_path / "base")
    made = trainer(tmp_path / "run", pretrained)
    made.train(save_model=True)
    expected = logits(made.model)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(pretrained)))
    for folder in (tmp_path / "run" / "checkpoint-6", tmp_path / "run"):
        assert not list(folder.glob("model*.safetensors"))
        assert not (folder / "config.json").exists()
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), folder)
        assert torch.equal(logits(loaded), expected)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)
        assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert call(["verify", str(tmp_path / "run" / "checkpoint-6")]) == 0


@pytest.mark.parametrize("options", [{"lora": {"modules_to_save": ["ln_f"]}}, {"zero_1": True}])
def test_a_resumed_run_continues_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    pretrained = base(tmp_path / "base")
    complete = trainer(tmp_path / "complete", pretrained, **options)
    complete.train()
    trainer(tmp_path / "resumed", pretrained, StopsAt(2), **options).train()
    resumed = trainer(tmp_path / "resumed", pretrained, **options)
    resumed.train(resume_from_checkpoint=True)
    names = (tmp_path / "complete" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in names)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(complete.model.parameters(), resumed.model.parameters(), strict=True))


TIED: dict[str, dict[str, Any]] = {
    "modules": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "two modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [3, 4, 5]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("target", "both"), [("embed_tokens", False), ("lm_head", False), ("embed_tokens", True)])
def test_an_adapter_of_a_tied_weight_is_not_merged(
    tmp_path: Path, target: str, both: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it adds would be added to the other end as well."""
    pretrained = tmp_path / "base"
    build("llama", tie_word_embeddings=True).save_pretrained(pretrained)
    lora = {"target_modules": [target], "fan_in_fan_out": False, "ensure_weight_tying": both}
    trainer(tmp_path / "run", pretrained, lora=lora).train()
    assert call(["consolidate", str(tmp_path / "run"), str(tmp_path / "out"), "--merge-adapters"]) == 2
    assert "is tied to another weight, which merging changes; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("kind", "options"), [("modules", {}), ("two modules", {"zero_1": True}), ("tokens", {})])
def test_tensors_with_two_names_are_loaded_resumed_and_merged(tmp_path: Path, kind: str, options: Any) -> None:
    """The head is the table of embeddings; peft saves, and asks for, each name."""
    pretrained = tmp_path / "base"
    build("llama", tie_word_embeddings=True).save_pretrained(pretrained)
    options = {**options, "lora": {"target_modules": ["q_proj"], "fan_in_fan_out": False, **TIED[kind]}}
    complete = trainer(tmp_path / "complete", pretrained, **options)
    complete.train()
    expected, folder = logits(complete.model), tmp_path / "complete" / "checkpoint-6"
    assert (
        load_file(folder / "adapter_model.safetensors").keys() == peft.get_peft_model_state_dict(complete.model).keys()
    )
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), folder)
    assert torch.equal(logits(loaded), expected)
    assert call(["consolidate", str(folder), str(tmp_path / "merged"), "--merge-adapters"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    trainer(tmp_path / "resumed", pretrained, StopsAt(2), **options).train()
    resumed = trainer(tmp_path / "resumed", pretrained, **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(logits(resumed.model), expected)


def test_a_run_is_not_resumed_with_another_base_or_adapter(tmp_path: Path) -> None:
    trainer(tmp_path / "run", base(tmp_path / "base"), StopsAt(2)).train()
    with pytest.raises(CheckpointMismatch, match="its weights of the frozen base model was .* and is now"):
        trainer(tmp_path / "run", base(tmp_path / "other", seed=1)).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointMismatch, match="its adapter, lora_alpha was 8 and is now 16"):
        trainer(tmp_path / "run", tmp_path / "base", lora={"lora_alpha": 16}).train(resume_from_checkpoint=True)


def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "learning_rate": 0.3, **steps("eval", 2)}
    made = trainer(tmp_path / "run", base(tmp_path / "base"), **options)
    made.train()
    best = min(log["eval_loss"] for log in made.state.log_history if "eval_loss" in log)
    assert made.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_parameters_that_peft_does_not_save_are_an_error(tmp_path: Path) -> None:
    model = peft.get_peft_model(build("gpt2"), peft.LoraConfig(target_modules=list(NAMES), fan_in_fan_out=True))
    model.base_model.model.transformer.ln_f.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"peft does not save 1 parameters that would be trained \(.*ln_f.weight\)"):
        Trainer(model, TrainingArguments(output_dir=str(tmp_path), device="cpu"))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UsageError, match="peft"):
        Trainer(peft.get_peft_model(build("gpt2"), prompts), TrainingArguments(output_dir=str(tmp_path), device="cpu"))


def test_an_adapter_is_merged_into_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrained = base(tmp_path / "base")
    made = trainer(tmp_path / "run", pretrained, lora={"modules_to_save": ["ln_f"]})
    made.train()
    checkpoint, merged = str(tmp_path / "run" / "checkpoint-6"), tmp_path / "merged"
    assert call(["consolidate", checkpoint, str(merged), "--merge-adapters"]) == 0
    assert sorted(path.name for path in merged.iterdir() if path.suffix == ".safetensors") == ["model.safetensors"]
    expected = logits(made.model)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-5, atol=1e-5)
    other = str(base(tmp_path / "other", seed=1))
    wrong: list[tuple[list[str], int, str]] = [
        (["--merge-adapters", "--base-model", other], 1, "is not the base model that the adapter was trained on"),
        (["--merge-adapters", "--base-model", str(tmp_path / "nowhere")], 2, "pass another one with --base-model"),
        (["--merge-adapters", "-f", "pytorch"], 2, "merged models are written as safetensors"),
        (["--base-model", other], 2, "only needed with --merge-adapters"),
        (["--max-shard-size", "1KB"], 2, "peft reads it from one file"),
    ]
    capsys.readouterr()
    for flags, code, words in wrong:
        assert call(["consolidate", checkpoint, str(tmp_path / "out"), *flags]) == code, flags
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_consolidated_adapter_is_as_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path / "run", base(tmp_path / "base")).train()
    checkpoint = tmp_path / "run" / "checkpoint-6"
    expected = load_file(checkpoint / "adapter_model.safetensors")
    for form, name in (("safetensors", "adapter_model.safetensors"), ("pytorch", "adapter_model.bin")):
        assert call(["consolidate", str(checkpoint), str(tmp_path / form), "-f", form]) == 0
        assert {"adapter_config.json", name} <= {path.name for path in (tmp_path / form).iterdir()}
        found = load_file(tmp_path / form / name) if form == "safetensors" else torch.load(tmp_path / form / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_the_base_of_an_adapter_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the script has named it by a relative path."""
    monkeypatch.chdir(tmp_path)
    base(tmp_path / "base")
    trainer(tmp_path / "run", Path("base"), max_steps=2).train(save_model=True)
    monkeypatch.chdir("/")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == str(tmp_path / "base")


def test_an_adapter_that_is_part_of_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    model = build("gpt2")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=list(NAMES), fan_in_fan_out=True))
    with pytest.raises(UsageError, match=r"^model: transformers' add_adapter .* use peft\.get_peft_model"):
        Trainer(model, TrainingArguments(str(tmp_path), device="cpu"), train_dataset=Blocks(4))


class SavesItself(Trainer):
    """As scripts for peft do."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.model.save_pretrained(output_dir)


def test_checkpoints_have_the_adapter_once_where_a_script_saves_it_too(tmp_path: Path) -> None:
    pretrained = base(tmp_path / "base")
    made = trainer(tmp_path / "run", pretrained)
    made.__class__ = SavesItself
    made.train()
    folder = tmp_path / "run" / "checkpoint-6"
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), folder)
    assert torch.equal(logits(loaded), logits(made.model))
    assert call(["verify", str(folder)]) == 0


class SavesAdapter(Trainer):
    """As sentence-transformers, which writes the adapter of a model in its first module."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        save_file({"lora_A": torch.ones(2)}, Path(str(output_dir)) / "adapter_model.safetensors")


def test_a_script_may_add_an_adapter_to_checkpoints_of_a_model(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=2, device="cpu", disable_tqdm=True, **steps("save", 2))
    SavesAdapter(build("gpt2"), args, train_dataset=Blocks(10)).train()
    folder = tmp_path / "checkpoint-2"
    assert load_file(folder / "adapter_model.safetensors")["lora_A"].tolist() == [1, 1]
    assert call(["verify", str(folder)]) == 0
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert call(["verify", str(folder)]) == 1


def test_a_state_dict_that_a_script_has_replaced(tmp_path: Path) -> None:
    """By that of the adapter, as scripts do that save with torch.save; the run saves what is trained all the same."""
    pretrained = base(tmp_path / "base")
    whole = trainer(tmp_path / "whole", pretrained)
    whole.train()
    made = trainer(tmp_path / "run", pretrained, StopsAt(4))
    for each in (made, again := trainer(tmp_path / "run", pretrained)):
        own = each.model.state_dict
        each.model.state_dict = lambda *_, model=each.model, own=own, **__: peft.get_peft_model_state_dict(model, own())
    made.train()
    again.train(resume_from_checkpoint=True)
    theirs = again.model.state_dict()
    wanted = peft.get_peft_model_state_dict(whole.model)
    assert wanted
    assert all(theirs[name].equal(each) for name, each in wanted.items())
    again.save_model(str(tmp_path / "adapter"))
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == theirs.keys()
    assert (tmp_path / "adapter" / "README.md").read_text().startswith("---\n")
