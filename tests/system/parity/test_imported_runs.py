"""A run of another tool goes on here: the losses of the steps after the import are those of its own continuation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import stepmark
from stepmark.cli.main import run
from stepmark.errors import CheckpointNotFound
from tests.support import foreign_checkpoints

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "report_to": [],
    "disable_tqdm": True,
}


def samples(vocabulary: int = 64) -> list[dict[str, torch.Tensor]]:
    """Their first token has no label: transformers divides a causal model's loss by all labels, shifted out or not."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, vocabulary, (16,), generator=generator) for _ in range(24)]
    return [{"input_ids": t, "labels": torch.cat([torch.tensor([-100]), t[1:]])} for t in tokens]


def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([item[key] for item in batch]) for key in batch[0]}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "llama":
        config: Any = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
        )
        return transformers.BertForMaskedLM(config)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, **no_dropout
    )
    return transformers.GPT2LMHeadModel(config)


class Sequential:
    """A Trainer with the data in its own order, which two tools have in common."""

    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


class Ours(Sequential, stepmark.Trainer):  # type: ignore[misc]
    pass


def theirs(kind: str, folder: str, resume: str | None = None) -> None:
    """Twenty steps of transformers' own Trainer, in a process without torch_xla, which it would train on."""

    class Theirs(Sequential, transformers.Trainer):  # type: ignore[misc]
        pass

    arguments = transformers.TrainingArguments(
        folder, max_steps=20, save_steps=10, learning_rate=1e-2, use_cpu=True, **SETTINGS
    )
    trainer = Theirs(model_of(kind), arguments, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (Path(folder) / "losses.json").write_text(json.dumps(losses))


def run_theirs(*arguments: str | None) -> None:
    """Calls `theirs` in a process of its own."""
    program = (
        "import sys; sys.modules['torch_xla'] = None\n"
        f"from tests.system.parity.test_imported_runs import theirs\ntheirs(*{arguments!r})"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=600)


def continued(model: Any, folder: Path, data: list[Any], **settings: Any) -> list[float]:
    """The losses that a run logs which resumes from the newest checkpoint in the folder, from other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    arguments = stepmark.TrainingArguments(str(folder), device="cpu", **{**SETTINGS, **settings})
    Ours(model, arguments, train_dataset=data).train(resume_from_checkpoint=True)
    logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [log["loss"] for log in logs if "loss" in log]


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_transformers_run_goes_on(kind: str, tmp_path: Path) -> None:
    run_theirs(kind, str(tmp_path / "theirs"))
    assert run(["import", str(tmp_path / "theirs" / "checkpoint-10"), str(tmp_path / "ours" / "checkpoint-10")]) == 0
    losses = continued(model_of(kind), tmp_path / "ours", samples(), max_steps=20, save_steps=10, learning_rate=1e-2)
    expected = json.loads((tmp_path / "theirs" / "losses.json").read_bytes())[10:]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_transformers_goes_on_from_ours(kind: str, tmp_path: Path) -> None:
    ours, out = tmp_path / "ours", tmp_path / "theirs" / "checkpoint-10"
    arguments = stepmark.TrainingArguments(
        str(ours), device="cpu", **{**SETTINGS, "max_steps": 20, "save_steps": 10, "learning_rate": 1e-2}
    )
    Ours(model_of(kind), arguments, train_dataset=samples()).train()
    logs = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    expected = [log["loss"] for log in logs if "loss" in log]
    assert run(["export", str(ours / "checkpoint-10"), str(out), "--to", "hf-trainer"]) == 0
    run_theirs(kind, str(tmp_path / "theirs"), str(out))
    losses = json.loads((tmp_path / "theirs" / "losses.json").read_bytes())
    assert len(losses) == 20  # the log of the first ten came along
    assert losses == pytest.approx(expected, abs=1e-5)


def test_trainer_folder_goes_on(tmp_path: Path) -> None:
    """The same with an AdamW of torch in place of the other tool's."""
    truth = foreign_checkpoints.truth()
    scaled = foreign_checkpoints.Truth({name: 0.1 * t for name, t in truth.model.items()}, truth.moments)
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", scaled)
    assert run(["import", str(source), str(tmp_path / "ours" / "checkpoint-3")]) == 0
    config: Any = transformers.LlamaConfig(**{k: v for k, v in foreign_checkpoints.CONFIG.items() if k != "model_type"})
    model, data = transformers.LlamaForCausalLM(config), samples()
    model.load_state_dict(scaled.model)
    names = foreign_checkpoints.grouped(list(scaled.model))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [parameters[n] for n in group]} for group in names], weight_decay=0.0)
    optimizer.load_state_dict(
        foreign_checkpoints.numbered(truth.moments) | {"param_groups": optimizer.state_dict()["param_groups"]}
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    expected = []
    for step in range(3, 6):
        loss = model(**collate(data[4 * step : 4 * step + 4])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    fresh = transformers.LlamaForCausalLM(config)
    settings = {"max_steps": 6, "learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_steps": 0}
    losses = continued(fresh, tmp_path / "ours", data, weight_decay=0.0, save_strategy="no", **settings)
    assert losses == pytest.approx(expected, abs=1e-5)


def test_foreign_folder_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "checkpoint-3", foreign_checkpoints.truth())
    arguments = stepmark.TrainingArguments(str(tmp_path / "run"), device="cpu", max_steps=4, **SETTINGS)
    trainer = Ours(model_of("gpt2"), arguments, train_dataset=samples())
    with pytest.raises(CheckpointNotFound, match=f"stepmark import {source}"):
        trainer.train(resume_from_checkpoint=str(source))
