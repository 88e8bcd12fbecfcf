"""Loading a stage: its own values, and no bytes of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.pipeline_comparison import pipeline_mesh
from stepmark import load_for_parallelism
from stepmark.errors import UsageError
from tests.support.counted_reads import counted_reads
from tests.support.models import build, configuration

FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_rank_reads_its_stage_only(tmp_path: Path, kind: str) -> None:
    whole = build(kind, **FOUR)
    whole.save_pretrained(tmp_path)
    expected = dict(whole.named_parameters())
    seen: set[str] = set()
    for rank in range(2):
        with counted_reads() as reads, load_for_parallelism(pipeline_mesh(rank, 2), pipeline_layers=[3, 1]):
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
        held = dict(model.named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in held.items())
        assert reads.count == sum(value.nbytes for value in held.values())
        assert any(".3." in name for name in held) == (rank == 1)
        seen |= held.keys()
    assert seen == expected.keys()


def test_a_new_model_has_the_values_of_the_whole_one() -> None:
    torch.manual_seed(3)
    whole = dict(AutoModelForCausalLM.from_config(configuration("qwen3", **FOUR)).named_parameters())
    seen: set[str] = set()
    for rank in range(2):
        torch.manual_seed(3)
        with load_for_parallelism(pipeline_mesh(rank, 2), pipeline_chunks=2):
            model = AutoModelForCausalLM.from_config(configuration("qwen3", **FOUR))
        held = dict(model.named_parameters())
        assert all(torch.equal(value, whole[name]) for name, value in held.items())
        seen |= held.keys()
    assert seen == whole.keys()


def test_what_cannot_be_cut_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    build("llama", **FOUR).save_pretrained(tmp_path)
    with (
        counted_reads() as reads,
        pytest.raises(UsageError, match="5 stages"),
        load_for_parallelism(pipeline_mesh(0, 5)),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reads.count == 0
