"""`stepmark evaluate` as a user calls it. Covers
evaluation/run_options.py and watcher/command.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run
from stepmark.config.recipe import ModelArguments
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.recipe.model import build_config, build_model
from stepmark.trainer.run_folder.run_log import read_metrics
from stepmark.watcher import setup
from stepmark.watcher.watcher import Watcher
from tests.support.own_code import folder_with_own_code
from tests.support.programs import Blocks, tiny_model
from tests.support.recipes import write_recipe, write_text

FUNCTIONS = """
import numpy as np

def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(-1)

def accuracy(given):
    labels = given.label_ids[:, 1:]
    return {"accuracy": np.mean((given.predictions[:, :-1] == labels)[labels != -100])}

def raises(given):
    raise ValueError("not today")

def nothing(given):
    return {"accuracy": None}

def generate(model, tokenizer, context):
    prompt = tokenizer("the cat", return_tensors="pt").input_ids.to(context.device)
    made = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert not model.training
    assert len(context.datasets[None])
    return {"made": made.shape[1] - prompt.shape[1], "step": context.step, **context.evaluate()}
"""

TRUST = "--trust_remote_code"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with three checkpoints, evaluated in the run as well."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own_functions.py").write_text(FUNCTIONS)
    fields: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    recipe = write_recipe(folder, **fields, learning_rate=1e-2, validation_split_percentage=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["train", str(recipe), "--metrics", "own_functions:accuracy"]) == 0
    return folder / "out"


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which tests may change."""
    shutil.copytree(trained, tmp_path / "out", symlinks=True)
    monkeypatch.chdir(trained.parent)
    return tmp_path / "out"


def in_run(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_metrics(folder) if "eval_loss" in line}


def without_recipes(folder: Path) -> None:
    """As a Trainer in Python leaves a run."""
    for recipe in folder.rglob("used_recipe.yaml"):
        recipe.unlink()


def test_one_checkpoint_for_people_and_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(folder / "checkpoint-4"), "--json", "--metrics", "own_functions:accuracy"]) == 0
    found, expected = json.loads(capsys.readouterr().out), in_run(folder)[4]
    assert found["step"] == 4
    assert found["samples"][""] > 0
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    assert run(["evaluate", str(folder / "checkpoint-4")]) == 0
    told = capsys.readouterr().out
    assert "eval_loss" in told
    assert f"{expected['eval_loss']:.6g}" in told
    assert not (folder / "evaluations.jsonl").exists()
    assert not list((folder / ".stepmark").glob("*lease*"))


def test_graphs_are_kept_where_the_run_keeps_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "used_recipe.yaml").open("a") as recipe:
        recipe.write("compile_cache: s3://bucket/graphs\n")
    settings: list[Any] = []
    monkeypatch.setattr("stepmark.runtime.compile_cache.prepare_compile_cache", settings.append)
    assert run(["evaluate", str(folder / "checkpoint-4"), TRUST]) == 0
    assert run(["evaluate", str(folder), "--until", "2", TRUST]) == 0
    assert run(["evaluate", str(folder / "checkpoint-4")]) == 0  # a stranger's graphs would run
    without_recipes(folder)
    assert run(["evaluate", str(folder)]) == 2  # there is no data
    assert settings == ["s3://bucket/graphs", "s3://bucket/graphs", None, None]


def test_a_hugging_face_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert run(["evaluate", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(in_run(folder)[6]["eval_loss"], rel=1e-6)


def test_a_complete_run_and_later_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(folder / "checkpoint-6", folder.parent / "later")
    assert run(["evaluate", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "2 evaluated, 0 skipped, 0 failed" in told
    assert next(line for line in told.splitlines() if line.startswith("step 2")).endswith(" (best so far)")
    shutil.move(folder.parent / "later", folder / "checkpoint-6")
    assert run(["evaluate", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = {line["step"]: line["eval_loss"] for line in found["evaluations"]}
    assert losses == pytest.approx({step: line["eval_loss"] for step, line in in_run(folder).items()}, rel=1e-6)
    assert found["best"] == min(losses, key=lambda step: losses[step])
    assert (folder / "best").resolve() == (folder / f"checkpoint-{found['best']}").resolve()


def test_a_recipe_that_comes_after_the_watcher_says_what_is_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "used_recipe.yaml").open("a") as file:
        file.write("metric_for_best_model: loss\ngreater_is_better: true\n")
    watch, later = Watcher.run, folder.rename(folder.with_name("later"))
    folder.mkdir()

    def begin(watcher: Watcher) -> int:
        later.rename(folder)
        return watch(watcher)

    monkeypatch.setattr(Watcher, "run", begin)
    assert run(["evaluate", str(folder), "--json", TRUST]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = {line["step"]: line["eval_loss"] for line in found["evaluations"]}
    assert found["best"] == max(losses, key=lambda step: losses[step])


def test_a_folder_of_runs_is_not_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(folder.parent)]) == 2
    assert f"{folder.parent} has no checkpoints; give one run: {folder}\n" in capsys.readouterr().err


def test_other_data_in_several_sets(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_text(tmp_path / "one.txt", 5), write_text(tmp_path / "other.txt", 9)
    sets = ["--data", f"one={one}", "--data", f"other={other}", "--block_size", "16", "--max_samples", "4"]
    assert run(["evaluate", str(folder / "checkpoint-2"), *sets, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == {"one": 4, "other": 4}
    assert {"eval_one_loss", "eval_other_loss"} <= found.keys()


def test_a_run_without_a_recipe_needs_data(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "checkpoint-2", tmp_path / "kept")
    without_recipes(folder)
    assert run(["evaluate", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --data: {folder / 'checkpoint-6'} has no used_recipe.yaml that names its data")
    assert error.endswith(
        "pass --data FILE (or a folder, a pattern, or python-stdlib) --metrics own_functions:accuracy\n"
    )
    text = write_text(tmp_path / "text.txt", 3)
    assert run(["evaluate", str(tmp_path / "kept"), "--data", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] > 0


def test_a_function_of_ones_own_that_generates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(folder), "--evaluator", "own_functions:generate", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["evaluations"]
    assert [line["eval_step"] for line in lines] == [2, 4, 6]
    assert [line["eval_made"] for line in lines] == [4, 4, 4]
    assert all("eval_loss" in line for line in lines)


@pytest.mark.parametrize(
    ("function", "reason"),
    [("raises", "ValueError: not today"), ("nothing", "own_functions:nothing) returned None for 'accuracy'")],
)
def test_a_function_that_fails_fails_that_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], function: str, reason: str
) -> None:
    arguments = ["evaluate", str(folder), "--watch", "--metrics", f"own_functions:{function}"]
    assert run(arguments) == 1
    told = capsys.readouterr().out
    assert told.count("failed: ") == 3
    assert told.count(reason) == 3
    assert not (folder / "best").exists()


def test_a_corrupted_checkpoint_fails_and_the_others_do_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "checkpoint-4" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert run(["evaluate", str(folder), "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)["evaluations"]
    assert [line["status"] for line in lines] == ["done", "failed", "done"]
    assert "checksum" in lines[1]["reason"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["{run}", "--metrics", "own_functions:other"], 2, "--metrics: own_functions has no function 'other'"),
        (["{run}", "--data", "./none.txt"], 2, "--data: ./none.txt does not exist"),
        (["{run}", "--patience", "0"], 2, "--patience: should be at least 1"),
        (["{run}", "--block_size", "33"], 2, "--block_size: 33 tokens are more than the model's 32 positions"),
        (["{run}/checkpoint-2", "--watch"], 2, "--watch: applies to a run"),
        (["{run}/runs"], 2, "has no checkpoints; --watch waits for them"),
        (["{run}/none"], 2, "there is no folder"),
    ],
)
def test_bad_calls(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    (folder / "runs").mkdir()
    assert run(["evaluate", *(each.format(run=folder) for each in arguments)]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1


def test_a_metric_that_evaluations_lack(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(folder), "--metric", "nope", TRUST]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --metric nope: the evaluation has no such metric; it has eval_accuracy, eval_loss")


def test_a_run_that_has_ended_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text('{"state": "failed", "step": 0}')
    assert run(["evaluate", str(tmp_path), "--watch"]) == 1
    assert "has no checkpoints, and its run has ended (failed)" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--watch"]])
def test_a_checkpoint_to_start_from_that_is_deleted_ends_no_watcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """Somebody removes it by hand when the watcher has chosen it: another one will do."""
    tokenizer, deleted = setup.tokenizer_of, []

    def delete_first(recipe: Any, checkpoint: Path, trust: bool) -> Any:
        if not deleted:
            deleted.append(checkpoint.name)
            shutil.rmtree(checkpoint)
        return tokenizer(recipe, checkpoint, trust)

    monkeypatch.setattr(setup, "tokenizer_of", delete_first)
    assert run(["evaluate", str(folder), *flags]) == 0
    assert deleted == ["checkpoint-6"]
    evaluated = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated if line.get("status") == "done"] == [2, 4]
    assert "checkpoint-6 was deleted before it was evaluated; looking for another one" in capsys.readouterr().err


def test_a_single_checkpoint_that_is_deleted_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "tokenizer_of", lambda recipe, checkpoint, trust: shutil.rmtree(checkpoint))
    assert run(["evaluate", str(folder / "checkpoint-4")]) == 2
    assert "checkpoint-4 was deleted before it was evaluated" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--watch", "--patience", "1"], ["--json"]])
def test_while_graphs_are_extracted_nothing_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert run(["evaluate", str(folder), "--device", "cpu", *arguments]) == 0
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    assert run(["evaluate", str(folder / "checkpoint-6"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == ""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text that the run has not seen."""
    return write_text(tmp_path / "corpus.txt", 60)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[dict[str, Any], str]:
    """The JSON and the lines on stderr of an evaluation."""
    capsys.readouterr()
    assert run(["evaluate", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.fixture(scope="module")
def short_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose blocks are shorter than the model's positions, with a smoothed loss."""
    folder = tmp_path_factory.mktemp("short")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    named = {"tokenizer_name": str(folder / "tokenizer")}
    recipe = write_recipe(folder, max_steps=1, save_steps=1, block_size=8, label_smoothing_factor=0.1, **named)
    assert run(["train", str(recipe)]) == 0
    return folder / "out"


def test_a_copied_checkpoint_is_evaluated_as_in_its_run(
    short_blocks: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block size and loss are the run's, although only the checkpoint is there."""
    copied = tmp_path / "elsewhere" / "checkpoint-1"
    shutil.copytree(short_blocks / "checkpoint-1", copied)
    expected, _ = evaluated(capsys, short_blocks / "checkpoint-1", "--data", corpus)
    found, told = evaluated(capsys, copied, "--data", corpus)
    assert found["samples"] == expected["samples"]
    assert found["eval_loss"] == expected["eval_loss"]
    assert f"samples of up to 8 tokens of {corpus}; block_size from {copied}/used_recipe.yaml" in told
    assert "label_smoothing_factor 0.1" in told


def test_a_checkpoint_without_a_recipe_says_what_its_evaluation_assumes(
    short_blocks: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions wrote them, and consolidated them; a consolidated model says how its run evaluated."""
    plain = tmp_path / "plain"
    assert run(["consolidate", str(short_blocks / "checkpoint-1"), str(plain)]) == 0
    found, told = evaluated(capsys, plain, "--data", corpus)
    expected, _ = evaluated(capsys, short_blocks / "checkpoint-1", "--data", corpus)
    assert (found["samples"], found["eval_loss"]) == (expected["samples"], expected["eval_loss"])
    assert f"block_size from {plain}; label_smoothing_factor 0.1\n" in told
    (plain / "stepmark_evaluation.json").write_text("{")
    assert run(["evaluate", str(plain), "--data", str(corpus), "--device", "cpu"]) == 1
    assert "stepmark_evaluation.json" in capsys.readouterr().err
    (plain / "stepmark_evaluation.json").unlink()
    found, told = evaluated(capsys, plain, "--data", corpus)
    assert "of up to 32 tokens" in told
    assert f"warning: {plain} has no used_recipe.yaml" in told
    assert "--block_size sets it" in told
    assert found["samples"] != evaluated(capsys, plain, "--data", corpus, "--block_size", 8)[0]["samples"]


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": 0.5}


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(**inputs).loss * 2


def trained_in_python(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> Path:
    """A checkpoint of a run without a recipe, alone in another folder."""
    options = {"bf16": True, "label_smoothing_factor": 0.1, "per_device_eval_batch_size": 3, "device": "cpu"}
    args = TrainingArguments(output_dir=str(folder / "run"), max_steps=1, save_steps=1, disable_tqdm=True, **options)
    model = tiny_model()
    model.resize_token_embeddings(258)  # as many as the tokenizer has
    kind(model, args, train_dataset=Blocks(16), eval_dataset=Blocks(4), **given).train()
    (folder / "elsewhere").mkdir()
    return shutil.move(folder / "run" / "checkpoint-1", folder / "elsewhere" / "checkpoint-1")


def test_a_checkpoint_of_the_python_trainer_says_how_its_run_evaluated(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = trained_in_python(tmp_path, processing_class=byte_tokenizer(), compute_metrics=accuracy)
    capsys.readouterr()
    named = f"{__name__}:accuracy"
    assert run(["evaluate", str(moved), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --data: {moved} has no used_recipe.yaml that names its data")
    flags = (
        f"--data FILE (or a folder, a pattern, or python-stdlib) --block_size N (tokens of a sample) --metrics {named}"
    )
    assert error.endswith(f"pass {flags}\n")
    found, told = evaluated(capsys, moved, "--data", corpus)
    assert f"warning: {moved} does not say its run's block_size" in told
    assert f"without the run's own metrics, which are added by --metrics {named}" in told
    assert told.endswith("; bf16; label_smoothing_factor 0.1\n")
    assert "eval_accuracy" not in found
    found, told = evaluated(capsys, moved, "--data", corpus, "--block_size", 8, "--metrics", named)
    assert found["eval_accuracy"] == 0.5
    assert "warning" not in told
    assert "own metrics" not in told


def test_a_loss_of_ones_own_is_named(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = trained_in_python(tmp_path, OwnLoss, processing_class=byte_tokenizer())
    capsys.readouterr()
    _, told = evaluated(capsys, moved, "--data", corpus, "--block_size", 8)
    assert "warning: the loss is the model's, and that of the run was OwnLoss.compute_loss" in told


def test_a_checkpoint_without_a_tokenizer_needs_a_function(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = trained_in_python(tmp_path)
    capsys.readouterr()
    assert run(["evaluate", str(moved), "--device", "cpu"]) == 2
    assert "pass --evaluator MODULE:FUNCTION (it has no tokenizer" in capsys.readouterr().err
    assert run(["evaluate", str(moved), "--device", "cpu", "--data", str(corpus)]) == 2
    assert "has no tokenizer, so texts cannot be read (a Trainer with processing_class" in capsys.readouterr().err


def test_a_model_with_code_of_its_own_is_evaluated_from_its_checkpoint(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code lies in the checkpoint, and is executed only where it is trusted, whatever the recipe there says."""
    source = folder_with_own_code(tmp_path, monkeypatch)
    named = {"config_name": str(source), "config_overrides": {}, "tokenizer_name": str(source)}
    fields = {"max_steps": 1, "save_steps": 1, "block_size": 8, "trust_remote_code": True, "eval_strategy": "steps"}
    recipe = write_recipe(tmp_path, **fields, **named, eval_steps=1)
    assert run(["train", str(recipe)]) == 0
    moved = tmp_path / "elsewhere" / "checkpoint-1"
    shutil.copytree(tmp_path / "out" / "checkpoint-1", moved)
    shutil.rmtree(source)
    capsys.readouterr()
    assert run(["evaluate", str(moved), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {moved} needs Python code that came with its model (configuration_tiny.py, ")
    assert "with --trust_remote_code" in error
    found, _ = evaluated(capsys, moved, "--trust_remote_code")
    assert found["eval_loss"] == pytest.approx(in_run(tmp_path / "out")[1]["eval_loss"], rel=1e-6)
    complete = tmp_path / "complete"
    assert run(["consolidate", str(moved), str(complete)]) == 0
    capsys.readouterr()
    folder, _ = evaluated(capsys, complete, "--trust_remote_code", "--data", corpus, "--block_size", 8)
    checkpoint, _ = evaluated(capsys, moved, "--trust_remote_code", "--data", corpus)
    assert folder["eval_loss"] == pytest.approx(checkpoint["eval_loss"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # of peft, which sets it itself
def test_the_base_of_an_adapter_may_have_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    source = folder_with_own_code(tmp_path, monkeypatch)
    made = ModelArguments(config_name=str(source), tokenizer_name="bytes", trust_remote_code=True)
    build_model(made, build_config(made, byte_tokenizer()), 1).save_pretrained(source)
    model = {"model_name_or_path": str(source), "config_name": None, "config_overrides": {}, "trust_remote_code": True}
    lora = {"peft": "lora", "lora_r": 2, "lora_target_modules": ["c_attn"], "block_size": 8}
    recipe = write_recipe(tmp_path, **model, **lora, max_steps=1, save_steps=1, eval_strategy="steps", eval_steps=1)
    assert run(["train", str(recipe)]) == 0
    checkpoint = tmp_path / "out" / "checkpoint-1"
    capsys.readouterr()
    assert run(["evaluate", str(checkpoint), "--device", "cpu"]) == 2
    assert f"error: {source} needs Python code that came with its model" in capsys.readouterr().err
    found, _ = evaluated(capsys, checkpoint, "--trust_remote_code")
    assert found["eval_loss"] == pytest.approx(in_run(tmp_path / "out")[1]["eval_loss"], rel=1e-6)


SAME_NAME = """
from transformers import GPT2LMHeadModel as Theirs
class GPT2LMHeadModel(Theirs):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.register_forward_hook(lambda module, given, made: made * 100)
"""


def test_code_with_a_class_of_a_known_name_is_not_taken_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_with_own_code(tmp_path, monkeypatch)
    (source / "modeling_tiny.py").write_text(SAME_NAME)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "modeling_tiny.GPT2LMHeadModel"}}
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    fields = {"max_steps": 1, "save_steps": 1, "block_size": 8, "trust_remote_code": True, "eval_strategy": "steps"}
    recipe = write_recipe(tmp_path, **fields, config_name=str(source), config_overrides={}, eval_steps=1)
    assert run(["train", str(recipe)]) == 0
    capsys.readouterr()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert run(["evaluate", str(checkpoint), "--device", "cpu"]) == 2
    assert "needs Python code that came with its model (modeling_tiny.py)" in capsys.readouterr().err
    found, _ = evaluated(capsys, checkpoint, "--trust_remote_code")
    assert found["eval_loss"] == pytest.approx(in_run(tmp_path / "out")[1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("change", ["gone", "another"])
def test_a_tokenizer_that_the_recipe_no_longer_names_is_the_checkpoints_copy(
    short_blocks: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    expected, _ = evaluated(capsys, short_blocks / "checkpoint-1", "--data", corpus)
    named = short_blocks.parent / "tokenizer"
    named.rename(tmp_path / "tokenizer")
    try:
        if change == "another":
            words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?"))
            words.pre_tokenizer = pre_tokenizers.Whitespace()
            PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(named)
        found, _ = evaluated(capsys, short_blocks / "checkpoint-1", "--data", corpus)
    finally:
        shutil.rmtree(named, ignore_errors=True)
        (tmp_path / "tokenizer").rename(named)
    assert found["samples"] == expected["samples"]
    assert found["eval_loss"] == expected["eval_loss"]


def test_data_that_are_not_the_runs_own_do_not_choose_its_best(
    folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, _ = evaluated(capsys, folder)
    best = (folder / "best").resolve()
    # `metric` is reversed, so that the two evaluations do not agree about the best
    other, told = evaluated(capsys, folder, "--data", corpus, "--metric", "loss", "--greater_is_better", "true")
    assert other["best"] != own["best"]
    assert (folder / "best").resolve() == best
    assert "stays as it is: --data is not the data of the run; see --update_best" in told
    evaluated(capsys, folder, "--data", corpus, "--metric", "loss", "--greater_is_better", "true", "--update_best")
    assert (folder / "best").resolve() == (folder / f"checkpoint-{other['best']}").resolve()


def test_a_run_whose_texts_are_gone_says_how_to_name_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = folder / "used_recipe.yaml"
    recipe.write_text(recipe.read_text().replace("text.txt", "gone.txt"))
    assert run(["evaluate", str(folder), "--device", "cpu"]) == 2
    assert "gone.txt does not exist" in (told := capsys.readouterr().err)
    assert "; name other data with --data" in told


OWN_METRIC = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "accuracy"}


def test_metrics_of_the_recipe_are_those_of_the_run_its_resumption_and_its_evaluations(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write_recipe(tmp_path, **OWN_METRIC, output_dir=str(tmp_path / "own"), validation_split_percentage=20)
    own = tmp_path / "own"
    assert run(["train", str(recipe), "--metrics", "own_functions:accuracy"]) == 0
    more = ["--max_steps", "3", "--resume_from_checkpoint", "true"]
    assert run(["train", str(own / "used_recipe.yaml"), *more]) == 0
    accuracies = {step: line["eval_accuracy"] for step, line in in_run(own).items()}
    assert sorted(accuracies) == [1, 2, 3]
    found, told = evaluated(capsys, own)  # by the loss, since the function may be somebody else's
    assert "metrics own_functions:accuracy is left out; --trust_remote_code uses it" in caplog.text
    assert not any("eval_accuracy" in line for line in found["evaluations"])
    found, told = evaluated(capsys, own, TRUST)
    assert {line["step"]: line["eval_accuracy"] for line in found["evaluations"]} == accuracies
    assert "; metrics own_functions:accuracy" in told
    shutil.copytree(own / "checkpoint-2", tmp_path / "copied")
    assert evaluated(capsys, tmp_path / "copied", TRUST)[0]["eval_accuracy"] == accuracies[2]
    assert "eval_accuracy" not in evaluated(capsys, tmp_path / "copied", "--metrics", "none")[0]


def test_metrics_of_a_run_whose_module_is_not_here(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = folder / "used_recipe.yaml"
    recipe.write_text(recipe.read_text().replace("own_functions:", "absent_functions:"))
    assert run(["evaluate", str(folder), "--device", "cpu", TRUST]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: metrics (of the run; --metrics none evaluates without): no module")
