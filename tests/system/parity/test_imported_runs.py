"""A run of another tool goes on here: the losses of the steps after the import are those of its own continuation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.optimization import Adafactor

import stepmark
from stepmark.cli.main import run
from stepmark.errors import CheckpointNotFound
from tests.support import foreign_checkpoints
from tests.support.continued_runs import SETTINGS, Ours, collate, continued, model_of, run_theirs, samples
from tests.support.foreign_checkpoints import Truth
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.continued_runs"


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_transformers_run_goes_on(kind: str, nproc: int, ranks: Ranks, tmp_path: Path) -> None:
    run_theirs(nproc, kind, str(tmp_path / "theirs"))
    assert run(["import", str(tmp_path / "theirs" / "checkpoint-10"), str(tmp_path / "ours" / "checkpoint-10")]) == 0
    losses = ranks.run(f"{PROGRAMS}:continued_kind", kind, str(tmp_path / "ours"), nproc=nproc).check()[0]
    expected = json.loads((tmp_path / "theirs" / "losses.json").read_bytes())[10:]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_transformers_goes_on_from_ours(kind: str, nproc: int, ranks: Ranks, tmp_path: Path) -> None:
    ours, out = tmp_path / "ours", tmp_path / "theirs" / "checkpoint-10"
    expected = ranks.run(f"{PROGRAMS}:twenty", kind, str(ours), nproc=nproc).check()[0]
    assert run(["export", str(ours / "checkpoint-10"), str(out), "--to", "hf-trainer"]) == 0
    run_theirs(nproc, kind, str(tmp_path / "theirs"), str(out))
    losses = json.loads((tmp_path / "theirs" / "losses.json").read_bytes())
    assert len(losses) == 20  # the log of the first ten came along
    assert losses == pytest.approx(expected, abs=1e-5)


def with_torch(truth: Truth, steps: range) -> list[float]:
    """The losses of an AdamW of torch that has the states, in place of the other tool's."""
    model, data = transformers.LlamaForCausalLM(llama_config()), samples()
    model.load_state_dict(truth.model)
    parameters = dict(model.named_parameters())
    groups = [[parameters[name] for name in group] for group in foreign_checkpoints.grouped(list(truth.model))]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], weight_decay=0.0)
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(foreign_checkpoints.numbered(truth.moments) | {"param_groups": settings})
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    losses = []
    for step in steps:
        loss = model(**collate(data[4 * step : 4 * step + 4])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def llama_config() -> Any:
    return transformers.LlamaConfig(**{k: v for k, v in foreign_checkpoints.CONFIG.items() if k != "model_type"})


def small_truth() -> Truth:
    """With weights that a model can train from."""
    truth = foreign_checkpoints.truth()
    return Truth({name: 0.1 * tensor for name, tensor in truth.model.items()}, truth.moments)


CONTINUED = {"max_steps": 6, "learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_steps": 0}
CONTINUED |= {"weight_decay": 0.0, "save_strategy": "no"}


def test_trainer_folder_goes_on(tmp_path: Path) -> None:
    truth = small_truth()
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth)
    assert run(["import", str(source), str(tmp_path / "ours" / "checkpoint-3")]) == 0
    fresh = transformers.LlamaForCausalLM(llama_config())
    losses = continued(fresh, tmp_path / "ours", samples(), **CONTINUED)
    assert losses == pytest.approx(with_torch(truth, range(3, 6)), abs=1e-5)


@pytest.mark.parametrize("settings", [{"zero_1": True}, {"tensor_parallel_size": 4}], ids=["dp-4", "tp-4"])
def test_shards_of_neuronx_distributed_go_on_over_four_ranks(
    settings: dict[str, Any], ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved by two tensor parallel ranks, twice, with ZeRO-1."""
    monkeypatch.setattr(foreign_checkpoints, "KEYS", 4)
    monkeypatch.setattr(foreign_checkpoints, "CONFIG", {**foreign_checkpoints.CONFIG, "num_key_value_heads": 4})
    truth = small_truth()
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth, tp=2, dp=2)
    assert run(["import", str(source), str(tmp_path / "ours" / "checkpoint-3")]) == 0
    config = {key: value for key, value in foreign_checkpoints.CONFIG.items() if key != "model_type"}
    program, given = f"{PROGRAMS}:continued_llama", {**CONTINUED, **settings}
    losses = ranks.run(program, config, str(tmp_path / "ours"), given, nproc=4).check()[0]
    assert losses == pytest.approx(with_torch(truth, range(3, 6)), abs=1e-5)


def test_adafactor_goes_on(tmp_path: Path) -> None:
    """Its states are sums over rows and columns, and no tensor of a parameter's shape."""
    model, data = transformers.LlamaForCausalLM(llama_config()), samples()
    names = foreign_checkpoints.grouped([name for name, _ in model.named_parameters()])
    groups = [{"params": [model.get_parameter(name) for name in group]} for group in names]
    made: Any = Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False)
    losses = []
    for step in range(6):
        if step == 3:
            source = foreign_checkpoints.trainer_folder(tmp_path / "source", foreign_checkpoints.truth())
            save_file(
                {name: tensor.clone() for name, tensor in model.state_dict().items()}, source / "model.safetensors"
            )
            torch.save(made.state_dict(), source / "optimizer.pt")
        loss = model(**collate(data[4 * step : 4 * step + 4])).loss
        made.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        losses.append(loss.item())
    assert run(["import", str(source), str(tmp_path / "ours" / "checkpoint-3")]) == 0
    fresh = transformers.LlamaForCausalLM(llama_config())
    found = continued(fresh, tmp_path / "ours", data, optim="adafactor", **CONTINUED)
    assert found == pytest.approx(losses[3:], abs=1e-5)


def test_foreign_folder_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "checkpoint-3", foreign_checkpoints.truth())
    arguments = stepmark.TrainingArguments(str(tmp_path / "run"), device="cpu", max_steps=4, **SETTINGS)
    trainer = Ours(model_of("gpt2"), arguments, train_dataset=samples())
    with pytest.raises(CheckpointNotFound, match=f"stepmark import {source}"):
        trainer.train(resume_from_checkpoint=str(source))


# The best checkpoint of the run


BEST: dict[str, Any] = {
    **SETTINGS, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2, "warmup_steps": 0,
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-2,
    "per_device_train_batch_size": 4, "use_cpu": True,
}  # fmt: skip
"""The first evaluation has the largest loss, and so is the best."""


class Removes(transformers.TrainerCallback):
    """Removes the best checkpoint, as somebody might do by hand."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        shutil.rmtree(state.best_model_checkpoint)


@pytest.mark.parametrize("removed", [False, True])
def test_the_best_checkpoint_of_an_imported_run_is_kept_and_its_end_without_it_is_the_last_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: bool
) -> None:
    theirs = transformers.TrainingArguments(str(tmp_path / "theirs"), max_steps=4, **BEST)
    data: Any = samples()
    transformers.Trainer(model_of("gpt2"), theirs, train_dataset=data, eval_dataset=data[:8]).train()
    for name in ("checkpoint-2", "checkpoint-4"):
        assert run(["import", str(tmp_path / "theirs" / name), str(tmp_path / "ours" / name)]) == 0
    ours = stepmark.TrainingArguments(str(tmp_path / "ours"), max_steps=10, **BEST)
    callbacks = [Removes()] if removed else []
    trainer = stepmark.Trainer(model_of("gpt2"), ours, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=True, save_model=True)
    of = tmp_path / ("ours/checkpoint-10" if removed else "theirs/checkpoint-2")
    expected, found = (load_file(folder / "model.safetensors") for folder in (of, tmp_path / "ours"))
    assert all(torch.equal(expected[name], value) for name, value in found.items())
    assert (tmp_path / "ours" / "checkpoint-2").exists() != removed
    assert ("load_best_model_at_end: " in caplog.text) == removed
    assert json.loads((tmp_path / "ours" / "status.json").read_text())["state"] == "done"
