"""Static forms of experts give what the chosen experts give, one after the other, however tokens are routed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from stepmark.training.one_graph_per_step.experts import (
    all_experts_forward,
    block_rows,
    count_blocks,
    padded_blocks_forward,
)
from tests.support.ranks import Ranks

HIDDEN, EXPERTS, TOKENS = 8, 4, 11
SMALL = {"hidden_size": HIDDEN, "intermediate_size": 12, "num_local_experts": EXPERTS}
KINDS = {
    "mixtral": (MixtralExperts, MixtralConfig(**SMALL)),
    "gpt_oss: biases, transposed weights": (GptOssExperts, GptOssConfig(**SMALL)),
    "nemotron_h: no gate": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=12, n_routed_experts=EXPERTS),
    ),
}
FORMS = {"all experts": None, "one row a block": 1, "blocks": 4, "a block holds all": 64}
ROUTES = {
    "anywhere": lambda: torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)]),
    "an expert gets no token": lambda: torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(TOKENS)]),
    "all tokens to one expert": lambda: torch.full((TOKENS, 1), 2),
    "the last expert alone": lambda: torch.full((TOKENS, 1), EXPERTS - 1),
    "every token to every expert": lambda: torch.stack([torch.randperm(EXPERTS) for _ in range(TOKENS)]),
    "one token": lambda: torch.tensor([[3, 0]]),
    "twice the same expert": lambda: torch.full((TOKENS, 2), 1),
}


class Normed(MixtralExperts):
    """Experts whose outputs are normed before they are weighted."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_expert_norm = torch.nn.RMSNorm(HIDDEN)
        self.has_post_expert_norm = True


def made(kind: Any, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A module of experts with random weights."""
    config._experts_implementation = "eager"
    experts = kind(config)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    return experts


def run(experts: Any, rows: int | None, *inputs: Tensor) -> Tensor:
    if rows is None:
        return all_experts_forward(experts, *inputs)
    return padded_blocks_forward(experts, *inputs, rows)


def results(function: Any, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of hidden states, weights and parameters."""
    output = function(hidden, index, weights)
    wanted = [hidden, weights, *experts.parameters()]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), wanted)]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max() + 1e-6))


def inputs(index: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(len(index), HIDDEN).to(dtype).requires_grad_()
    return hidden, index, torch.rand(index.shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_chosen_experts(kind: str, route: str, form: str) -> None:
    torch.manual_seed(0)
    experts = made(*KINDS[kind])
    given = inputs(ROUTES[route]())
    expected = results(experts, experts, *given)
    check(results(lambda *each: run(experts, FORMS[form], *each), experts, *given), expected, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_norms_after_experts(form: str) -> None:
    torch.manual_seed(0)
    experts = made(Normed, MixtralConfig(**SMALL))
    hidden, index, weights = inputs(ROUTES["anywhere"]())

    def one_by_one(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        alone = [experts(hidden, torch.full((TOKENS, 1), each), torch.ones(TOKENS, 1)) for each in range(EXPERTS)]
        outputs = torch.stack([experts.post_expert_norm(each) for each in alone], 1)  # (tokens, experts, hidden)
        return (outputs.gather(1, index[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)

    expected = results(one_by_one, experts, hidden, index, weights)
    found = results(lambda *each: run(experts, FORMS[form], *each), experts, hidden, index, weights)
    check(found, expected, 2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_bf16(form: str, autocast: bool) -> None:
    """Results differ from fp32's by bf16's rounding, and have the types of the default form's."""
    torch.manual_seed(0)
    experts = made(*KINDS["mixtral"])
    given = inputs(ROUTES["anywhere"]())
    expected = results(experts, experts, *given)
    if not autocast:
        experts.to(torch.bfloat16)
        given = given[0].detach().bfloat16().requires_grad_(), given[1], given[2].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = run(experts, FORMS[form], *given)
    wanted = [given[0], given[2], *experts.parameters()]
    found = [output.detach(), *torch.autograd.grad(output.float().square().sum(), wanted)]
    assert {each.dtype for each in found} == {torch.float32 if autocast else torch.bfloat16}
    check([each.float() for each in found], expected, 0.05)


def problems_of_graphs() -> dict[str, list[str]]:
    """What a compiler for accelerators rejects in the graph of outputs and gradients, by form."""
    from stepmark.preflight.precompile.graph_text import GraphText
    from stepmark.runtime.context import start
    from stepmark.runtime.xla import pending_graph

    runtime, found = start("xla").runtime, {}
    for form, rows in FORMS.items():
        experts = made(*KINDS["gpt_oss: biases, transposed weights"]).to(runtime.device)
        given = [each.detach().to(runtime.device) for each in inputs(ROUTES["anywhere"]())]
        given = [each.requires_grad_(each.is_floating_point()) for each in given]
        kept = results(lambda *each, experts=experts, rows=rows: run(experts, rows, *each), experts, *given)
        found[form] = list(GraphText.read(pending_graph()).problems)
        runtime.step_boundary(wait=True)
        del kept
    return found


@pytest.mark.xla
def test_graphs_are_fit_for_compilers(ranks: Ranks) -> None:
    """The gates of gpt_oss are clamped."""
    (found,) = ranks.run(f"{__name__}:problems_of_graphs").check()
    assert found == {form: [] for form in FORMS}


def test_frozen_experts_pass_gradients_on() -> None:
    torch.manual_seed(0)
    experts = made(*KINDS["mixtral"]).requires_grad_(False)
    hidden, index, weights = inputs(ROUTES["anywhere"]())
    expected = torch.autograd.grad(experts(hidden, index, weights).sum(), [hidden, weights])
    found = torch.autograd.grad(padded_blocks_forward(experts, hidden, index, weights, 4).sum(), [hidden, weights])
    check(list(found), list(expected), 1e-6)


@pytest.mark.parametrize(("pairs", "rows"), [(1, 8), (8, 8), (9, 8), (40, 8), (41, 8)])
def test_blocks_hold_whatever_the_routing_is(pairs: int, rows: int) -> None:
    """The worst routing sends all pairs to one expert, which has a block of its own."""
    assert count_blocks(pairs, rows) == -(-pairs // rows) - 1


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(2048, 2, 8), (2048, 4, 32), (4096, 8, 128)])
def test_blocks_are_chosen_where_they_are_less_work(tokens: int, chosen: int, experts: int) -> None:
    rows = block_rows(tokens, chosen, experts)
    assert rows is not None
    computed = (experts + count_blocks(tokens * chosen, rows)) * rows
    assert tokens * chosen <= computed <= experts * tokens * 2 / 3


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 2, 8), (64, 8, 8), (4096, 4, 4)])
def test_every_expert_sees_every_token_where_that_is_less_work(tokens: int, chosen: int, experts: int) -> None:
    assert block_rows(tokens, chosen, experts) is None
