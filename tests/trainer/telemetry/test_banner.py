"""What a run says of its model at its start, where a rank holds a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scripts.pipeline_comparison import Pipeline
from stepmark.config.training_fields import TrainingFields
from stepmark.trainer.telemetry.banner import _parameters, banner, count
from tests.support.models import build


def test_a_stage_says_the_size_of_the_complete_model() -> None:
    whole = build("llama", num_hidden_layers=4)
    whole.model.embed_tokens.requires_grad_(False)
    total = sum(parameter.numel() for parameter in whole.parameters())
    trained = total - whole.model.embed_tokens.weight.numel()
    for part in (whole, *Pipeline(whole, 2).parts):
        assert _parameters(part) == f"{count(total)} parameters, {count(trained)} of them trained"


def test_stages_and_how_long_they_wait() -> None:
    pipeline = Pipeline(build("gpt2", num_hidden_layers=4), 2)
    args, mesh = TrainingFields(gradient_accumulation_steps=4), pipeline.meshes[1]
    loader = SimpleNamespace(layout=SimpleNamespace(global_batch=32), steps_per_epoch=3)
    parts: Any = SimpleNamespace(args=args, mesh=mesh, context=mesh.context, loader=loader, total_steps=3)
    parts.model = pipeline.parts[1]
    line = "pipeline 2 stages of 2, 2 layers, 1f1b; with 4 micro-batches ranks wait 20% of a step"
    assert line in [*banner(parts, 0)]
    parts.model = build("gpt2")
    assert not any(line.startswith("pipeline") for line in banner(parts, 0))
