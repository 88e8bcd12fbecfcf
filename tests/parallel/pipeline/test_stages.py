"""Models cut into stages, in one process: hidden states and gradients are handed over by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    MixtralConfig,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from scripts.pipeline_comparison import Pipeline, difference, pipeline_mesh, router_difference, tokens_for
from stepmark import evaluate
from stepmark.errors import UsageError
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.pipeline.balance import CHECKPOINTED, balanced, bounds_of
from stepmark.parallel.pipeline.stage_plan import plan_stages
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.runtime.eager import EagerRuntime
from stepmark.training.model_options import enable_gradient_checkpointing
from tests.support.models import build
from tests.support.programs import Blocks

FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (2, 2)])
def test_loss_and_gradients_are_those_of_the_whole_model(kind: str, ranks: int, chunks: int) -> None:
    assert difference(build(kind, **FOUR), ranks, chunks) == ""


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_embeddings_of_another_type_than_the_layers(kind: str) -> None:
    """Rotary angles and masks have the type of the embeddings on every stage, also where these are not."""
    model = build(kind, tie_word_embeddings=False, **FOUR).to(torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or name.endswith(("norm", "ln_1", "ln_2", "ln_f")):
            module.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(model, 2) == ""


def test_each_rank_keeps_its_stages_under_global_names() -> None:
    model = build("gpt2", **FOUR)
    names = {name for name, _ in model.named_parameters()}
    held = [dict(part.named_parameters()) for part in Pipeline(model, 2, 2).parts]
    assert set(held[0]) | set(held[1]) == names
    assert set(held[0]) & set(held[1]) == {"transformer.wte.weight"}
    layers = [sorted({name.split(".")[2] for name in each if ".h." in name}) for each in held]
    assert layers == [["0", "2"], ["1", "3"]]


def test_a_staged_model_cannot_be_called() -> None:
    part = Pipeline(build("llama", **FOUR), 2).parts[0]
    with pytest.raises(UsageError, match="cut into pipeline stages"):
        part(input_ids=tokens_for(67))


def test_a_model_is_cut_once() -> None:
    pipeline = Pipeline(build("llama", **FOUR), 2)
    with pytest.raises(UsageError, match="already"):
        parallelize(pipeline.parts[0], pipeline.meshes[0])


def test_size_of_the_complete_model() -> None:
    whole = build("gpt2", **FOUR)
    expected = sum(parameter.numel() for parameter in whole.parameters())
    for part in Pipeline(whole, 2).parts:
        found = staged(part)
        assert found is not None
        assert found.size.elements == expected
        assert found.size.nbytes == 4 * expected


def test_balance_counts_the_head() -> None:
    assert balanced([1.0] * 12, 0, 4) == [3, 3, 3, 3]
    assert balanced([1.0] * 12, 5.4, 2) == [9, 3]
    assert balanced([1.0] * 3, 100, 3) == [1, 1, 1]
    assert balanced([3.0, 1, 1, 1], 0, 2) == [1, 3]
    assert bounds_of([8, 4]) == [(0, 8), (8, 12)]


def test_a_large_vocabulary_is_worth_several_layers() -> None:
    small, large = (
        [end - begin for begin, end in plan_stages(model, 2).bounds]
        for model in (build("llama", num_hidden_layers=8, vocab_size=size) for size in (67, 2048))
    )
    assert small == [4, 4]
    assert large[0] > large[1]


def test_gradient_checkpointing_makes_the_last_stage_cheaper() -> None:
    assert balanced([1.0] * 9, 0, 2, CHECKPOINTED) == [4, 5]
    assert balanced([1.0] * 10, 4.0, 2) == [7, 3]
    assert balanced([1.0] * 10, 4.0, 2, CHECKPOINTED) == [6, 4]
    model = build("llama", num_hidden_layers=9)
    assert [end - begin for begin, end in plan_stages(model, 2).bounds] == [5, 4]
    enable_gradient_checkpointing(model, EagerRuntime(torch.device("cpu")))
    assert [end - begin for begin, end in plan_stages(model, 2).bounds] == [4, 5]


def refused(model: Any, stages: int = 2, sizes: list[int] | None = None) -> str:
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(UsageError) as caught:
        plan_stages(model, stages, sizes)
    assert [name for name, _ in model.named_parameters()] == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    small = {"num_layers": 2, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "vocab_size": 67}
    assert "T5ForConditionalGeneration is not among the models" in refused(
        T5ForConditionalGeneration(T5Config(**small))
    )
    narrow = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    bert = AutoModelForCausalLM.from_config(BertConfig(**narrow, vocab_size=67, is_decoder=True))
    assert "BertLMHeadModel is not among the models" in refused(bert)
    assert "is not among" in refused(torch.nn.Linear(2, 2))


def test_sizes_are_checked() -> None:
    model = build("llama", **FOUR)
    assert "5 stages" in refused(model, 5)
    assert "[1, 2, 1] should be 2 numbers" in refused(model, 2, [1, 2, 1])
    assert "the model's 4 layers, and it is 5" in refused(model, 2, [3, 2])
    assert plan_stages(model, 2, [1, 3]).bounds == ((0, 1), (1, 4))


def test_parameters_that_stages_share_are_refused() -> None:
    shared = build("llama", **FOUR)
    shared.model.layers[2] = shared.model.layers[1]
    assert "uses a layer several times" in refused(shared)
    tied = build("llama", **FOUR)
    tied.model.layers[3].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    message = refused(tied)
    assert "model.layers.0.mlp.up_proj.weight and model.layers.3.mlp.up_proj.weight" in message
    near = build("llama", **FOUR)
    near.model.layers[1].mlp.up_proj.weight = near.model.layers[0].mlp.up_proj.weight
    assert plan_stages(near, 2).stages == 2
    norm = build("llama", **FOUR)
    norm.model.norm.weight = norm.model.layers[0].input_layernorm.weight
    assert "supported for an embedding tied to the head only" in refused(norm)


def test_outputs_of_all_layers_are_refused() -> None:
    model = build("llama", **FOUR)
    model.config.output_hidden_states = True
    assert "output_hidden_states" in refused(model)


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_outputs_of_all_layers_that_are_asked_for_later_are_refused(name: str) -> None:
    """A loss over routers would be that of the last stage's."""
    pipeline = Pipeline(mixture(), 2)
    inputs = {"input_ids": tokens_for(67), "use_cache": False}
    pipeline.forward(inputs, inputs)
    for part in pipeline.parts:
        setattr(part.config, name, True)
    with pytest.raises(UsageError, match=f"{name}: it was turned on after the model was cut"):
        pipeline.forward(inputs, inputs)


def test_layers_that_training_leaves_out_are_refused() -> None:
    small = {"hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "word_embed_proj_dim": 8}
    model = AutoModelForCausalLM.from_config(OPTConfig(**small, vocab_size=67, layerdrop=0.1))
    assert "layerdrop of 0.1 leaves out layers" in refused(model)


def mixture() -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**small, num_hidden_layers=4, num_local_experts=4, vocab_size=67)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 2)])
def test_the_loss_over_the_routers_of_all_layers(ranks: int, chunks: int) -> None:
    assert router_difference(mixture(), ranks, chunks) == ""


def test_a_part_is_not_saved_as_a_model(tmp_path: Path) -> None:
    part = Pipeline(build("llama", **FOUR), 2).parts[0]
    with pytest.raises(UsageError, match="save_pretrained: this rank has a part"):
        part.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_part_is_evaluated_on_its_own_mesh_only() -> None:
    pipeline = Pipeline(build("llama", **FOUR), 2)
    with pytest.raises(UsageError, match=r"parallelized for another one, \{'pp': 2"):
        evaluate(pipeline.parts[0], Blocks(2), mesh=pipeline_mesh(0, 3))
