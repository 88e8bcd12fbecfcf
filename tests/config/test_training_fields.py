"""TrainingFields: ranges, contradictions, and what follows from what."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stepmark.config.training_fields import TrainingFields
from stepmark.config.yaml_file import parse_options
from stepmark.errors import UsageError

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("per_device_train_batch_size", 0),
        ("per_device_eval_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("num_train_epochs", math.nan),
        ("num_train_epochs", 0),
        ("max_steps", 0),
        ("max_steps", -2),
        ("output_dir", ""),
        ("output_dir", " "),
        ("step_timeout", 0),
        ("step_timeout", -1.0),
        ("step_timeout", math.nan),
        ("step_timeout", math.inf),
        ("step_timeout", "never"),
        ("step_timeout", None),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.1),
        ("adam_epsilon", -1.0),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", math.nan),
        ("warmup_steps", -1),
        ("warmup_ratio", 1.0),
        ("label_smoothing_factor", 1.0),
        ("logging_steps", 0),
        ("logging_steps", 2.5),
        ("logging_steps", math.nan),
        ("save_steps", math.inf),
        ("eval_steps", -1),
        ("save_total_limit", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("data_seed", -1),
        ("dataloader_num_workers", -1),
        ("logging_strategy", "never"),
        ("eval_strategy", "best"),
        ("save_strategy", "always"),
        ("dtype", "float16"),
        ("log_level", "loud"),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field}: ") as caught:
        TrainingFields(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_steps": -1, "num_train_epochs": 0}, ("max_steps", "num_train_epochs")),
        ({"bf16": True, "dtype": "bfloat16"}, ("bf16", "dtype")),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, ("warmup_steps", "warmup_ratio")),
        ({"torch_compile": True, "fsdp": True}, ("torch_compile and fsdp",)),
        ({"device": "xla", "fsdp": True}, ("fsdp and device",)),
        ({"load_best_model_at_end": True}, ("load_best_model_at_end", "eval_strategy")),
        ({"eval_on_start": True}, ("eval_on_start", "eval_strategy")),
        ({"save_strategy": "best"}, ("save_strategy", "eval_strategy")),
        ({"save_strategy": "best", **EVALUATES}, ("save_strategy", "`args.metric_for_best_model` must be provided")),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ("lr_scheduler_type", "eval_strategy")),
        ({"lr_scheduler_type": "greedy"}, ("lr_scheduler_type", "eval_strategy")),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch"},
            ("save_strategy is steps", "eval_strategy is epoch"),
        ),
        ({"load_best_model_at_end": True, "save_steps": 3, **EVALUATES}, ("save_steps (3)", "eval_steps (2)")),
        ({"load_best_model_at_end": True, "save_steps": 0.5, **EVALUATES}, ("save_steps (0.5)", "eval_steps (2)")),
    ],
)
def test_contradictions(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        TrainingFields(**fields)
    assert all(name in str(caught.value) for name in names), caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"save_steps": 4, **EVALUATES},
        {"save_steps": 0.3, "eval_steps": 0.1, "eval_strategy": "steps"},
        {"save_strategy": "epoch", "eval_strategy": "epoch"},
        {"save_strategy": "best", "eval_strategy": "epoch"},
        {"save_steps": 1000, "eval_strategy": "steps"},  # eval_steps is logging_steps
    ],
)
def test_the_best_can_be_loaded(fields: dict[str, Any]) -> None:
    args = TrainingFields(load_best_model_at_end=True, **fields)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert args.best_metric_key == "eval_loss"


def test_what_follows_from_other_fields() -> None:
    assert TrainingFields(eval_strategy="steps", logging_steps=7).eval_steps == 7
    assert TrainingFields().metric_for_best_model is None
    assert TrainingFields().best_metric_key is None
    for name, greater in (("accuracy", True), ("eval_accuracy", True), ("eval_my_loss", False), ("perplexity", False)):
        args = TrainingFields(metric_for_best_model=name)
        assert args.greater_is_better is greater
        assert args.best_metric_key == f"eval_{name.removeprefix('eval_')}"
    plateau = TrainingFields(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")
    assert plateau.best_metric_key == "eval_loss"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("none", []),
        (None, []),
        ("tensorboard", ["tensorboard"]),
        ("wandb,tensorboard", ["wandb", "tensorboard"]),
        ("wandb, tensorboard", ["wandb", "tensorboard"]),
        (["none"], []),
        ([], []),
    ],
)
def test_reporters(given: Any, names: list[str]) -> None:
    assert TrainingFields(report_to=given).reporters == names


def test_options_as_text() -> None:
    assert parse_options("f", "momentum=0.9, nesterov=true,name=x,eps=1e-6,") == {
        "momentum": 0.9,
        "nesterov": True,
        "name": "x",
        "eps": 1e-6,
    }
    with pytest.raises(UsageError, match=r"^f: should be name=value pairs"):
        parse_options("f", "momentum")
    with pytest.raises(UsageError, match="each name once .* 'momentum=0.5'"):
        parse_options("f", "momentum=0.9, momentum=0.5")
    with pytest.raises(UsageError, match=r"^f: cannot read 'a=\['"):
        parse_options("f", "a=[")


def test_output_dir_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert TrainingFields(output_dir="a/../b").output_dir == str(tmp_path / "b")
    assert TrainingFields(output_dir="~/c").output_dir == str(tmp_path / "home" / "c")


def test_plain_views() -> None:
    args = TrainingFields(lr_scheduler_kwargs={"num_cycles": 2})
    assert json.loads(args.to_json_string())["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert args.to_dict()["learning_rate"] == 5e-5
    assert all(isinstance(value, (bool, int, float, str)) for value in args.to_sanitized_dict().values())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: should be at least 1"),
        ({"sequence_parallel": True}, "sequence_parallel and tensor_parallel_size"),
        ({"parallelize_embedding": False}, "parallelize_embedding and tensor_parallel_size"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size: should be at least 1"),
        ({"pipeline_schedule": "gpipe"}, "pipeline_schedule and pipeline_parallel_size"),
        ({"pipeline_layers": [1, 1]}, "pipeline_layers and pipeline_parallel_size"),
        ({"pipeline_parallel_size": 2}, "gradient_accumulation_steps and pipeline_parallel_size: 1 micro-batches"),
        ({**PIPELINE, "pipeline_schedule": "zero"}, "pipeline_schedule: 'zero' is unknown"),
        ({**PIPELINE, "pipeline_chunks": 2}, "pipeline_schedule and pipeline_chunks"),
        ({**PIPELINE, "pipeline_schedule": "interleaved"}, "pipeline_schedule and pipeline_chunks"),
        (
            {**PIPELINE, "pipeline_schedule": "interleaved", "pipeline_chunks": 2, "gradient_accumulation_steps": 3},
            "the interleaved schedule needs a multiple of 2",
        ),
        ({**PIPELINE, "pipeline_layers": [1, 2, 3]}, "pipeline_layers: .* should have 2 numbers"),
        ({**PIPELINE, "pipeline_layers": [1, "a"]}, "pipeline_layers: .* should have 2 numbers"),
    ],
)
def test_mesh_fields_that_say_nothing_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TrainingFields(**fields)


@pytest.mark.parametrize(("given", "read"), [("auto", "auto"), ("off", "off"), (40, 40.0), ("40", 40.0), (0.5, 0.5)])
def test_a_deadline_of_steps_is_a_number_or_a_word(given: Any, read: Any) -> None:
    assert TrainingFields(step_timeout=given).step_timeout == read
