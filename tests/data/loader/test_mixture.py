"""Mixtures: every source gets its share, every sample comes once before any comes twice, on any number of ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepmark.config.data_arguments import DataArguments
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.mixture import JoinedSamples, Mixture, MixtureOrder, apportion, limited
from stepmark.data.prepared_data import Prepared, prepare
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import CheckpointMismatch, UsageError

TOKENIZER = byte_tokenizer()


def samples(first: int, count: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": torch.tensor([number]), "labels": torch.tensor([number])}
        for number in range(first, first + count)
    ]


PARTS = [samples(0, 7), samples(100, 23), samples(200, 11)]
WEIGHTS = (5, 1, 2.5)


def loader(weights: tuple[float, ...] = WEIGHTS, **options: Any) -> DataLoader:
    return DataLoader(Mixture(PARTS, weights), options.pop("batch_size", 2), seed=3, **options)


def drawn(steps: Any) -> list[int]:
    return [int(row) for step in steps for micro in step for row in micro.inputs["input_ids"][: micro.rows, 0]]


def epochs(count: int, **options: Any) -> list[int]:
    data = loader(**options)
    return [number for _ in range(count) for number in drawn(data)]


def test_every_stretch_has_the_shares() -> None:
    order = MixtureOrder.of((7_000, 23_000, 11_000), WEIGHTS)
    assert order.counts == (24118, 4823, 12059)
    sources = np.searchsorted([7_000, 30_000], order.indices(0, 0, True), side="right")
    for stretch in (16, 340, 4100):
        shares = np.bincount(sources[:stretch], minlength=3)
        assert np.abs(shares - stretch * np.array(WEIGHTS) / sum(WEIGHTS)).max() < 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_sample_is_drawn_again_before_all_of_its_source_were_drawn(shuffle: bool) -> None:
    numbers = epochs(24, shuffle=shuffle)
    assert len(numbers) == 24 * 41
    for part in PARTS:
        mine = [number for number in numbers if number in {int(row["input_ids"]) for row in part}]
        passes = [mine[start : start + len(part)] for start in range(0, len(mine), len(part))]
        assert all(len(set(each)) == len(each) for each in passes)
        assert len(passes) > 4
        assert (passes[0] != passes[1]) == shuffle


def test_epochs_have_the_same_shares_in_other_orders() -> None:
    first, second = epochs(2)[:41], epochs(2)[41:]
    assert [Counter(number // 100 for number in each) for each in (first, second)] == [
        Counter({0: 24, 1: 5, 2: 12})
    ] * 2
    assert [number // 100 for number in first] != [number // 100 for number in second]
    assert epochs(2) == [*first, *second]


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_number_of_ranks_takes_the_same_samples_in_each_step(shuffle: bool) -> None:
    def steps(world_size: int, batch_size: int) -> list[list[int]]:
        ranks = [
            list(loader(rank=rank, world_size=world_size, batch_size=batch_size, shuffle=shuffle))
            for rank in range(world_size)
        ]
        return [sorted(drawn(together)) for together in zip(*ranks, strict=True)]

    assert steps(1, 4) == steps(2, 2) == steps(4, 1)


def test_a_position_resumes_in_the_middle_of_any_epoch_on_another_number_of_ranks() -> None:
    whole = loader(batch_size=4)
    complete = [sorted(drawn([step])) for _ in range(3) for step in whole]
    part = loader(batch_size=4)
    begun = [*part, *itertools.islice(part, 4)]
    state = json.loads(json.dumps(part.state_dict()))
    ranks = [loader(rank=rank, world_size=2) for rank in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    rest = [sorted(drawn(together)) for _ in range(2) for together in zip(*[list(each) for each in ranks], strict=True)]
    assert [*(sorted(drawn([step])) for step in begun), *rest] == complete


def test_a_position_of_other_shares_or_of_no_mixture_is_refused() -> None:
    state = loader().state_dict()
    with pytest.raises(CheckpointMismatch, match="order was 'mixture-1-shuffled-"):
        loader((5, 1, 2)).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="order was"):
        DataLoader(JoinedSamples(PARTS), 2, seed=3).load_state_dict(state)
    loader((10, 2, 5)).load_state_dict(state)  # the same shares


def test_the_order_is_kept_for_runs_that_were_begun_before() -> None:
    assert MixtureOrder((3, 5), (6, 2)).indices(7, 1, True).tolist() == [0, 5, 1, 2, 1, 3, 0, 2]


def test_largest_remainders_add_up() -> None:
    assert apportion(10, (1, 1, 1)) == [4, 3, 3]
    assert apportion(7, (0.1, 0.2, 0.4)) == [1, 2, 4]
    assert [len(each) for each in (limited(PARTS, None), limited(PARTS, 8), limited(PARTS, 99))] == [41, 8, 41]
    assert limited(PARTS, 8).sizes == (1, 5, 2)
    assert [int(limited(PARTS, 8)[index]["input_ids"]) for index in (0, 1, 6, -1)] == [0, 100, 200, 201]


def test_a_weight_that_gives_no_sample_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"source 2: its weight, 0.001 of 1.001, gives it none of the 30 samples"):
        MixtureOrder.of((7, 23), (1, 0.001))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Prepared, list[str]]]:
    """Prepares a mixture of two files, with a cache of the test's own, and what was said."""
    (tmp_path / "a.txt").write_text("alpha beta gamma\n" * 40)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"body": f"row {number}"}) for number in range(60)))

    def prepared(*weights: float, **fields: Any) -> tuple[Prepared, list[str]]:
        mixture = [
            {"train_file": str(tmp_path / "a.txt"), "weight": weights[0]},
            {"train_file": str(tmp_path / "b.jsonl"), "text_column": "body", "weight": weights[1]},
        ]
        said: list[str] = []
        config = DataArguments(dataset_mixture=mixture, block_size=16, **fields)
        return prepare(config, TOKENIZER, folder=tmp_path / "cache", progress=said.append), said

    return prepared


def test_a_mixture_is_counted_and_said_and_each_source_cached_by_itself(
    tmp_path: Path, make: Callable[..., tuple[Prepared, list[str]]]
) -> None:
    data, said = make(3, 1)
    sizes = [len(part) for part in data.train.parts]
    assert said[-2:] == [
        f"mixture, source 1: 75.8% of the samples, 50 in an epoch of 66; 1.22 passes over its {sizes[0]}",
        f"mixture, source 2: 24.2% of the samples, 16 in an epoch of 66; 0.64 passes over its {sizes[1]}",
    ]
    assert any(line.startswith("source 2: train data: column 'body' of") for line in said)
    assert len(data.validation) == 3 + 2
    assert data.train.tokens == sum(part.tokens for part in data.train.parts)
    entries = sorted(path.name for path in (tmp_path / "cache/data").iterdir())
    again, said = make(1, 1, max_eval_samples=3)
    assert again.cached
    assert not data.cached
    assert len(again.validation) == 3
    assert sorted(path.name for path in (tmp_path / "cache/data").iterdir()) == entries
    assert again.fingerprint != data.fingerprint == make(6, 2)[0].fingerprint


def mixture(*sources: Any, **fields: Any) -> DataArguments:
    return DataArguments(dataset_mixture=list(sources), **fields)


A, B = {"train_file": "a.txt", "weight": 1}, {"train_file": "b.jsonl", "weight": 2}


@pytest.mark.parametrize(
    ("sources", "fields", "message"),
    [
        ((A,), {}, "dataset_mixture: has 1 sources; give two or more"),
        ((A, "b.txt"), {}, "dataset_mixture, source 2: should be fields such as"),
        ((A, {**B, "wieght": 1}), {}, "dataset_mixture, source 2: 'wieght' is not a field of a source; it has weight,"),
        ((A, {"train_file": "b.txt"}), {}, "dataset_mixture, source 2: has no weight; give it one"),
        ((A, {**B, "weight": 0}), {}, "dataset_mixture, source 2, weight: should be a number above 0, and is 0"),
        ((A, {**B, "weight": -1}), {}, "weight: should be a number above 0, and is -1"),
        ((A, {**B, "weight": float("nan")}), {}, "weight: should be a number above 0, and is nan"),
        ((A, {**B, "weight": float("inf")}), {}, "weight: should be a number above 0, and is inf"),
        ((A, {**B, "weight": "much"}), {}, "dataset_mixture, source 2, weight: should be a number, and is 'much'"),
        ((A, {**B, "weight": True}), {}, "weight: should be a number, and is True"),
        ((A, {"weight": 1}), {}, "dataset_mixture, source 2: there is no training data"),
        ((A, {**B, "dataset_name": "x"}), {}, "source 2: dataset_name and train_file are both given"),
        ((A, {**B, "train_file": 3}), {}, "dataset_mixture, source 2, train_file: should be text or a list"),
        ((A, {**A, "weight": 3}), {}, "dataset_mixture, source 2: is the same as source 1"),
        ((A, {**A, "text_column": "x"}), {}, "source 2: text_column is given, but the data has no columns"),
        ((B, {**B, "messages_column": "m"}), {}, "source 2: samples are texts or conversations"),
        ((A, B), {"train_file": "c.txt"}, "train_file and dataset_mixture: each source has its own"),
        ((A, B), {"max_train_samples": 5}, "max_train_samples and dataset_mixture: each source has its own"),
        ((A, B), {"block_size": 1}, "block_size: should be at least 2"),
    ],
)
def test_bad_mixtures_are_one_line_that_names_the_source(
    sources: tuple[Any, ...], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        mixture(*sources, **fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_sources_share_what_the_recipe_says_for_all() -> None:
    made = mixture(A, {**B, "validation_split_percentage": 9}, block_size=8, validation_split_percentage=2)
    assert [(source.block_size, source.validation_split_percentage) for source in made.sources] == [(8, 2), (8, 9)]
    assert made.weights == (1.0, 2.0)
    assert mixture(*made.dataset_mixture or ()) == mixture(A, {**B, "validation_split_percentage": 9})
