"""Plans of deep models, of which two shallow ones are traced, are those of the complete models."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from stepmark.config.training_fields import TrainingFields
from stepmark.preflight.plan import stages
from stepmark.preflight.plan.simulated_mesh import DEVICES
from stepmark.preflight.plan.stages import trace_deep
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import StepTrace, trace_step

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=300),
    "llama": LlamaConfig(num_hidden_layers=7, **SMALL),
    "layers of several kinds": Gemma3TextConfig(num_hidden_layers=32, head_dim=16, **SMALL),
}
MARKS = dict.fromkeys(("layers of several kinds", "llama"), pytest.mark.prove)


def peak(trace: StepTrace) -> int:
    return max(sum(usage.values()) for usage in trace.peaks.values())


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CONFIGS])
def test_two_shallow_models_say_what_a_deep_one_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LAYERS", 0)  # models of so few layers would be traced completely
    args = TrainingFields(zero_1=True, gradient_checkpointing=True, dtype="bfloat16")
    setup = StepSetup(CONFIGS[name], args, 4, 64, DEVICES["cuda"])
    assert peak(trace_deep(setup)) == pytest.approx(peak(trace_step(setup)), rel=1e-3)


@pytest.mark.parametrize("layers", [8, pytest.param(7, marks=pytest.mark.prove)])
def test_halves_of_the_backward_pass_are_halves_of_the_deep_model(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LAYERS", 0)
    config = LlamaConfig(num_hidden_layers=layers, **SMALL)
    setup = StepSetup(config, TrainingFields(fsdp="full_shard"), 2, 64, DEVICES["cpu"])
    deep, all_layers = trace_deep(setup).peaks, trace_step(setup).peaks
    assert {window: sum(usage.values()) for window, usage in deep.items()} == {
        window: pytest.approx(sum(usage.values()), rel=1e-3) for window, usage in all_layers.items()
    }


def test_layers_that_do_not_repeat_are_all_traced() -> None:
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=6, head_dim=16, layer_types=kinds, **SMALL)
    setup = StepSetup(config, TrainingFields(), 1, 32, DEVICES["cpu"])
    assert trace_deep(setup).peaks == trace_step(setup).peaks
