"""Modules in another dtype, and on their device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stepmark import Trainer, TrainingArguments
from stepmark.config.recipe import ModelArguments
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.recipe.model import build_config, build_model
from stepmark.runtime.module_placement import cast_module
from tests.support.models import build
from tests.support.programs import Blocks


def test_everything_is_cast_but_frequencies() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    module.register_buffer("inv_freq", torch.ones(1), persistent=False)
    weight = module[0].weight
    cast_module(module, torch.bfloat16)
    assert module[0].weight is weight
    dtypes = {name: value.dtype for name, value in module.state_dict().items()}
    assert dtypes.pop("1.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert module.scratch.dtype == torch.bfloat16
    assert module.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", ["openai-gpt", "xglm"])
def test_models_that_compute_with_tables_they_do_not_save_train_in_bfloat16(family: str) -> None:
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    if family == "xglm":
        shape = {"d_model": 16, "ffn_dim": 16, "num_layers": 1, "attention_heads": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape))
    cast_module(model, torch.bfloat16)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_the_frequencies_of_rotary_embeddings_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    """Rounded, positions would be turned too far, and inference computes with exact ones."""
    expected = build("llama").model.rotary_emb.inv_freq
    args = TrainingArguments(output_dir=str(tmp_path), dtype="bfloat16", device="cpu", max_steps=1)
    trained = Trainer(build("llama"), args, train_dataset=Blocks(4)).model
    tokenizer = byte_tokenizer()
    new = ModelArguments(config_name="llama", config_overrides="hidden_size=32,num_hidden_layers=1", tokenizer_name="x")
    made = build_model(new, build_config(new, tokenizer), 0, dtype=torch.bfloat16)
    assert {each.dtype for model in (trained, made) for each in model.parameters()} == {torch.bfloat16}
    assert torch.equal(trained.model.rotary_emb.inv_freq, expected)
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32
