"""Models of transformers on the lazy device: one execution a step, no compilation once warm, no read of the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ROOT, Ranks

HERE = "tests.system.parity.test_lazy_models"
PAGE = ROOT / "docs" / "lazy-devices.md"
SAMPLE = ("gpt2", "llama", "mixtral", "bert, masked tokens", "t5")


def readme_recipe() -> dict[str, Any]:
    """The fields of the README's first recipe."""
    import yaml

    block = re.search(r"```yaml\n# recipe.yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return yaml.safe_load(block.group(1))


def train_readme_recipe(folder: str) -> dict[str, Any]:
    """The README's recipe, small and short, with what the device does in each step and evaluation batch."""
    import stepmark.trainer.trainer as trainer_module
    from stepmark.config.recipe import read_recipe
    from stepmark.recipe.train import train
    from tests.support.lazy_models import CountDevice

    count = CountDevice()

    class Counted(trainer_module.Trainer):
        def __init__(self, *args: Any, callbacks: list[Any], **options: Any) -> None:
            super().__init__(*args, callbacks=[*callbacks, count], **options)
            count.trainer = self

    trainer_module.Trainer = Counted
    small = {"config_overrides": {"n_layer": 1, "n_embd": 32, "n_head": 2}, "block_size": 32, "max_eval_samples": 20}
    short = {"output_dir": folder, "max_steps": 6, "eval_steps": 3, "max_train_samples": 100, "disable_tqdm": True}
    path = Path(folder) / "recipe.json"
    import json

    path.write_text(json.dumps({**readme_recipe(), **small, **short, "device": "xla"}))
    train(read_recipe(str(path), {}))
    return {"steps": count.steps, "batches": count.batches}


@pytest.mark.xla
def test_the_readme_recipe_executes_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(f"{HERE}:train_readme_recipe", str(tmp_path)).check()
    assert [executions for _, executions, _ in found["steps"]] == [1] * 6
    assert found["steps"][2:] == [[0, 1, 0]] * 4
    assert found["batches"]
    assert found["batches"] == [[0, 1, 0]] * len(found["batches"])
