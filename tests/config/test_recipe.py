"""A recipe's file and flags: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.cli.recipe_fields import add_recipe_arguments, recipe_of
from stepmark.config.recipe import PARTS, Recipe, all_fields, read_recipe
from stepmark.config.refusals import refusals
from stepmark.config.unknown_fields import unknown_fields
from stepmark.errors import UsageError

Read = Callable[..., Recipe]

BASE = "config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\n"

CONTRACT = """
output_dir max_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2
adam_epsilon max_grad_norm optim optim_args label_smoothing_factor bf16 gradient_checkpointing logging_strategy
logging_steps logging_first_step save_strategy save_steps save_total_limit save_only_model eval_strategy eval_steps
eval_on_start load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint seed data_seed
report_to run_name dataloader_num_workers dataloader_drop_last disable_tqdm log_level model_name_or_path config_name
config_overrides tokenizer_name dataset_name dataset_config_name text_column train_file validation_file block_size
validation_split_percentage max_train_samples max_eval_samples preprocessing_num_workers overwrite_cache device dtype
""".split()  # noqa: SIM905


@pytest.fixture
def recipe(tmp_path: Path) -> Read:
    def read(text: str, **flags: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(str(path), flags)

    return read


def test_every_field_of_the_contract_is_there_once() -> None:
    assert set(CONTRACT) <= set(all_fields())
    names = [field.name for part in PARTS.values() for field in dataclasses.fields(part)]
    assert len(names) == len(set(names))


def test_fields_go_to_their_parts_and_flags_win(recipe: Read) -> None:
    read = recipe(BASE + "max_steps: 7\nlearning_rate: 1e-3\nblock_size: 64\n", max_steps="9", weight_decay=".1")
    assert (read.training.max_steps, read.training.learning_rate, read.training.weight_decay) == (9, 1e-3, 0.1)
    assert read.model.config_name == "gpt2"
    assert read.data.block_size == 64


def test_words_that_older_yaml_takes_for_booleans_stay_words(recipe: Read) -> None:
    assert recipe(BASE + "run_name: 2024-01-01\n").training.run_name == "2024-01-01"
    read = recipe(BASE + "eval_strategy: no\nsave_strategy: no\nrun_name: on\nbf16: true\n")
    assert (read.training.eval_strategy, read.training.save_strategy, read.training.run_name) == ("no", "no", "on")
    assert read.training.bf16 is True
    assert recipe(BASE, eval_strategy="no").training.eval_strategy == "no"


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", '"1e-4"', "+.1e-3"])
def test_numbers_in_every_spelling(recipe: Read, text: str) -> None:
    assert recipe(BASE + f"learning_rate: {text}\n").training.learning_rate == 1e-4
    assert recipe(BASE, learning_rate=text.strip('"')).training.learning_rate == 1e-4


def test_text_flags_are_not_read_as_yaml(recipe: Read) -> None:
    read = recipe(BASE, run_name="2024-01-01: [a", output_dir="17", report_to="no", optim_args="momentum=0.9")
    assert read.training.run_name == "2024-01-01: [a"
    assert Path(read.training.output_dir).name == "17"
    assert read.training.report_to == "no"
    assert recipe(BASE, run_name="# 5").training.run_name == "# 5"
    assert recipe(BASE, run_name="null").training.run_name is None
    assert read.training.parsed_options("optim_args") == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("null", None), ("runs/x/checkpoint-3", "runs/x/checkpoint-3"), ("7", "7")],
)
def test_a_field_of_several_types_takes_the_one_that_is_meant(recipe: Read, text: str, value: object) -> None:
    assert recipe(BASE, resume_from_checkpoint=text).training.resume_from_checkpoint == value


def test_mappings_in_both_spellings(recipe: Read) -> None:
    assert recipe(BASE, config_overrides="{n_layer: 1}").model.config_overrides == {"n_layer": 1}
    assert recipe(BASE, config_overrides="n_layer=1,n_embd=16").model.config_overrides == "n_layer=1,n_embd=16"
    kwargs = recipe(BASE, lr_scheduler_kwargs="{num_cycles: 2}").training.parsed_options("lr_scheduler_kwargs")
    assert (
        kwargs
        == recipe(BASE, lr_scheduler_kwargs="num_cycles=2").training.parsed_options("lr_scheduler_kwargs")
        == {"num_cycles": 2}
    )


def test_relative_output_is_in_the_folder_the_user_stands_in(
    recipe: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read = recipe(BASE + "output_dir: runs/a\n")
    monkeypatch.chdir("/")
    assert read.training.output_dir == str(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("leraning_rate: 1", "leraning_rate: is not a field in .*; did you mean learning_rate?"),
        ("half_precision_backend: auto", "half_precision_backend: is not a Stepmark field in .*; leave it out"),
        ("deepspeed: x.json", "deepspeed: is a transformers field that Stepmark does not support"),
        ("streaming: true", "streaming: is a transformers field"),
        ("gizmo: 1", "gizmo: is not a field in .*--help"),
        ("max_steps: many", "max_steps: should be a whole number, and is 'many'"),
        ("bf16: yes", "bf16: should be true or false, and is 'yes'"),
        ("block_size: 1", "block_size: should be at least 2"),
        ("max_steps: 1\nmax_steps: 2", 'line 5: found duplicate key "max_steps"'),
        ("max_steps: [1", "recipe .*recipe.yaml: is not valid YAML: line"),
        ("model_name_or_path: x", "model_name_or_path and config_name: both"),
        ("train_file: x.txt", "dataset_name and train_file"),
        ("config_overrides: 3", "config_overrides: should be a mapping or text"),
    ],
)
def test_what_is_wrong_is_named(recipe: Read, line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        recipe(f"{BASE}{line}\n")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello\n", "3\n"])
def test_a_file_that_is_not_a_mapping(recipe: Read, text: str) -> None:
    with pytest.raises(UsageError, match="should be fields and values"):
        recipe(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope.yaml: cannot be read: No such file"):
        read_recipe(str(tmp_path / "nope.yaml"), {})
    (tmp_path / "latin.yaml").write_bytes(b"run_name: caf\xe9\n")
    with pytest.raises(UsageError, match="is not valid YAML"):
        read_recipe(str(tmp_path / "latin.yaml"), {})


def test_objects_are_never_made_of_yaml(recipe: Read) -> None:
    with pytest.raises(UsageError, match="could not determine a constructor"):
        recipe(BASE + "run_name: !!python/object/apply:os.getcwd []\n")


def test_what_must_be_given(recipe: Read) -> None:
    with pytest.raises(UsageError, match="model_name_or_path or config_name"):
        recipe("dataset_name: python-stdlib\n")
    with pytest.raises(UsageError, match="tokenizer_name: a new model needs one"):
        recipe("config_name: gpt2\ndataset_name: python-stdlib\n")
    with pytest.raises(UsageError, match="no training data"):
        recipe("config_name: gpt2\ntokenizer_name: bytes\n")


def test_each_field_of_transformers_is_ours_or_an_error_that_says_so() -> None:
    from transformers import TrainingArguments

    ours = all_fields()
    for field in dataclasses.fields(TrainingArguments):
        if field.name not in ours:
            message = unknown_fields([field.name], ours)
            known = field.name in refusals("elsewhere")
            assert known or "transformers field that Stepmark does not support" in message, message


def test_shared_fields_have_the_defaults_of_transformers() -> None:
    from transformers import TrainingArguments

    ours = all_fields()
    # transformers' own default reports to whatever is installed, and its data seed and scheduler arguments are the same
    # in other words; a warm-up ratio is older than transformers 5, which has it in warmup_steps.
    # A filter would hide losses that are nan.
    other_words = {
        "logging_nan_inf_filter",
        "output_dir",
        "report_to",
        "resume_from_checkpoint",
        "lr_scheduler_kwargs",
        "logging_strategy",
    }
    for field in dataclasses.fields(TrainingArguments):
        if field.name in ours and field.name not in other_words:
            default = getattr(field.default, "value", field.default)
            mine = ours[field.name].default
            assert mine == default or (not mine and not default), (field.name, mine, default)


@pytest.mark.parametrize("flag", ["--bf16", "--zero_1", "--resume_from_checkpoint", "--do_train"])
def test_a_recipe_may_follow_a_flag_without_a_value(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\nseed: 7\n")
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    for text in ([flag, str(path)], [str(path), flag], [f"{flag}=true", str(path)]):
        made = recipe_of(parser.parse_args(text)).training
        assert made.seed == 7
        assert flag == "--do_train" or getattr(made, flag[2:]) is True


def test_lists_are_given_as_several_values_of_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\nseed: 7\n")
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    flags = ["--report_to", "wandb", "tensorboard"]
    for given in ([*flags, str(path)], [str(path), *flags], ["--report_to", "wandb,tensorboard", str(path)]):
        made = recipe_of(parser.parse_args(given)).training
        assert (made.reporters, made.seed) == (["wandb", "tensorboard"], 7)
    stages = ["--pipeline_parallel_size", "2", "--gradient_accumulation_steps", "2"]
    for layers in (["1", "3"], ["[1, 3]"]):
        made = recipe_of(parser.parse_args([str(path), *stages, "--pipeline_layers", *layers])).training
        assert made.pipeline_layers == [1, 3]
    sampled = recipe_of(
        parser.parse_args([str(path), "--sample_prompts", "\U0001f600", "é", "--eval_strategy", "epoch"])
    ).training
    assert sampled.sample_prompts == ["\U0001f600", "é"]
    made = recipe_of(parser.parse_args(["--accept_changes", "data", "model", str(path)])).training
    assert made.accepted_changes == ["data", "model"]


def test_a_path_after_a_flag_stays_its_value(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\n")
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    made = recipe_of(parser.parse_args(["--resume_from_checkpoint", "runs/checkpoint-5", str(path)]))
    assert made.training.resume_from_checkpoint == "runs/checkpoint-5"
    with pytest.raises(UsageError, match="bf16: should be true or false"):
        recipe_of(parser.parse_args(["--bf16", "maybe", str(path)]))
    with pytest.raises(UsageError, match="bf16: should be true or false"):
        recipe_of(parser.parse_args([str(path), "--bf16", str(path)]))


@pytest.mark.parametrize("value", ["true", "false"])
def test_do_train_may_only_ask_for_what_is_done(tmp_path: Path, value: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\ndo_train: {value}\n")
    if value == "true":
        assert read_recipe(str(path), {}).model.config_name == "gpt2"
        return
    with pytest.raises(UsageError, match="^do_train: "):
        read_recipe(str(path), {})


def test_metrics_that_evaluations_cannot_have(recipe: Read) -> None:
    with pytest.raises(UsageError, match="^metrics and eval_strategy: metrics need evaluations; "):
        recipe(BASE + "metrics: module:function\n")
    wanted = BASE + "eval_strategy: epoch\nmetric_for_best_model: accuracy\n"
    with pytest.raises(UsageError, match="^metric_for_best_model: evaluations have no eval_accuracy without "):
        recipe(wanted)
    assert recipe(wanted, metrics="module:function").training.best_metric_key == "eval_accuracy"
    assert recipe(wanted, task="sft").training.best_metric_key == "eval_accuracy"
