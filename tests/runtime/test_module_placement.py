"""Modules in another dtype, and on their device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stepmark import Trainer, TrainingArguments
from stepmark.config.recipe import ModelArguments
from stepmark.data.tokenizer import byte_tokenizer
from stepmark.recipe.model import build_model
from stepmark.runtime.module_placement import cast_module
from tests.support.models import build
from tests.support.programs import Blocks


def test_everything_that_is_saved_is_cast_and_nothing_else() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    weight = module[0].weight
    cast_module(module, torch.bfloat16)
    assert module[0].weight is weight
    dtypes = {name: value.dtype for name, value in module.state_dict().items()}
    assert dtypes.pop("1.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert module.scratch.dtype == torch.float32


def test_the_frequencies_of_rotary_embeddings_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    """Rounded, positions would be turned too far, and inference computes with exact ones."""
    expected = build("llama").model.rotary_emb.inv_freq
    args = TrainingArguments(output_dir=str(tmp_path), dtype="bfloat16", device="cpu", max_steps=1)
    trained = Trainer(build("llama"), args, train_dataset=Blocks(4)).model
    tokenizer = byte_tokenizer()
    new = ModelArguments(config_name="llama", config_overrides="hidden_size=32,num_hidden_layers=1", tokenizer_name="x")
    made = build_model(new, tokenizer, 0, dtype=torch.bfloat16)
    assert {each.dtype for model in (trained, made) for each in model.parameters()} == {torch.bfloat16}
    assert torch.equal(trained.model.rotary_emb.inv_freq, expected)
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32
