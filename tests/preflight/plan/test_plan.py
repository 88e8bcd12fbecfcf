"""What a plan says of meshes, memory, checkpoints and a run's length, and what it refuses to plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import GPT2Config, LlamaConfig

from stepmark.cli import plan as plan_command
from stepmark.cli.main import run
from stepmark.config.recipe import Recipe, read_recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.preflight.plan import plan as planning
from stepmark.preflight.plan.candidates import neighbours, smaller
from stepmark.preflight.plan.plan import Plan, RankMemory, plan_recipe
from stepmark.preflight.plan.simulated_mesh import DEVICES
from stepmark.preflight.plan.stages import trace_deep
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import StepTrace, trace_step
from stepmark.preflight.plan.text import flags, to_text
from tests.support.own_code import folder_with_own_code
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

QUIET = "TRANSFORMERS_VERBOSITY"
HUGE = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PARAMETERS = 70.55e9
UNUSED: Any = None  # the size and the setup of a plan whose settings alone matter


def recipe_in(folder: Path, **fields: Any) -> Recipe:
    return read_recipe(str(write_recipe(folder, **fields)), {})


def plan_with(recipe: Recipe, ranks: int, others: Callable[[TrainingFields], bool], *memory: int) -> Plan:
    """The plan, with those settings near the recipe's alone for which `others` holds."""

    def near(args: TrainingFields, size: int) -> list[TrainingFields]:
        return [args, *filter(others, neighbours(args, size)[1:])]

    with mock.patch.object(planning, "neighbours", near):
        return plan_recipe(recipe, ranks, *memory)


def plan_own(recipe: Recipe, ranks: int) -> Plan:
    """The plan of the recipe's own settings alone."""
    return plan_with(recipe, ranks, lambda args: False)


def test_a_model_of_70_billion_parameters_is_planned_without_weights() -> None:
    args = TrainingFields(dtype="bfloat16", tensor_parallel_size=16)
    trace = trace_deep(StepSetup(LlamaConfig(**HUGE), args, 16, 4096, DEVICES["xla"]))
    usage = trace.peaks["update"]
    assert usage["parameters"] == pytest.approx(2 * PARAMETERS / 16, rel=0.05)
    assert usage["optimizer"] == pytest.approx(8 * PARAMETERS / 16, rel=0.05)
    assert usage["master weights"] == pytest.approx(4 * PARAMETERS / 16, rel=0.05)
    assert trace.saved_per_element == pytest.approx(12)


def test_a_mesh_that_cannot_be_is_named_and_the_others_are_planned(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, config_overrides={"n_layer": 2, "n_embd": 24, "n_head": 3, "n_positions": 32})
    plan = plan_with(recipe, 2, lambda args: args.tensor_parallel_size > 1)
    impossible = [option for option in plan.options if option.impossible]
    assert len(impossible) == 1
    assert "3 heads" in str(impossible[0].impossible)
    assert "not possible" in to_text(plan)


def test_a_recipe_that_cannot_run_on_the_ranks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size: 2 does not divide the 3 ranks"):
        plan_recipe(recipe_in(tmp_path, tensor_parallel_size=2), 3)
    with pytest.raises(UsageError, match="block_size"):
        plan_recipe(recipe_in(tmp_path, block_size=64), 1)


def test_settings_that_fit_are_found_and_given_as_flags(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, per_device_train_batch_size=8)
    own = plan_own(recipe, 4).own
    plan = plan_recipe(recipe, 4, int(own.trace.peak * 0.9))
    assert plan.chosen is not None
    assert plan.chosen is not plan.own
    assert plan.chosen.trace.peak < own.trace.peak
    line = to_text(plan).splitlines()[-1]
    assert line.endswith(" ".join(flags(plan.own, plan.chosen)))
    again = dict(flag.removeprefix("--").split() for flag in flags(plan.own, plan.chosen))
    changed = read_recipe(str(tmp_path / "recipe.yaml"), again)
    assert plan_own(changed, 4).own.trace.peak == plan.chosen.trace.peak


WIDE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}


def test_sharded_parameters_are_offered_before_ranks_share_a_model(tmp_path: Path) -> None:
    fields = {"config_name": "llama", "config_overrides": WIDE, "block_size": 128, "tokenizer_name": "bytes"}
    sharded = recipe_in(tmp_path, **fields, fsdp="full_shard", gradient_checkpointing=True, device="cuda")
    memory = int(plan_own(sharded, 8).own.trace.peak / 0.89)
    plan = plan_recipe(recipe_in(tmp_path, **fields, device="cuda"), 8, memory)
    assert plan.chosen is not None
    assert flags(plan.own, plan.chosen) == ["--gradient_checkpointing true", "--fsdp full_shard"]
    assert "8 x tp 1     fsdp" in to_text(plan)
    lazy = plan_recipe(recipe_in(tmp_path, **fields, device="xla"), 8, memory)
    assert not [option for option in lazy.options if option.args.fsdp]


def test_the_cheapest_settings_that_fit_are_chosen(tmp_path: Path) -> None:
    own = TrainingFields(per_device_train_batch_size=4, gradient_accumulation_steps=4)
    near = neighbours(own, 4)
    fitting = StepTrace({"update": {"parameters": 1}}, 0.0)
    order: list[tuple[bool, bool, int, int]] = []
    while near:
        options = [RankMemory(own, impossible="too large"), *(RankMemory(each, fitting) for each in near[1:])]
        chosen = Plan("", UNUSED, UNUSED, 10, 2, 1, options, 0, 0, []).chosen
        if chosen is None:
            break
        args = chosen.args
        shared = args.tensor_parallel_size * args.pipeline_parallel_size
        order.append((args.gradient_checkpointing, args.fsdp is not None, args.per_device_train_batch_size, shared))
        near.remove(args)
    assert order == [
        (False, False, 4, 1),
        (False, False, 1, 1),
        (False, True, 4, 1),
        (True, False, 4, 1),
        (False, False, 4, 2),
        (False, False, 4, 2),
    ]


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (1, {}),
        (2, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 4}),
        (2, {"pipeline_parallel_size": 2}),
        (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        (4, {"pipeline_parallel_size": 4, "pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
    ],
)
def test_every_setting_trains_on_as_many_samples_a_step(size: int, fields: dict[str, Any]) -> None:
    """Neither less: those whose micro-batches would be too few for their pipeline are left out."""
    args = TrainingFields(per_device_train_batch_size=4, gradient_accumulation_steps=4, zero_1=size < 4, **fields)
    settings = [*neighbours(args, 4), *smaller(args, 4)]
    assert settings[0] == args
    assert len(settings) > 3
    for other in settings:
        replicas = 4 // (other.tensor_parallel_size * other.pipeline_parallel_size)
        samples = other.per_device_train_batch_size * other.gradient_accumulation_steps * replicas
        assert samples == 4 * 4 * 4 // size


@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({"neftune_noise_alpha": 5.0}, {1}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {1}),
        ({"optim": "adafactor"}, {1, 2, 4}),
    ],
)
def test_settings_that_the_recipe_excludes_are_left_out(fields: dict[str, Any], stages: set[int]) -> None:
    args = TrainingFields(gradient_accumulation_steps=4, **fields)
    settings = [*neighbours(args, 4), *smaller(args, 4)]
    assert {made.pipeline_parallel_size for made in settings} == stages
    assert len(settings) > 3


def test_an_owner_of_whole_parameters_holds_them_beside_its_shards() -> None:
    """Each rank owns a half of what tensor parallelism shards: nearly everything, in float32 as an additional copy."""
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=16)
    args = TrainingFields(optim="adafactor", tensor_parallel_size=2)
    usage = trace_step(StepSetup(config, args, 2, 16, DEVICES["cuda"])).peaks["update"]
    assert usage["master weights"] == pytest.approx(usage["parameters"], rel=0.3)
    elementwise = TrainingFields(optim="adamw_torch", tensor_parallel_size=2)
    usage = trace_step(StepSetup(config, elementwise, 2, 16, DEVICES["cuda"])).peaks["update"]
    assert usage.get("master weights", 0) == 0


def test_a_model_that_cannot_train_a_step_is_an_error(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3}
    with pytest.raises(UsageError, match="config_name and config_overrides: "):
        plan_recipe(recipe_in(tmp_path, config_name="llama", config_overrides=overrides), 1)


@pytest.mark.prove
def test_steps_of_epochs_need_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    recipe = recipe_in(tmp_path, max_steps=-1, num_train_epochs=2.0)
    assert plan_recipe(recipe, 2).steps is None
    assert not (tmp_path / "cache").exists()
    counted = plan_recipe(recipe, 2, count_data=True)
    tokens = len((tmp_path / "text.txt").read_bytes())
    assert counted.steps is not None
    assert counted.tokens == pytest.approx(2 * 0.95 * tokens, rel=0.1)


def test_a_model_is_planned_without_its_tokenizer(tmp_path: Path) -> None:
    plan = plan_own(recipe_in(tmp_path, tokenizer_name=str(tmp_path / "nothing")), 1)
    assert "configuration's own vocabulary" in plan.notes[0]
    assert plan.size.elements > 50257 * 16


def test_planned_checkpoint_is_the_one_that_is_written(ranks: Ranks, tmp_path: Path) -> None:
    fields = {"dtype": "bfloat16", "zero_1": True, "save_steps": 2}
    recipe = write_recipe(tmp_path, **fields)
    ranks.run("tests.support.memory_programs:trained", str(recipe), nproc=2).check()
    folder = tmp_path / "out" / "checkpoint-2"
    written = sum(tensor_bytes(path) for path in folder.rglob("*.safetensors"))
    plan = plan_own(read_recipe(str(recipe), {}), 2)
    assert plan.checkpoint_bytes == pytest.approx(written, rel=0.001)
    assert plan.staging_bytes == pytest.approx(written / 2, rel=0.001)  # on each of two ranks


@pytest.mark.parametrize(
    ("steps", "interval", "strategy", "expected"),
    [(10, 4, "steps", 3), (8, 4, "steps", 2), (2, 500, "steps", 1), (10, 0.3, "steps", 4), (10, 4, "no", 0)],
)
def test_planned_checkpoints_are_those_of_the_run(
    tmp_path: Path, steps: int, interval: float, strategy: str, expected: int
) -> None:
    """A run saves at its last step, too."""
    recipe = recipe_in(tmp_path, max_steps=steps, save_steps=interval, save_strategy=strategy)
    own = RankMemory(recipe.training)
    assert Plan("", UNUSED, UNUSED, None, 2, steps, [own], 0, 0, []).saves == expected


def test_a_setting_fits_with_room_for_what_is_not_counted() -> None:
    args = TrainingFields()
    assert RankMemory(args, StepTrace({"update": {"parameters": 90}}, 0.0)).fits(100)
    assert not RankMemory(args, StepTrace({"update": {"parameters": 91}}, 0.0)).fits(100)
    assert not RankMemory(args, impossible="too many ranks").fits(100)


def tensor_bytes(path: Path) -> int:
    """Bytes of tensors in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return sum(
        end - begin
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    )


def test_the_command_says_whether_the_recipe_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_TORCH_XLA", "1")  # the command sets it where it is not set
    recipe = str(write_recipe(tmp_path))
    assert run(["plan", recipe, "--nproc", "2", "--device-memory", "1GB"]) == 0
    assert "The recipe fits into 1.00 GB" in capsys.readouterr().out
    with mock.patch.object(planning, "smaller", lambda *given: smaller(*given)[:2]):
        assert run(["plan", recipe, "--nproc", "2", "--device-memory", "10kB", "--zero_1", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["chosen"] is None
    assert values["options"][0]["peak"] == sum(values["options"][0]["memory"].values())
    assert values["options"][0]["fits"] is False
    assert run(["plan", recipe, "--nproc", "2", "--device-memory", "much"]) == 2
    assert "--device-memory: 'much' is not a size" in capsys.readouterr().err
    assert run(["plan", recipe]) == 0  # for one rank
    page = capsys.readouterr().out
    assert "ranks       1: dp 1 x tp 1" in page
    assert "the recipe's mesh and those near it, in MB:" in page
    row = page.split("in MB:\n")[1].splitlines()[1]  # below the names of the columns
    assert float(row.split()[-1]) > 0.1
    assert "0.000 billion" not in page
    assert run(["plan", recipe, "--nproc", "0"]) == 2
    assert "--nproc: must be at least 1, but is 0" in capsys.readouterr().err


def test_libraries_are_quiet_before_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the variable once: its notices about a model of its own would stand above the plan."""
    monkeypatch.delenv(QUIET)
    monkeypatch.setenv("USE_TORCH_XLA", "1")
    before: list[str | None] = []
    monkeypatch.setattr(planning, "neighbours", lambda args, ranks: [args])
    monkeypatch.setattr(plan_command, "work_offline_without_hub", lambda _: before.append(os.environ.get(QUIET)))
    assert run(["plan", str(write_recipe(tmp_path))]) == 0
    assert before == ["error"]


def test_models_that_read_their_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def reading(self: Any, input_ids: Any = None, **options: Any) -> Any:
        assert input_ids.sum().item() >= 0
        return forward(self, input_ids, **options)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", reading)
    with pytest.raises(UsageError, match="GPT2Config: the model reads values of its tensors"):
        plan_recipe(recipe_in(tmp_path), 1)


def test_code_that_comes_with_a_model_is_executed_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(folder_with_own_code(tmp_path, monkeypatch, n_layer=14))  # deeper than what is traced
    given = {"config_name": None, "config_overrides": None, "model_name_or_path": folder, "tokenizer_name": "bytes"}
    plan = plan_own(recipe_in(tmp_path, trust_remote_code=True, block_size=16, **given), 1)
    assert plan.model_class == "TinyModel"
    with pytest.raises(UsageError, match="set trust_remote_code: true"):
        plan_recipe(recipe_in(tmp_path, block_size=16, **given), 1)


def test_an_adapter_alone_has_gradients_and_is_saved(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path / "base")
    base = {"model_name_or_path": str(tmp_path / "base"), "config_name": None, "config_overrides": None}
    complete = plan_own(recipe_in(tmp_path, **base), 1)
    adapted = plan_own(recipe_in(tmp_path, **base, peft="lora", lora_r=4), 1)
    assert adapted.model_class == complete.model_class
    added = 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64))  # layers, rank, inputs and outputs of all linear layers
    assert adapted.size.elements == complete.size.elements + added
    assert (adapted.model_bytes, complete.model_bytes) == (4 * added, 4 * complete.size.elements)
    assert adapted.optimizer_bytes == pytest.approx(8 * added, rel=0.05)
    assert adapted.own.trace.usage is not None
    assert adapted.own.trace.usage["optimizer"] == pytest.approx(8 * added, rel=0.05)
    unknown = recipe_in(tmp_path, **base, peft="lora", lora_target_modules=["nothing"])
    with pytest.raises(UsageError, match="lora_target_modules: "):
        plan_recipe(unknown, 1)
    staged = plan_with(recipe_in(tmp_path, **base, peft="lora"), 2, lambda args: args.pipeline_parallel_size > 1)
    (refused,) = [option for option in staged.options if option.args.pipeline_parallel_size > 1]
    assert refused.impossible is not None


def test_of_experts_the_active_parameters_are_told(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    recipe = recipe_in(tmp_path, config_name="mixtral", config_overrides={**sizes, **experts})
    with mock.patch.object(planning, "neighbours", lambda args, ranks: [args]):
        found = plan_recipe(recipe, 2)
    assert found.size.elements - found.size.active == 3 * 3 * 8 * 16
    assert f"({found.size.active / found.size.elements:.1%} active for a token)" in to_text(found)
