"""Parameters sharded by `fsdp` against one rank with the same global batch, and against ZeRO-1, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stepmark.parallel.full_sharding import DOUBLE, LOSS
from tests.support.full_sharding_programs import CASES
from tests.support.mesh_parity import MODELS, compare, trained
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.full_sharding_programs"
PROGRAM = f"{PROGRAMS}:trained"
FAMILIES = {**{name: MODELS[name] for name in ("gpt2", "llama", "qwen3-tied")}, "bert": {"kind": "bert"}}
MORE: list[dict[str, Any]] = [
    {},
    {"accumulation": 2, "clip": 0.1},
    {"fsdp": "shard_grad_op", "smoothing": 0.1},
    {"checkpointing": True, "unlabelled": [1, 3]},
]


def options(model: str, more: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"model": FAMILIES[model], "steps": 20, "batch": 8, "fsdp": True, **more, **others}


def test_replicas_and_uneven_tokens_train_like_one_rank(ranks: Ranks) -> None:
    """The share of each rank, and shards that several ranks hold, in gradients and their norm."""
    compare(ranks, "cpu", 4, [options("gpt2", {"clip": 0.1, "unlabelled": [1, 3]}, fsdp=2, steps=3)])


def test_a_loop_of_ones_own_reads_means_over_the_ranks(ranks: Ranks) -> None:
    found = ranks.run("tests.support.full_sharding_programs:own_loop", nproc=2).check()
    assert max(found) < 1e-6, found


@pytest.mark.prove
@pytest.mark.parametrize("count", [2, 4])
def test_every_family_trains_like_one_rank(ranks: Ranks, count: int) -> None:
    compare(ranks, "cpu", count, [options(model, more) for model, more in product(FAMILIES, MORE)])


@pytest.mark.prove
def test_replicas_of_shards_train_like_one_rank(ranks: Ranks) -> None:
    compare(ranks, "cpu", 4, [options(model, more, fsdp=2) for model, more in product(FAMILIES, MORE[:2])])


def test_losses_are_those_of_zero_1_bit_for_bit(ranks: Ranks) -> None:
    """With fp32 and with bf16 parameters, whose masters are in fp32; norms are added up in another order."""
    cases = [{"clip": 0.0}, {"clip": 0.0, "bf16": True}, {"clip": 0.0, "autocast": True}]
    sharded = [options("gpt2", more, steps=5) for more in cases]
    zero = [{**{key: value for key, value in each.items() if key != "fsdp"}, "zero_1": True} for each in sharded]
    for found in trained(ranks, "cpu", 2, [*sharded, *zero]):
        for ours, theirs in zip(found[: len(cases)], found[len(cases) :], strict=True):
            assert [step[:2] for step in ours] == [step[:2] for step in theirs]
            assert [step[2] for step in ours] == pytest.approx([step[2] for step in theirs], rel=1e-6)


def test_gradients_are_sent_in_the_dtype_asked_for(ranks: Ranks) -> None:
    """As ZeRO-1 sends them up to rounding: a rank does not round what it keeps, and each keeps other elements."""
    sharded = options("gpt2", {"clip": 0.0}, steps=4)
    zero = {**{key: value for key, value in sharded.items() if key != "fsdp"}, "zero_1": True, "rounded": True}
    for exact, rounded, theirs in trained(ranks, "cpu", 2, [sharded, {**sharded, "rounded": True}, zero]):
        assert [step[0] for step in rounded] == pytest.approx([step[0] for step in theirs], rel=1e-4)
        assert [step[0] for step in rounded] != [step[0] for step in exact]


@pytest.mark.parametrize("names", [pytest.param(list(CASES), marks=pytest.mark.prove), list(CASES)[:5]])
def test_what_scripts_do_gives_the_same_with_and_without_it(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    (alone,) = ranks.run(PROGRAM, str(tmp_path / "one"), names, {}).check()
    found = ranks.run(PROGRAM, str(tmp_path / "two"), names, {"fsdp": True}, nproc=2, timeout=600).check()
    for name in names:
        for rank in found:
            assert rank[name] == pytest.approx(alone[name], rel=2e-5), name


def test_ranks_with_gradients_of_different_parameters_are_told(ranks: Ranks) -> None:
    found = ranks.run("tests.support.full_sharding_programs:different_parameters", nproc=2).check()
    assert all(re.match("fsdp: rank 0 has a gradient of .* where rank 1 has a gradient of ", each) for each in found), (
        found
    )


@pytest.mark.parametrize("when", ["training", "evaluating"])
def test_ranks_that_use_other_layers_are_told_whatever_they_used_before(
    ranks: Ranks, tmp_path: Path, when: str
) -> None:
    given = [str(tmp_path), *("apart" if each == when else "alike" for each in ("training", "evaluating"))]
    found = ranks.run(f"{PROGRAMS}:heads_apart", *given, nproc=2).check()
    pattern = r"fsdp: rank 0 gathers the parameters of heads\.(\d) where rank 1 gathers the parameters of heads\.(\d); "
    matches = [re.match(pattern, each) for each in found]
    assert all(each is not None and each[1] != each[2] for each in matches), found


def test_a_loop_without_our_steps_keeps_no_more_calls_however_long_it_is(ranks: Ranks) -> None:
    (kept, digest), other = ranks.run(f"{PROGRAMS}:calls_kept", nproc=2).check()
    assert kept == 8
    assert any(digest)
    assert [kept, digest] == [*other]


def test_a_rank_that_waits_is_said_to_gather_a_layer(ranks: Ranks) -> None:
    found = ranks.run(f"{PROGRAMS}:announced", nproc=2).check()
    assert found == ["gathers the parameters of transformer.h.1"] * 2


def test_a_loss_that_begins_to_use_complete_parameters_counts_or_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Whichever parameters the optimizer has."""
    (alone,) = ranks.run(f"{PROGRAMS}:late_losses", str(tmp_path / "one"), False).check()
    for rank in ranks.run(f"{PROGRAMS}:late_losses", str(tmp_path / "two"), True, nproc=2).check():
        for one, two in zip(alone, rank, strict=True):
            assert two == LOSS or two == pytest.approx(one, rel=2e-5)


def test_a_model_that_is_sharded_already_trains_like_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.run(f"{PROGRAMS}:given_sharded", str(tmp_path / "one")).check()
    for rank in ranks.run(f"{PROGRAMS}:given_sharded", str(tmp_path / "two"), nproc=2).check():
        assert rank == pytest.approx(alone, rel=2e-5)


def test_a_model_is_made_again_for_a_second_training(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.run(f"{PROGRAMS}:made_twice", str(tmp_path / "one"), False).check()
    for first, second in ranks.run(f"{PROGRAMS}:made_twice", str(tmp_path / "two"), True, nproc=2).check():
        assert first == second == pytest.approx(alone[0], rel=2e-5)


def test_a_gradient_of_a_gradient_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(f"{PROGRAMS}:twice_differentiated", str(tmp_path), nproc=2).check()
    assert found == [DOUBLE] * 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hook", "has a hook of its gradient"),
        ("write", "fsdp: head.weight was replaced, or written to"),
        ("write data", "fsdp: head.weight was replaced, or written to"),
        ("replace", "fsdp: head.weight was replaced, or written to"),
        ("replace between steps", "fsdp: head.weight was replaced, or written to"),
    ],
)
def test_what_would_have_no_effect_on_shards_is_refused(ranks: Ranks, what: str, words: str) -> None:
    found = ranks.run("tests.support.full_sharding_programs:refused_later", what, nproc=2).check()
    assert all(words in each for each in found), found


def test_losses_of_parameters_are_refused_since_each_rank_has_a_shard(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("tests.support.full_sharding_programs:losses_of_parameters", str(tmp_path), nproc=2).check()
    assert found == [[LOSS] * 2] * 2


def test_what_cannot_be_sharded_is_refused_before_anything_changes(ranks: Ranks) -> None:
    found = ranks.run("tests.support.full_sharding_programs:refused", nproc=2).check()
    assert json.dumps(found[0]) == json.dumps(found[1])
    starts = [
        "fsdp: shift has no dim",
        "fsdp: head.bias is",
        "fsdp: layerdrop skips",
        "fsdp: transformer.wte.weight has a hook",
        "fsdp: transformer.wte.weight has a hook",
        "fsdp: number is torch.int64, which cannot be sharded; make it a buffer",
        "fsdp: table has sparse gradients",
        "fsdp: none has no elements to shard",
        "fsdp and tensor_parallel_size",
    ]
    for begin, message in zip([*starts, "fsdp_config: dp_replicate_size: 3"], found[0], strict=True):
        assert message.startswith(begin), message


def test_a_run_goes_on_on_other_ranks_and_with_other_shards(ranks: Ranks, tmp_path: Path) -> None:
    """From its second checkpoint: losses are the same bit for bit where the number of ranks is."""
    whole, zero, plain, kept, fewer = (str(tmp_path / name) for name in ("whole", "zero", "plain", "kept", "fewer"))
    sharded = {"fsdp": True}

    def run(count: int, *jobs: tuple[str, int, dict[str, Any]]) -> list[list[float]]:
        return ranks.run("tests.support.full_sharding_programs:checkpointed", jobs, nproc=count, timeout=300).check()[0]

    (losses,) = run(2, (whole, 4, sharded))
    for folder in (zero, plain, kept, fewer):
        for name in ("checkpoint-2", "metrics.jsonl"):
            copy = shutil.copytree if name.startswith("checkpoint") else shutil.copy
            Path(folder).mkdir(exist_ok=True)
            copy(f"{whole}/{name}", f"{folder}/{name}")
    jobs = [(folder, 4, more) for folder, more in ((zero, {"zero_1": True}), (plain, {}), (kept, sharded))]
    assert run(2, *jobs) == [losses] * 3
    run(1, (fewer, 3, {**sharded, "data_parallel_replicas": 1}))
    (last,) = run(2, (fewer, 4, sharded))
    assert last == pytest.approx(losses, rel=1e-4)
    assert last != losses
