"""The examples of classification, question answering and a notebook: they learn, and continue bit for bit."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from examples import classification, question_answering
from stepmark import read_metrics
from tests.support.run_folders import read_losses

ROOT = Path(__file__).resolve().parents[3]
WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "film",
    "book",
    "who",
    "wrote",
    "it",
    "ann",
    "bob",
    "cat",
    "by",
    "the",
    "was",
    "on",
]
LENGTH = 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny BERT with a tokenizer that knows a few words."""
    known = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(known), **sizes)).save_pretrained(folder)
    return folder


def reviews(path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for index in range(40):
            word = ("good", "bad", "fine", "poor")[index % 4]
            rows.writerow((f"the {('film', 'book')[index % 3 == 0]} was {word}", ("up", "down")[index % 2]))


def questions(path: Path) -> None:
    lines = []
    for index in range(40):
        name = ("ann", "bob", "cat")[index % 3]
        context = "the book was good " * (index % 5 * 3) + f"it was by {name} on monday"
        lines.append({"question": "who wrote it", "context": context, "answer": name, "start": context.index(name)})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("example", "write", "metric"),
    [(classification, reviews, "eval_accuracy"), (question_answering, questions, "eval_exact")],
    ids=["classification", "question answering"],
)
def test_an_example_trains_and_continues_bit_for_bit(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: Any,
    write: Callable[[Path], None],
    metric: str,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(example, "LENGTH", LENGTH)
    monkeypatch.setattr(example, "STRIDE", 8, raising=False)
    data, whole, again = tmp_path / "data", tmp_path / "whole", tmp_path / "again"
    write(data)
    example.main(str(model), str(data), str(whole), 60, "cpu")
    losses = read_losses(whole)
    assert len(losses) == 6
    assert all(0 <= line[metric] <= 1 for line in read_metrics(whole) if metric in line)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-60")
    (again / "model.safetensors").unlink()
    example.main(str(model), str(data), str(again), 60, "cpu")
    assert read_losses(again) == losses
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, again))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_answers_are_marked_by_their_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long context, only windows that hold the answer mark it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(question_answering, "LENGTH", 24)
    monkeypatch.setattr(question_answering, "STRIDE", 8)
    seen: list[Any] = []

    class Recorder:
        def __init__(self, model: Any, args: Any, **options: Any) -> None:
            seen.extend(options["train_dataset"])

        def train(self, **options: Any) -> None: ...

        def save_model(self) -> None: ...

    monkeypatch.setattr(question_answering, "Trainer", Recorder)
    questions(tmp_path / "data")
    question_answering.main(str(model), str(tmp_path / "data"), str(tmp_path / "run"), 1, "cpu")
    known = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    marked = [row["input_ids"][row["start_positions"] : row["end_positions"] + 1] for row in seen]
    assert len(marked) > 36  # windows, of as many rows
    assert {tuple(each) for each in marked} == {(known[name],) for name in ("ann", "bob", "cat", "[CLS]")}


def test_the_notebook_ends_with_the_weights_of_a_run_that_nobody_stopped(tmp_path: Path) -> None:
    """Its cells as a script, in one process as in a kernel."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    command = re.findall(r"^!(.+)$", code, re.MULTILINE)
    (tmp_path / "cells.py").write_text(re.sub(r"^!.+$", "", code, flags=re.MULTILINE))
    ran = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "the run has ended with exit code 75\nthe same weights: True\n"
    assert re.search(r"stopped after step (\d+), checkpoint-\1 is saved", ran.stderr)
    assert command == ["stepmark report runs"]
    subprocess.run([sys.executable, "-m", *command[0].split()], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "runs" / "report.html").is_file()
