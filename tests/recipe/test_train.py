from __future__ import annotations

import pytest

from scripts.pipeline_comparison import pipeline_mesh
from stepmark.config.training_fields import TrainingFields
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.recipe import train
from stepmark.trainer import setup
from tests.support.models import build


@pytest.mark.parametrize(("checkpointing", "sizes"), [(False, [5, 4]), (True, [4, 5])])
def test_layers_are_divided_for_the_gradient_checkpointing_that_the_recipe_asks_for(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool, sizes: list[int]
) -> None:
    mesh = pipeline_mesh(0, 2)
    monkeypatch.setattr(setup, "make_mesh", lambda args, context: mesh)
    args = TrainingFields(pipeline_parallel_size=2, gradient_accumulation_steps=2, gradient_checkpointing=checkpointing)
    model = build("llama", num_hidden_layers=9)
    train._model_factory(args, mesh.context).shard(model)
    stages = staged(model)
    assert stages is not None
    assert [end - begin for begin, end in stages.plan.bounds] == sizes
