"""What a run says of its model at its start, where a rank holds a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scripts.pipeline_comparison import Pipeline
from stepmark.trainer.telemetry.banner import _parameters, _stages, count
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
    args: Any = SimpleNamespace(pipeline_schedule="1f1b", gradient_accumulation_steps=4)
    parts: Any = SimpleNamespace(model=pipeline.parts[1], mesh=pipeline.meshes[1], args=args)
    assert _stages(parts) == ["pipeline 2 stages of 2, 2 layers, 1f1b; with 4 micro-batches ranks wait 20% of a step"]
    parts.model = build("gpt2")
    assert _stages(parts) == []
