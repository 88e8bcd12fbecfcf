"""`stepmark evaluate --tasks`: lm_eval's numbers for every checkpoint, without a network.

What needs lm_eval itself is marked `prove`: its requirements are 250 MB.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.filesystem.json_files import read_lines
from stepmark.report.page import write_report
from tests.support.recipes import TINY, WORDS, write_recipe

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval")
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


@pytest.mark.prove
@needs_lm_eval
@pytest.mark.filterwarnings("default")  # those of lm_eval and its requirements
@pytest.mark.parametrize("options", [(), ("--num_fewshot", "2", "--limit", "10")])
def test_numbers_are_those_of_lm_evals_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    run, tasks = train(tmp_path, metric_for_best_model="eval_tiny_choice_acc_norm"), write_tasks(tmp_path / "tasks")
    given = ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "4", "--device", "cpu", *options]
    assert call(["evaluate", str(run), "--watch", *given]) == 0
    lines = [line for line in read_lines(run / "evaluations.jsonl") if "step" in line]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        model = tmp_path / f"model-{line['step']}"
        assert call(["consolidate", str(run / f"checkpoint-{line['step']}"), str(model)]) == 0
        wanted = of_the_command(model, tasks, *options)
        assert {name: line[name] for name in wanted} == wanted
        assert {"eval_tiny_choice_acc", "eval_tiny_rolling_word_perplexity", "eval_tiny_written_exact_match_first"} <= {
            *wanted
        }
        assert line["eval_loss"] > 0  # of the run's own data, as without tasks
    scores = [line["eval_tiny_choice_acc_norm"] for line in lines]
    assert (run / "best").resolve().name == f"checkpoint-{(2, 4)[scores.index(max(scores))]}"
    with open(run / "evaluations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["eval_tiny_choice_acc_norm"]) for row in rows] == scores
    assert "tiny_choice_acc_norm" in write_report(run).read_text()


@pytest.mark.prove
@needs_lm_eval
@pytest.mark.filterwarnings("default")  # those of lm_eval and its requirements
def test_a_model_folder_needs_no_data_and_a_task_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    run, tasks, model = train(tmp_path), write_tasks(tmp_path / "tasks"), tmp_path / "model"
    assert call(["consolidate", str(run / "checkpoint-4"), str(model)]) == 0
    given = ["evaluate", str(model), "--include_path", str(tasks), "--device", "cpu", "--json", "--tasks"]
    capsys.readouterr()
    assert call([*given, "tiny_c*"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "eval_tiny_choice_acc" in found
    assert "eval_loss" not in found
    assert call([*given, "tiny_choice,tiny_nothing"]) == 2
    assert "--tasks: lm_eval has no task 'tiny_nothing'" in capsys.readouterr().err
    (tasks / "rows.jsonl").unlink()
    assert call([*given, "tiny_choice"]) == 1
    assert "--tasks tiny_choice: lm_eval raised" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "there", "message"),
    [
        (["--tasks", "hellaswag"], False, "--tasks: lm_eval is not installed; pip install 'stepmark[lm-eval]'"),
        (["--tasks", "a", "--include_path", "missing"], True, "--include_path: missing is not a folder"),
        (["--tasks", "a", "--limit", "0"], True, "--num_fewshot and --limit: should be"),
        (["--limit", "5"], True, "--limit: is for tasks of lm_eval; add --tasks"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    there: bool,
    message: str,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (there or None) if name == "lm_eval" else found(name, *rest)
    )
    (tmp_path / "config.json").write_text("{}")
    assert call(["evaluate", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
