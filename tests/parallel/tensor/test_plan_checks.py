"""Models that would train incorrectly without an error are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.tables import read_rows
from stepmark.errors import UsageError
from stepmark.parallel.architectures import TENSOR_PARALLEL
from stepmark.parallel.tensor.plans import ADDED, PLANS, check_plan, plan_of
from tests.support.models import SHAPE, build


def check(model: Any, plan: dict[str, str] | None = None) -> None:
    check_plan(model, plan_of(model, plan), [model.get_input_embeddings(), model.get_output_embeddings()])


def of_type(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **{**SHAPE, "vocab_size": 67, **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_known_models_pass(kind: str) -> None:
    check(build(kind))


def test_a_variant_whose_plan_omits_a_norm() -> None:
    check(of_type("cohere"))
    with pytest.raises(UsageError, match=r"does not mention model\.layers\.0\.self_attn\.q_norm\.weight"):
        check(of_type("cohere", use_qk_norm=True))


def test_additional_modules_and_parameters() -> None:
    model = build("llama")
    model.model.layers[1].mlp.scale = nn.LayerNorm(48)
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.scale\.weight"):
        check(model)
    model.model.layers[1].mlp.scale = None
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UsageError, match=r"model\.layers\.0\.self_attn\.sinks"):
        check(model)


def test_a_custom_plan_can_name_them() -> None:
    model = build("llama")
    model.model.layers[1].mlp.scale = nn.LayerNorm(48)
    check(model, {**model.tp_plan, "model.layers.1.mlp.scale": "replicated_with_grad_allreduce"})


def test_latent_attention_is_refused_under_any_plan() -> None:
    model = of_type("deepseek_v3", first_k_dense_replace=2, num_key_value_heads=4)
    with pytest.raises(UsageError, match="unsupported styles"):
        check(model)
    plan = {"model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    with pytest.raises(UsageError, match=r"kv_a_proj_with_mqa computes keys that all heads share"):
        check(model, plan)


def test_types_that_were_not_verified_need_a_custom_plan() -> None:
    model = build("llama")
    model.config.model_type = "llama_like"
    with pytest.raises(UsageError, match="llama_like is not among the architectures"):
        check(model)
    check(model, model.tp_plan)


def test_the_table_lists_the_accepted_types() -> None:
    assert {row["model type"] for row in read_rows("tensor-parallel") if row["verdict"] == "passed"} == TENSOR_PARALLEL
    assert {*PLANS, *ADDED} <= TENSOR_PARALLEL
