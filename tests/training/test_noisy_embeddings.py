"""NEFTune: noise on the input embeddings, in training alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.training.model_options import noisy_embeddings
from tests.support.programs import Blocks, tiny_model


def test_noise_has_the_stated_size_and_only_training_has_it() -> None:
    model = tiny_model().train()
    embeddings = model.get_input_embeddings()
    tokens = torch.arange(12).reshape(2, 6)
    plain = embeddings(tokens).detach()
    bound = 3.0 / (plain.shape[1] * plain.shape[2]) ** 0.5
    with noisy_embeddings(model, 3.0):
        noise = (embeddings(tokens).detach() - plain).abs()
        assert bound * 0.9 < float(noise.max()) <= bound * (1 + 1e-5)
        assert float(noise.mean()) == pytest.approx(bound / 2, rel=0.2)
        assert torch.equal(embeddings.eval()(tokens), plain)
    assert torch.equal(embeddings.train()(tokens), plain)


def test_a_run_with_noise_is_repeatable_and_evaluates_without(tmp_path: Path) -> None:
    losses = []
    for name, alpha in (("a", 5.0), ("b", 5.0), ("c", None)):
        args = TrainingArguments(
            output_dir=str(tmp_path / name), device="cpu", max_steps=2, logging_steps=1, save_strategy="no",
            neftune_noise_alpha=alpha, learning_rate=0.0, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(tiny_model(), args, train_dataset=Blocks(8), eval_dataset=Blocks(3))
        trainer.train()
        logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        losses.append((logged, trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]
    assert losses[0][1] == losses[2][1]


def test_a_model_without_embeddings_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="^neftune_noise_alpha: Linear has no method get_input_embeddings"),
        noisy_embeddings(nn.Linear(2, 2), 1.0),
    ):
        pass
    with pytest.raises(UsageError, match="^neftune_noise_alpha and tensor_parallel_size: "):
        TrainingArguments(neftune_noise_alpha=1.0, tensor_parallel_size=2)
