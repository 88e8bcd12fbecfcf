"""`examples/lm_eval_tasks.py`: lm_eval's numbers for every checkpoint, where lm_eval is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.filesystem.json_files import read_lines
from tests.support.recipes import TINY, WORDS, write_recipe

pytest.importorskip("lm_eval")

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
output_type: multiple_choice
test_split: test
fewshot_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITTEN = """
task: tiny_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{reply}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
filter_list: [{{name: first, filter: [{{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""
TASKS = ("tiny_choice", "tiny_rolling", "tiny_written")


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    rows = [
        {
            "question": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(3)),
            "choices": [f" {WORDS[(i * 5 + j * 3) % len(WORDS)]}" for j in range(3)],
            "answer": i % 3,
            "reply": "aaaa",
        }
        for i in range(24)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in zip(TASKS, (CHOICE, ROLLING, WRITTEN), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def train(folder: Path, **fields: Any) -> Path:
    wide = {**TINY, "n_positions": 128, "initializer_range": 0.5}
    given = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.05, "disable_tqdm": True, "config_overrides": wide}
    assert call(["train", str(write_recipe(folder, **{**given, **fields}))]) == 0
    return folder / "out"


def of_the_command(model: Path, tasks: Path, *options: str) -> dict[str, float]:
    """What lm_eval's own command finds, under our names."""
    out = model.parent / f"results-{len(options)}-{model.name}"
    given = ["--model", "hf", "--model_args", f"pretrained={model}", "--output_path", str(out), *options]
    given += ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "4", "--device", "cpu"]
    from lm_eval.__main__ import cli_evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lm_eval", *given])
        cli_evaluate()
    (file,) = out.rglob("results*.json")
    found = {}
    for task, numbers in json.loads(file.read_text())["results"].items():
        for name, value in numbers.items():
            metric, comma, filtered = name.partition(",")
            if comma and isinstance(value, (int, float)):
                found[f"eval_{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")] = value
    return found


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example with small tasks, for which no network is needed."""
    from examples import lm_eval_tasks

    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    for name, value in (("TASKS", [*TASKS]), ("FOLDER", str(write_tasks(tmp_path / "tasks"))), ("BATCH_SIZE", 4)):
        monkeypatch.setattr(lm_eval_tasks, name, value)
    return lm_eval_tasks


EVALUATE = ["--evaluator", "examples.lm_eval_tasks:evaluate", "--device", "cpu"]


@pytest.mark.filterwarnings("default")  # those of lm_eval and its requirements
@pytest.mark.parametrize("few", [False, True])
def test_numbers_are_those_of_lm_evals_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Any, few: bool
) -> None:
    if few:
        monkeypatch.setattr(example, "FEW_SHOT", 2)
        monkeypatch.setattr(example, "LIMIT", 10)
    run = train(tmp_path, metric_for_best_model="eval_tiny_choice_acc_norm")
    assert call(["evaluate", str(run), "--watch", *EVALUATE]) == 0
    lines = [line for line in read_lines(run / "evaluations.jsonl") if "step" in line]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        model = tmp_path / f"model-{line['step']}"
        assert call(["consolidate", str(run / f"checkpoint-{line['step']}"), str(model)]) == 0
        options = ("--num_fewshot", "2", "--limit", "10") if few else ()
        wanted = of_the_command(model, tmp_path / "tasks", *options)
        assert {name: line[name] for name in wanted} == wanted
        assert {"eval_tiny_choice_acc", "eval_tiny_rolling_word_perplexity", "eval_tiny_written_exact_match_first"} <= {
            *wanted
        }
        assert line["eval_loss"] > 0  # of the run's own data
    scores = [line["eval_tiny_choice_acc_norm"] for line in lines]
    assert (run / "best").resolve().name == f"checkpoint-{(2, 4)[scores.index(max(scores))]}"


@pytest.mark.filterwarnings("default")  # those of lm_eval and its requirements
def test_a_model_folder_needs_no_data_and_a_task_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: Any
) -> None:
    run, model = train(tmp_path), tmp_path / "model"
    assert call(["consolidate", str(run / "checkpoint-4"), str(model)]) == 0
    given = ["evaluate", str(model), "--json", *EVALUATE]
    capsys.readouterr()
    monkeypatch.setattr(example, "TASKS", ["tiny_c*"])
    assert call(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert "eval_tiny_choice_acc" in found
    assert "eval_loss" not in found
    monkeypatch.setattr(example, "TASKS", ["tiny_choice", "tiny_nothing"])
    assert call(given) == 1
    assert "examples.lm_eval_tasks:evaluate raised ValueError: lm_eval has no task 'tiny_nothing'" in (
        capsys.readouterr().err
    )
