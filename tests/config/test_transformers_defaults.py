"""Scripts for transformers pass arguments that Stepmark lacks, most of them at their default values."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers

from stepmark import TrainingArguments
from stepmark.config.fields import fields_of
from stepmark.config.refusals import refusals
from stepmark.config.training_fields import TrainingFields
from stepmark.config.transformers_defaults import DONE_ANYWAY, RENAMED
from stepmark.errors import UsageError

INSTEAD, FIELDS = refusals("transformers"), refusals("elsewhere")


@dataclass
class ScriptArguments(TrainingArguments):
    """Arguments of a script, with a type that recipes do not have."""

    rank: int = 8
    targets: list[str] = field(default_factory=list)


@pytest.mark.parametrize("kind", [TrainingArguments, ScriptArguments])
def test_default_values_of_other_fields_are_accepted(tmp_path: Path, kind: type[TrainingArguments]) -> None:
    defaults: dict[str, Any] = {"torch_compile": False, "tf32": None, "fsdp": "", "deepspeed": None}
    made = kind(output_dir=str(tmp_path), learning_rate=0.5, **defaults)
    assert made.learning_rate == 0.5
    assert made.torch_compile is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp16_full_eval", True), ("auto_find_batch_size", True), ("deepspeed", "zero.json"), ("learningrate", 1.0)],
)
@pytest.mark.parametrize("kind", [TrainingArguments, ScriptArguments])
def test_other_values_are_refused_by_name(name: str, value: Any, kind: type[TrainingArguments]) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        kind(**{name: value})


def test_a_usage_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        TrainingArguments(max_steps=0)


def test_the_parser_of_example_scripts_reads_the_fields(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser(ScriptArguments)  # type: ignore[arg-type]
    text = f"""--output_dir {tmp_path} --rank 4 --targets query value --bf16 --save_total_limit 3 --report_to none
        --resume_from_checkpoint true --async_save false --label_names labels""".split()
    (made,) = parser.parse_args_into_dataclasses([*text, "--lr_scheduler_kwargs", '{"num_cycles": 2}'])
    assert (made.rank, made.targets, made.bf16, made.save_total_limit) == (4, ["query", "value"], True, 3)
    assert (made.resume_from_checkpoint, made.async_save, made.label_names) == (True, False, ["labels"])
    assert made.parsed_options("lr_scheduler_kwargs") == {"num_cycles": 2}
    assert made.reporters == []


def test_the_parser_of_example_scripts_leaves_the_fields_as_they_are() -> None:
    """It writes resolved types into dataclasses; a recipe's flags would no longer be switches."""
    before = fields_of(TrainingFields)
    transformers.HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    fields_of.cache_clear()
    assert fields_of(TrainingFields) == before
    assert before["zero_1"].types == (bool,)


def test_a_path_to_resume_from_stays_a_path() -> None:
    assert TrainingArguments(resume_from_checkpoint="true story").resume_from_checkpoint == "true story"


def test_invalid_json_is_named() -> None:
    with pytest.raises(UsageError, match="lr_scheduler_kwargs: is not a valid JSON object"):
        TrainingArguments(lr_scheduler_kwargs='{"num_cycles": ')


def test_a_switch_of_transformers_sets_the_field() -> None:
    assert TrainingArguments(use_cpu=True, device="auto").device_name == "cpu"  # type: ignore[call-arg]
    assert TrainingArguments(use_cpu=False, device="xla").device_name == "xla"  # type: ignore[call-arg]
    assert ScriptArguments(enable_jit_checkpoint=True, save_strategy="no").save_on_signal is True  # type: ignore[call-arg]
    assert ScriptArguments(save_strategy="no").save_on_signal is False
    with pytest.raises(UsageError, match="^use_cpu, device: use_cpu means device: cpu, not xla"):
        TrainingArguments(use_cpu=True, device="xla")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="^enable_jit_checkpoint, save_on_signal"):
        TrainingArguments(enable_jit_checkpoint=True, save_on_signal=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", DONE_ANYWAY)
def test_what_is_done_anyway_is_a_field_of_transformers(name: str) -> None:
    assert name.removeprefix("no_") in {each.name for each in dataclasses.fields(transformers.TrainingArguments)}


def test_every_argument_that_is_lacking_is_on_the_page_about_transformers_or_in_its_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    theirs = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    ours = {each.name for each in dataclasses.fields(TrainingArguments)}
    mentioned = {word.partition("=")[0] for word in re.findall(r"`([\w=]+)`", page)}
    assert theirs - ours - mentioned - set(INSTEAD) - set(FIELDS) == set()
    assert {*DONE_ANYWAY, *RENAMED} <= mentioned


def test_every_argument_that_is_lacking_is_refused_with_a_remedy() -> None:
    theirs = {each.name for each in dataclasses.fields(transformers.TrainingArguments) if each.init}
    ours = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert theirs - ours - set(RENAMED) - set(INSTEAD) - set(FIELDS) <= set(DONE_ANYWAY)
    for name in sorted(set(INSTEAD) - ours - set(RENAMED)):
        with pytest.raises(UsageError, match=f"^{name}: .*does not support; {re.escape(INSTEAD[name])}; see https:"):
            TrainingArguments(**{name: "another value"})


def test_arguments_that_are_lacking_can_be_read_and_keep_their_defaults() -> None:
    made = TrainingArguments(use_cpu=True)  # type: ignore[call-arg]
    assert (made.torch_compile, made.ddp_timeout, made.use_cpu, made.enable_jit_checkpoint) == (
        False,
        1800,
        True,
        False,
    )
    made.auto_find_batch_size = False
    with pytest.raises(UsageError, match="^auto_find_batch_size: .*stepmark plan"):
        made.auto_find_batch_size = True
    assert made.auto_find_batch_size is False
    with pytest.raises(AttributeError, match="no attribute 'torch_compiled'"):
        made.torch_compiled  # noqa: B018


def test_all_arguments_that_are_refused_are_named_at_once() -> None:
    with pytest.raises(UsageError, match="^evaluation_strategy: .*use eval_strategy; tf32: .*; no_cuda: "):
        TrainingArguments(evaluation_strategy="no", tf32=True, seed=3, no_cuda=True)  # type: ignore[call-arg]


def test_what_is_done_anyway_may_be_asked_for() -> None:
    made = TrainingArguments(eval_accumulation_steps=2, ddp_find_unused_parameters=False)  # type: ignore[call-arg]
    assert (made.eval_accumulation_steps, made.ddp_find_unused_parameters) == (2, False)
    with pytest.raises(UsageError, match="^ddp_backend: "):
        TrainingArguments(ddp_backend="mpi")  # type: ignore[call-arg]


def parsed(*text: str, kind: Any = ScriptArguments) -> Any:
    parser = transformers.HfArgumentParser(kind)
    return parser.parse_args_into_dataclasses(["--rank", "2", *text], look_for_args_file=False)[0]


def test_the_parser_has_an_option_for_every_argument_of_transformers() -> None:
    theirs, ours = (
        {name for action in transformers.HfArgumentParser(kind)._actions for name in action.option_strings}
        for kind in (transformers.TrainingArguments, TrainingArguments)
    )
    assert theirs - ours == set()
    made = parsed()
    assert {name: getattr(made, name) for name in ("ddp_timeout", "torch_empty_cache_steps", "use_cpu", "fsdp")} == {
        "ddp_timeout": 1800, "torch_empty_cache_steps": None, "use_cpu": False, "fsdp": None,
    }  # fmt: skip


def test_options_that_mean_nothing_here_are_accepted_and_can_be_read() -> None:
    made = parsed(
        *("--use_cpu", "--ddp_find_unused_parameters", "false", "--no_logging_nan_inf_filter", "--ddp_backend", "gloo"),
        *("--no_dataloader_pin_memory", "--dataloader_num_workers", "1", "--dataloader_prefetch_factor", "2"),
        *("--dataloader_persistent_workers", "--torch_empty_cache_steps", "3", "--eval_accumulation_steps", "4"),
        *("--activation_checkpointing", "true", "--enable_jit_checkpoint"),
    )
    assert (made.device_name, made.gradient_checkpointing, made.save_on_signal) == ("cpu", True, True)
    read = (made.use_cpu, made.ddp_find_unused_parameters, made.logging_nan_inf_filter, made.ddp_backend)
    assert read == (True, False, False, "gloo")
    assert (made.dataloader_pin_memory, made.dataloader_prefetch_factor, made.torch_empty_cache_steps) == (False, 2, 3)
    assert (made.activation_checkpointing, made.enable_jit_checkpoint, made.eval_accumulation_steps) == (True, True, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tf32", "--tf32 true"),
        ("average_tokens_across_devices", "--no_average_tokens_across_devices"),
        ("ddp_timeout", "--ddp_timeout 5"),
        ("deepspeed", "--deepspeed zero.json"),
        ("auto_find_batch_size", "--no_logging_nan_inf_filter --auto_find_batch_size"),
        ("torch_empty_cache_steps", "--torch_empty_cache_steps 0"),
        ("dataloader_prefetch_factor", "--dataloader_prefetch_factor 2"),
    ],
)
def test_options_that_would_have_no_effect_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        parsed(*text.split())


def test_no_option_undoes_another() -> None:
    assert parsed("--gradient_checkpointing").gradient_checkpointing
    assert parsed("--device", "xla").device_name == "xla"
    with pytest.raises(UsageError, match=r"^use_cpu, device"):
        parsed("--use_cpu", "--device", "xla")


def test_arguments_are_copied_with_what_they_accepted() -> None:
    made = parsed("--use_cpu", "--ddp_backend", "gloo", "--activation_checkpointing", "true")
    other = dataclasses.replace(made, learning_rate=1.0)
    assert (other.learning_rate, other.use_cpu, other.ddp_backend, other.gradient_checkpointing) == (
        1.0, True, "gloo", True,
    )  # fmt: skip
    with pytest.raises(UsageError, match="^use_cpu: .*device"):
        other.use_cpu = False
    other.activation_checkpointing = False
    assert (made.gradient_checkpointing, other.gradient_checkpointing) == (True, False)


def test_a_constructor_of_a_script_hides_nothing() -> None:
    class Own(TrainingArguments):
        def __init__(self, folder: str, **options: Any) -> None:
            super().__init__(output_dir=folder, **options)

    assert Own("a", ddp_backend="gloo").ddp_backend == "gloo"
    with pytest.raises(UsageError, match=r"^tf32: "):
        Own("a", tf32=True)
