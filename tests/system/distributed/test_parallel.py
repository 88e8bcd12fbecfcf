"""A tensor parallel model: its logits, its dropout, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment

PROGRAMS = "tests.system.distributed.parallel_programs:"


@pytest.mark.parametrize("options", [{}, {"parallelize_embedding": False}, {"sequence_parallel": True}])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_are_complete_where_they_are_used(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    for found in ranks.run(PROGRAMS + "logits", {"kind": kind}, options, nproc=2).check():
        assert found["evaluation"] < 1e-5
        assert found["training"] < 1e-5
        assert found["loss"] < 1e-5
        assert found["parameters"] == 0
        assert found["has_logits"] == ("parallelize_embedding" in options)


def test_a_model_on_the_meta_device(ranks: Ranks) -> None:
    assert ranks.run(PROGRAMS + "shapes_on_meta", {"kind": "gpt2"}, nproc=2).check() == [True, True]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            {"kind": "llama", "num_key_value_heads": 4},
            {"plan": {"model.nothing": "colwise"}},
            "no module 'model.nothing'",
        ),
        ({"kind": "llama"}, {"plan": {"model.layers.*.mlp.up_proj": "moe_tp_experts"}}, "moe_tp_experts"),
        ({"kind": "llama"}, {"plan": {"model.layers.*.input_layernorm": "colwise"}}, "is not a linear layer"),
        (
            {"kind": "llama", "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
            {},
            "has 3 heads and 3 key/value heads, which 2 ranks cannot share",
        ),
        ({"kind": "gpt2", "n_inner": 5}, {}, "cannot be split into 2 equal shards"),
        (
            {"kind": "llama"},
            {"plan": {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}},
            "does not mention model.layers.0.mlp.gate_proj.weight",
        ),
        ({"kind": "llama"}, {"sequence_parallel": True, "length": 7}, "sequences of 7 tokens"),
    ],
)
def test_unsupported_requests_fail(ranks: Ranks, model: dict[str, Any], options: dict[str, Any], words: str) -> None:
    for message in ranks.run(PROGRAMS + "refusal", model, options, nproc=2).check():
        assert words in message
        assert "\n" not in message


def test_dropout_agrees_where_activations_do(ranks: Ranks) -> None:
    one, other = ranks.run(PROGRAMS + "dropped", {"kind": "gpt2", "dropout": 0.5}, {}, nproc=2).check()
    for place in one:
        assert (one[place] == other[place]) == (place != "probabilities"), place
    assert one["attention 0"] != one["attention 1"]


def test_dropout_differs_along_a_sharded_sequence(ranks: Ranks) -> None:
    options = {"sequence_parallel": True}
    one, other = ranks.run(PROGRAMS + "dropped", {"kind": "gpt2", "dropout": 0.5}, options, nproc=2).check()
    for place in one:
        assert (one[place] == other[place]) == (place == "embedding"), place


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_draws_the_same_numbers(ranks: Ranks, sequence: bool) -> None:
    arguments: list[Any] = [{"kind": "gpt2", "dropout": 0.5}, {"sequence_parallel": sequence}]
    for found in ranks.run(PROGRAMS + "dropped_checkpointed", *arguments, nproc=2).check():
        assert found["difference"] < 1e-6


@pytest.mark.xla
def test_the_graphs_of_all_ranks_are_one(ranks: Ranks) -> None:
    """Two layers, two regions each. Entering a region gathers, and its backward pass reduces and scatters; leaving it
    is the other way round. Beside that: the cut and the gather at the ends, the embedding's sum, the loss's maximum
    and sum. Dropout's seeds compile nothing."""
    model = {"kind": "gpt2", "dropout": 0.1}
    (found,) = ranks.run(PROGRAMS + "graph", 2, model, environment=replica_environment(2)).check()
    assert found[0] == found[1]
    assert {kind: found[0][kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")} == {
        "all-gather": 4 + 4 + 2,
        "reduce-scatter": 4 + 4 + 1,
        "all-reduce": 3,
    }
    assert len(set(found[0]["compilations"])) == 1
