"""Every expert on every token gives what the chosen experts give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from stepmark.training.one_graph_per_step.transformers_forward import all_experts_forward

TOKENS, HIDDEN, EXPERTS = 6, 8, 4
SMALL = {"hidden_size": HIDDEN, "intermediate_size": 12, "num_local_experts": EXPERTS}


def made(kind: Any, config: Any) -> Any:
    """A module of experts with random weights, run one expert after the other."""
    config._experts_implementation = "eager"
    experts = kind(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return experts


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MixtralExperts, MixtralConfig(**SMALL)),
        (GptOssExperts, GptOssConfig(**SMALL)),  # biases, transposed weights
        (NemotronHExperts, NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=12, n_routed_experts=EXPERTS)),
    ],
    ids=["mixtral", "gpt_oss", "nemotron_h: no gate"],
)
def test_outputs_and_gradients_are_those_of_the_chosen_experts(kind: Any, config: Any) -> None:
    experts = made(kind, config)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weights = torch.rand(TOKENS, 2, generator=generator, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 0], [2, 1], [0, 2], [1, 2], [2, 0]])  # no token chooses expert 3
    wanted = [hidden, weights, *experts.parameters()]
    expected = experts(hidden, index, weights)
    expected_gradients = torch.autograd.grad(expected.square().sum(), wanted)
    found = all_experts_forward(experts, hidden, index, weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), wanted), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max() + 1))
