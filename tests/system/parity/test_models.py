"""The model families that the documentation names, from recipe to losses, on an eager and a lazy device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import HAS_XLA
from tests.support.ranks import Ranks

GROUPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
}


def losses(name: str, device: str, folder: str) -> dict[str, Any]:
    """Trains four steps of the recipe's model on the bytes of this file, and loads what it left by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from stepmark.config.data_arguments import DataArguments
    from stepmark.config.recipe import ModelArguments, Recipe
    from stepmark.config.training_fields import TrainingFields
    from stepmark.recipe.train import train
    from stepmark.trainer.run_folder.run_log import read_metrics

    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "save_steps": 4, "learning_rate": 1e-3}
    data = Path(folder) / "data.txt"
    data.write_text(Path(__file__).read_text())
    train(
        Recipe(
            TrainingFields(output_dir=f"{folder}/{device}", device=device, disable_tqdm=True, **options),
            ModelArguments(config_name=name, config_overrides=MODELS[name], tokenizer_name="bytes"),
            DataArguments(train_file=str(data), block_size=32),
        )
    )
    lines = read_metrics(f"{folder}/{device}")
    loaded = []
    for path in (f"{folder}/{device}", f"{folder}/{device}/checkpoint-4"):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(path)(torch.arange(16)[None]).logits
        loaded.append(logits.double().abs().sum().item())
    return {"losses": [line["loss"] for line in lines if "loss" in line], "loaded": loaded}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.prove] * (name != "qwen3")) for name in MODELS])
def test_families_train_and_load(ranks: Ranks, tmp_path: Path, name: str) -> None:
    (eager,) = ranks.run(losses, name, "cpu", str(tmp_path)).check()
    assert eager["losses"][-1] < eager["losses"][0]
    assert eager["loaded"][0] == eager["loaded"][1]
    if HAS_XLA:
        (lazy,) = ranks.run(losses, name, "xla", str(tmp_path)).check()
        assert lazy["losses"] == pytest.approx(eager["losses"], rel=1e-4)
        assert lazy["loaded"][0] == lazy["loaded"][1] == pytest.approx(eager["loaded"][0], rel=1e-3)
