"""Plans of pipelines: every rank of one holds something else, and the one that needs the most counts. What is planned
is compared with real runs in test_memory.py. Covers step_setup.py, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import LlamaConfig, MixtralConfig

from stepmark.config.recipe import read_recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.preflight.plan import plan as planning
from stepmark.preflight.plan import stages
from stepmark.preflight.plan.candidates import neighbours
from stepmark.preflight.plan.plan import plan_recipe
from stepmark.preflight.plan.simulated_mesh import DEVICES
from stepmark.preflight.plan.stages import trace_stages
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.text import to_json, to_text
from tests.support.recipes import write_recipe

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}


def setup(config: Any = None, **fields: Any) -> StepSetup:
    args = TrainingFields(**{"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4, **fields})
    ranks = args.pipeline_parallel_size * args.tensor_parallel_size
    return StepSetup(config or LlamaConfig(num_hidden_layers=4, **SMALL), args, ranks, 32, DEVICES["cpu"])


def peaks(found: StepSetup) -> list[int]:
    """Of all ranks of the pipeline."""
    return [sum(stage.highest[1].values()) for stage in trace_stages(found, every=True)]


def test_the_page_names_the_rank_that_needs_the_most(tmp_path: Path) -> None:
    fields = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4, "config_overrides": {"n_layer": 4}}
    recipe = write_recipe(tmp_path, config_name="gpt2", **fields)

    def near(args: TrainingFields, ranks: int) -> list[TrainingFields]:
        return [args, *(each for each in neighbours(args, ranks) if each.pipeline_parallel_size == 1)]

    with mock.patch.object(planning, "neighbours", near):
        plan = plan_recipe(read_recipe(str(recipe), {}), 2)
    own, worst = plan.own, plan.own.worst
    assert worst is not None
    assert [stage.layers for stage in own.stages] == [((0, 1),), ((2, 3),)]
    assert own.trace.peak == worst.peak == max(stage.peak for stage in own.stages)
    assert [stage.in_flight for stage in own.stages] == [2, 1]
    assert own.bubble == pytest.approx(1 / 5)
    assert {option.args.pipeline_parallel_size for option in plan.options} == {1, 2}
    text = to_text(plan)
    assert f"of pipeline rank {worst.rank}, which needs the most" in text
    assert "1f1b, 4 micro-batches: a rank waits for 20.0% of a step" in text
    assert "pp 2 x dp 1 x tp 1" in text
    assert to_json(plan)["options"][0]["largest"] == worst.rank


@pytest.mark.prove
def test_micro_batches_of_gpipe_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = setup(gradient_accumulation_steps=9, pipeline_schedule="gpipe")
    extrapolated = peaks(found)
    monkeypatch.setattr(stages, "TRACED", 9)
    assert extrapolated == pytest.approx(peaks(found), rel=1e-3)


@pytest.mark.prove
@pytest.mark.parametrize("fields", [{}, {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}])
def test_layers_of_deep_stages_are_extrapolated(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    found = setup(LlamaConfig(num_hidden_layers=26, **SMALL), **fields)
    monkeypatch.setattr(stages, "LAYERS", 0)
    extrapolated = peaks(found)
    monkeypatch.setattr(stages, "LAYERS", 100)
    assert extrapolated == pytest.approx(peaks(found), rel=1e-3)


@pytest.mark.prove
def test_the_ranks_that_are_left_out_need_less() -> None:
    found = setup(LlamaConfig(num_hidden_layers=9, **SMALL), pipeline_parallel_size=4, pipeline_layers=[2, 2, 3, 2])
    everywhere = peaks(found)
    traced = trace_stages(found, every=False)
    assert [stage.rank for stage in traced] == [0, 1, 2, 3]
    fewer = trace_stages(replace(found, args=replace(found.args, pipeline_layers=[2, 3, 2, 2])), every=False)
    assert [stage.rank for stage in fewer] == [0, 1, 3]
    assert max(everywhere) == max(sum(stage.highest[1].values()) for stage in traced)


@pytest.mark.prove
def test_router_logits_travel_in_the_plan_as_well() -> None:
    config = MixtralConfig(num_hidden_layers=4, num_local_experts=4, output_router_logits=True, **SMALL)
    assert all(peaks(setup(config)))


def test_what_cannot_be_cut_is_an_error(tmp_path: Path) -> None:
    fields = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}
    recipe = read_recipe(str(write_recipe(tmp_path, config_overrides={"n_layer": 1}, **fields)), {})
    with pytest.raises(UsageError, match="2 stages .* are more than the model's 1 layers"):
        plan_recipe(recipe, 2)
    with pytest.raises(UsageError, match="pipeline_parallel_size: 2 does not divide the 3 ranks"):
        plan_recipe(recipe, 3)


def test_a_step_has_the_samples_of_the_data_parallel_ranks(tmp_path: Path) -> None:
    fields = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 3}
    recipe = read_recipe(str(write_recipe(tmp_path, config_overrides={"n_layer": 2}, **fields)), {})
    with mock.patch.object(planning, "neighbours", lambda args, ranks: [args]):
        assert plan_recipe(recipe, 4).samples_per_step == 2 * 4 * 3
