"""Model folders for others have the names, shapes and values of `save_pretrained`, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from scripts.saved_models import names
from scripts.tables import read_rows
from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run as command
from stepmark.evaluation.restored_model import ModelReader
from stepmark.runtime.eager import EagerRuntime
from tests.support.models import build
from tests.support.programs import Blocks
from tests.support.ranks import Ranks
from tests.support.saved_models import EQUAL, NOT_MADE, SAVED_BY, compare_all, difference

SAMPLE = ("mixtral", "ViTForImageClassification", "MarianMTModel", "gpt2")


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert {row[key] for key in SAVED_BY} <= {EQUAL, ""}, row
        assert row["one rank"] == row["two ranks"] == EQUAL, row


def test_names_shapes_and_values_are_those_of_save_pretrained(ranks: Ranks) -> None:
    check(ranks.run(compare_all, SAMPLE, nproc=2).check()[0])


def test_every_model_of_the_tables() -> None:
    rows = read_rows("saved-models")
    assert [row["model"] for row in rows] == names()
    made = [row for row in rows if row["one rank"] != NOT_MADE]
    check(made)
    assert len(made) > 900
    assert all(row["why"] for row in rows if row["one rank"] == NOT_MADE)


class Classified(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int) -> None:
        self.blocks = Blocks(samples, seed=1)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index]["input_ids"], "labels": torch.tensor(index % 2)}


def trained(folder: Path, model: Any, dataset: Any = None) -> Trainer:
    args = TrainingArguments(output_dir=str(folder / "run"), device="cpu", max_steps=2, save_steps=2, disable_tqdm=True)
    trainer = Trainer(model, args, train_dataset=dataset or Blocks(8, seed=1))
    trainer.train(save_model=True)
    return trainer


def test_final_model_checkpoint_and_export_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build("mixtral")
    trained(tmp_path, model)
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    model.save_pretrained(theirs)
    assert difference(theirs, run) == EQUAL
    assert command(["consolidate", str(run / "checkpoint-2"), str(tmp_path / "out")]) == 0
    assert command(["export", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert difference(theirs, tmp_path / "out") == difference(theirs, tmp_path / "hf") == EQUAL
    assert command(["import", str(theirs), str(tmp_path / "imported")]) == 0
    for source, out in ((tmp_path / "imported", tmp_path / "again"), (theirs, tmp_path / "rewritten")):
        assert command(["consolidate", str(source), str(out)]) == 0
        assert difference(theirs, out) == EQUAL
    capsys.readouterr()
    assert command(["inspect", str(run / "checkpoint-2")]) == 0
    assert (
        "names     those in memory; `stepmark consolidate` writes 26 tensors as save_pretrained"
        in capsys.readouterr().out
    )
    read = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2").state_dict()
    assert all(read[name].equal(tensor) for name, tensor in model.state_dict().items())


class Counting(nn.Module):
    """What `get_extra_state` returns is a tensor, which transformers writes; or not, with which it fails."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.number, self.whole = torch.ones(1), whole

    def get_extra_state(self) -> Any:
        return self.number if self.whole else {"count": 2, "number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_written_of_extra_states_can_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    model = build("gpt2")
    model.counting = Counting(whole)
    trained(tmp_path, model)
    assert command(["consolidate", str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / "out")]) == 0
    for folder in (tmp_path / "run", tmp_path / "out"):
        missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert set(missing) == {"lm_head.weight"} | (set() if whole else {"counting._extra_state"})
        assert not unexpected
    told = [each for each in caplog.messages if each.startswith("counting._extra_state: is no tensor")]
    assert len(told) == (not whole)


def test_the_config_names_the_class_that_was_trained(tmp_path: Path) -> None:
    """Made from the config of a causal model, as classifiers and reward models are."""
    config = build("llama").config
    config.architectures, config.num_labels = ["LlamaForCausalLM"], 2
    model = LlamaForSequenceClassification(config)
    config.pad_token_id = 0
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), device="cpu", max_steps=2, save_steps=2, disable_tqdm=True
    )
    Trainer(model, args, train_dataset=Classified(8)).train(save_model=True)
    assert config.architectures == ["LlamaForCausalLM"]  # the user's own
    model.save_pretrained(tmp_path / "theirs")
    assert difference(tmp_path / "theirs", tmp_path / "run") == EQUAL
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert command(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf-trainer"]) == 0
    loaded = ModelReader(EagerRuntime(torch.device("cpu"))).read(tmp_path / "run").state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in model.state_dict().items())
