"""Which models keep packed conversations apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stepmark.errors import UsageError
from stepmark.training.packing_check import check_packing
from tests.support.models import build

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 67}


class Blocks:
    def __init__(self, block_size: int = 16, packed: bool = True) -> None:
        self.block_size, self.packed = block_size, packed


def made(family: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE, **more))
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_causal_attention_keeps_them_apart(family: str) -> None:
    model = build(family).train()
    state = torch.get_rng_state()
    check_packing(model, [Blocks()], whole=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


class Noting(type(build("llama"))):  # type: ignore[misc]
    """User code in a forward pass."""

    calls = None

    def forward(self, input_ids: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        print("called")
        self.calls.append(torch.rand(()))  # type: ignore[attr-defined]
        self.running += 1
        return super().forward(input_ids=input_ids, position_ids=position_ids, **inputs)


def test_the_trial_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("llama")
    model.__class__ = Noting
    model.calls = []
    model.register_buffer("running", torch.zeros(()))
    state = torch.get_rng_state()
    check_packing(model, [Blocks()], whole=True)
    assert (model.calls, float(model.running), capsys.readouterr().out) == ([], 0.0, "")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("bloom", {}, "BloomForCausalLM takes no position_ids"),
        ("mamba", {}, "MambaForCausalLM takes no position_ids"),
        ("recurrent_gemma", {}, "RecurrentGemmaForCausalLM has layers other than attention"),
        ("mistral", {"sliding_window": 8}, "MistralForCausalLM has layers that see 8 tokens, and a block has 16"),
        ("llama", {"attn_implementation": "eager"}, "attn_implementation=.sdpa."),
    ],
)
def test_what_would_let_them_see_each_other_is_refused(family: str, more: dict[str, Any], message: str) -> None:
    model = made(family, **more)
    with pytest.raises(UsageError, match=f"^packing: .*{message}.*set packing: false"):
        check_packing(model, [Blocks()], whole=False)
    check_packing(model, [Blocks(packed=False), None], whole=False)


def test_a_window_that_is_as_long_as_a_block_is_none() -> None:
    check_packing(made("mistral", sliding_window=16), [Blocks(16)], whole=True)


class Forgetful(nn.Module):
    """Ignores the mask of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama")
        self.config = self.inner.config

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.inner.get_input_embeddings()
        return found

    def forward(self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        return self.inner(input_ids=input_ids, **more)


def test_a_model_is_tried() -> None:
    with pytest.raises(UsageError, match="Forgetful does not keep them apart .its logits differ by"):
        check_packing(Forgetful(), [Blocks()], whole=True)
