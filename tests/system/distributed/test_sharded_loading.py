"""Real meshes make models in parts: the bits of the whole one, from their own bytes, in little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.parallel.loading.test_load import CONFIGS
from tests.support.ranks import Ranks

PROGRAMS = "tests.system.distributed.loading_programs"


@pytest.mark.parametrize("how", ["new", "folder"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("embedding", [True, False])
def test_a_mesh_starts_from_the_unsharded_models_bits(
    ranks: Ranks, tmp_path: Path, family: str, how: str, embedding: bool
) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family](tie_word_embeddings=family == "gpt2"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    options: dict[str, Any] = {"tp": 2, "parallelize_embedding": embedding}
    for found in ranks.run(f"{PROGRAMS}:compare", str(tmp_path), how, options, nproc=2).check():
        assert found["different"] == []
        assert found["devices"] == ["cpu"]
        assert found["cut"] > 0
        assert found["same_draws"]
        assert found["loss"] == pytest.approx(found["whole_loss"], rel=1e-5)


@pytest.mark.xla
def test_parameters_end_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).save_pretrained(tmp_path)
    for found in ranks.run(f"{PROGRAMS}:compare", str(tmp_path), "folder", {"tp": 2}, "xla", nproc=2).check():
        assert found["different"] == []
        assert found["devices"] == ["xla"]
        assert found["loss"] == pytest.approx(found["whole_loss"], rel=1e-4)


def large_folder(folder: Path, layers: int) -> None:
    """A model of zeros with a big vocabulary, in files of one layer or so."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16000,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = {name: torch.zeros(each.shape) for name, each in model.state_dict().items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


@pytest.mark.parametrize("how", ["folder", "new"])
@pytest.mark.parametrize("layers", [3, pytest.param(15, marks=pytest.mark.prove)])
def test_bytes_read_and_memory_held(ranks: Ranks, tmp_path: Path, how: str, layers: int) -> None:
    large_folder(tmp_path, layers)
    for found in ranks.run(f"{PROGRAMS}:measure", str(tmp_path), how, 2, nproc=2).check():
        assert found["peak"] <= found["shard"] + found["largest"] + (256 << 20 if layers > 3 else 64 << 20)
        if how == "folder":
            assert found["asked"] - found["replicated"] <= (found["whole"] - found["replicated"]) * (0.5 + 0.05)


@pytest.mark.prove
@pytest.mark.parametrize("how", ["folder", "new"])
def test_a_pipeline_stage_reads_its_bytes_and_holds_little_more(ranks: Ranks, tmp_path: Path, how: str) -> None:
    large_folder(tmp_path, 15)
    held = []
    for found in ranks.run(f"{PROGRAMS}:measure", str(tmp_path), how, 1, 2, nproc=2).check():
        print(f"{how}: {found}")
        assert found["peak"] <= found["shard"] + 100 * 10**6
        assert how == "new" or found["asked"] == found["shard"]
        held.append(found["shard"])
    assert sum(held) == found["whole"]
    assert max(held) < 0.7 * found["whole"]
