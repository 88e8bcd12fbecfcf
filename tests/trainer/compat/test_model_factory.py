"""`model_init` in place of a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.programs import Blocks, tiny_model


def made() -> nn.Module:
    return tiny_model(seed=None)


def of_a_trial(trial: Any) -> nn.Module:
    assert trial is None
    return made()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    fields = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, **options}
    return TrainingArguments(str(folder), device="cpu", **fields)


def losses(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("make", [made, of_a_trial])
def test_the_weights_are_those_that_transformers_would_make(tmp_path: Path, make: Any) -> None:
    transformers.set_seed(7)
    expected = made().state_dict()
    trainer = Trainer(args=arguments(tmp_path, seed=7), model_init=make, train_dataset=Blocks(8))
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_each_run_begins_with_the_first_weights(tmp_path: Path) -> None:
    trainer = Trainer(args=arguments(tmp_path), model_init=made, train_dataset=Blocks(8))
    model = trainer.model
    trainer.train()
    first = losses(trainer)
    trainer.train()
    assert losses(trainer) == first
    assert trainer.model is model


def test_random_numbers_go_on_as_if_no_model_had_been_made(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    transformers.set_seed(1)
    expected = draw()
    transformers.set_seed(1)
    Trainer(args=arguments(tmp_path), model_init=made, train_dataset=Blocks(8))
    assert draw() == expected


def test_bad_calls_are_named(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for options in ({}, {"model": made(), "model_init": made}):
        with pytest.raises(UsageError, match="^model, model_init: a Trainer needs one of them"):
            Trainer(args=args, **options)
    with pytest.raises(UsageError, match="^model_init: should return an nn.Module, and returned a int"):
        Trainer(args=args, model_init=lambda: 3)  # type: ignore[arg-type, return-value]
    Trainer(made(), args, optimizer_cls_and_kwargs=None)
