"""Listed architectures compute the same on two ranks as on one, also with sequence parallelism: logits, loss with
that of routers, every gradient."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.tables import read_rows
from stepmark.parallel.architectures import EXPERT_PARALLEL, TENSOR_PARALLEL
from tests.support.expert_families import differences
from tests.support.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = {
    "mixtral": "packed projections of experts",
    "gpt_oss": "transposed experts with biases, attention sinks",
    "deepseek_v2": "latent attention, shared experts",
    "longcat_flash": "experts that do nothing",
    "inkling_text": "a plan that is mended, convolutions along the sequence",
    "gpt_neox": "attention and feed-forward network beside each other, with biases",
    "gemma2": "norms behind blocks",
    "phi3": "columns that are gathered inside a block",
    "nanochat": "a norm that is called before the layers, too",
    "llama4_text": "a router's block that gives tokens without their batch",
    "hrm_text": "two lists of layers, called in turn",
    "hy_v4": "no sequence parallelism",
}


@pytest.fixture
def architectures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("architectures")


def verdicts(types: Iterable[str], *options: str) -> dict[str, str]:
    command = [sys.executable, "scripts/architectures.py", *options, "--only", *types]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    found = {line.split()[1]: line.split(maxsplit=2) for line in done.stdout.splitlines() if line.split()[1:2]}
    assert set(found) == set(types), done.stderr[-2000:]
    return {name: " ".join([*words[:1], *" ".join(words[2:]).split()]) for name, words in found.items()}


def listed(types: Iterable[str], table: str = "tensor-parallel") -> dict[str, str]:
    """What the table says."""
    shown = ("verdict", "why", "sequence parallel")
    rows = {row["model type"]: " ".join(row[name] for name in shown if row.get(name)) for row in read_rows(table)}
    return {name: rows[name] for name in types}


def test_a_sample() -> None:
    assert verdicts(SAMPLE) == listed(SAMPLE)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"lm_head": "colwise_gather_output"}, "nothing is sharded"),
        ({"model.layers.*.self_attn.o_proj": "rowwise_split_input"}, ".experts.gate_up_proj is not sharded"),
    ],
)
def test_what_is_not_sharded_does_not_pass(
    architectures: Any, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str], why: str
) -> None:
    """It would be equal to itself."""
    monkeypatch.setattr(architectures, "own_plan", lambda model: plan)
    result = architectures.attempt("mixtral")
    assert (result.verdict, result.why.removeprefix("model.layers.0.mlp")) == ("failed", why)


@pytest.mark.parametrize(
    ("model_type", "option"), [(x, "use_qk_norm") for x in ("glm4_moe", "cohere")] + [("phi", "qk_layernorm")]
)
def test_norms_of_queries_and_keys(
    architectures: Any, monkeypatch: pytest.MonkeyPatch, model_type: str, option: str
) -> None:
    narrow = architectures.narrow_model
    monkeypatch.setattr(
        architectures, "narrow_model", lambda name, **changes: narrow(name, **changes, **{option: True})
    )
    result = architectures.attempt(model_type)
    assert (result.verdict, result.sequence) == ("passed", "yes")


ROUTES = {
    "as the router says": None,
    "one rank's experts get all": [0, 1],
    "the other rank's experts get all": [2, 3],
    "each rank has an expert that gets all": [3, 0],
}


@pytest.mark.parametrize("over", ["tensor", "data"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_that_two_ranks_divide(architectures: Any, over: str, route: str, implementation: str) -> None:
    """Over data parallel ranks with different numbers of tokens, which weigh as much as the tokens are many."""
    model = architectures.narrow_model("gpt_oss", **architectures.ROUTERS)
    model.set_experts_implementation(implementation)

    def choose(module: Any, args: Any) -> Any:
        index = args[1].clone()
        index[:] = torch.tensor(ROUTES[route])
        return args[0], index, *args[2:]

    for name, module in model.named_modules():
        if name.endswith(".experts") and ROUTES[route]:
            module.register_forward_pre_hook(choose)
    halves = [copy.deepcopy(model) for _ in range(architectures.RANKS)]
    plan = architectures._plan(model)
    form = {"tensor": architectures.OVER_TENSOR, "data": architectures.OVER_DATA}[over]
    assert architectures.compare(model, halves, plan, form, (8, 5)) == ""


def test_experts_of_listed_types() -> None:
    sample = ["mixtral", "inkling_text", "zaya", "llama4_text"]
    assert verdicts(sample, "--experts") == listed(sample, "expert-parallel")


FAMILIES = [
    *("qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "phimoe", "granitemoe", "deepseek_v2", "deepseek_v32"),
    *("glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "jamba", "lfm2_moe", "dots1", "solar_open"),
]


def test_more_families_on_two_ranks(ranks: Ranks) -> None:
    """In two processes: logits, losses with those of routers, and gradients, over tensor and over data parallel ranks.
    The families of tests.support.models.EXPERTS are trained in tests/system/parity/test_experts.py."""
    assert set(FAMILIES) <= EXPERT_PARALLEL
    found = ranks.run(differences, FAMILIES, nproc=2, timeout=600).check()
    assert found == [dict.fromkeys(FAMILIES, "")] * 2


@pytest.mark.prove
def test_experts_of_all_that_are_listed(record_property: Callable[[str, object], None]) -> None:
    assert verdicts(EXPERT_PARALLEL, "--experts") == listed(EXPERT_PARALLEL, "expert-parallel")
    record_property("architectures", len(EXPERT_PARALLEL))


@pytest.mark.prove
def test_all_that_are_listed(record_property: Callable[[str, object], None]) -> None:
    assert verdicts(TENSOR_PARALLEL) == listed(TENSOR_PARALLEL)
    record_property("architectures", len(TENSOR_PARALLEL))
