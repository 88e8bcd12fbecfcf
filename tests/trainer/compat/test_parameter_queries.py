"""What scripts ask about parameters and their optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError


def test_answers_before_and_after_the_optimizer_is_made(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), device="cpu", learning_rate=0.25))
    assert trainer.get_num_trainable_parameters() == 4 * 3 + 3 + 3 * 2 + 2
    model[1].requires_grad_(False)
    assert trainer.get_num_trainable_parameters() == 4 * 3 + 3
    for ask in (trainer.get_learning_rates, trainer.get_optimizer_group):
        with pytest.raises(ValueError, match="there is none yet"):
            ask()
    trainer.create_optimizer()
    assert set(trainer.get_learning_rates()) == {0.25}
    assert sum(len(each) for each in trainer.get_optimizer_group()) == 2
    for asked in ("0.weight", model[0].weight):
        assert any(each is model[0].weight for each in trainer.get_optimizer_group(asked)["params"])
    with pytest.raises(UsageError, match="the optimizer has no parameter '1.weight'"):
        trainer.get_optimizer_group("1.weight")
