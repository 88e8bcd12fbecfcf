"""Custom datasets of varying lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks


def train_ragged(device: str, folder: str, lengths: list[int] | None, batch: int) -> dict[str, Any]:
    """Three epochs over sequences of 3 to 14 tokens."""
    import torch

    from stepmark import PadTo, Trainer, TrainingArguments
    from tests.support.programs import counters, logged, tiny_model

    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 67, (3 + index % 12,), generator=generator).tolist() for index in range(13)]
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    options: dict[str, Any] = {"num_train_epochs": 3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(
        output_dir=folder, device=device, per_device_train_batch_size=batch, learning_rate=1e-3, **options
    )
    collator = None if lengths == [] else PadTo(lengths)
    trainer = Trainer(tiny_model(0.0), args, data_collator=collator, train_dataset=samples, eval_dataset=samples)  # type: ignore[arg-type]
    trainer.train()
    return {**logged(Path(folder)), "counters": counters(trainer), "loss": trainer.evaluate()["eval_loss"]}


def test_padding_changes_no_loss(ranks: Ranks, tmp_path: Path) -> None:
    """Padded to the longest of the batch, to one length, or to a few: padding is in no loss."""
    free = ranks.run(train_ragged, "cpu", str(tmp_path / "free"), None, 4).check()[0]
    one = ranks.run(train_ragged, "cpu", str(tmp_path / "one"), [16], 4).check()[0]
    few = ranks.run(train_ragged, "cpu", str(tmp_path / "few"), [8, 16], 2, nproc=2).check()[0]
    assert len(free["losses"]) == 12  # 13 samples are 4 steps of 4, three times
    for found in (one, few):
        for step, (loss, norm) in free["losses"].items():
            assert found["losses"][step] == pytest.approx([loss, norm], rel=1e-5)
        assert found["loss"] == pytest.approx(free["loss"], rel=1e-6)


@pytest.mark.xla
def test_a_lazy_device_compiles_once_for_each_stated_length(ranks: Ranks, tmp_path: Path) -> None:
    eager = ranks.run(train_ragged, "cpu", str(tmp_path / "cpu"), [8, 16], 4).check()[0]
    lazy = ranks.run(train_ragged, "xla", str(tmp_path / "xla"), [8, 16], 4).check()[0]
    for step, (loss, norm) in eager["losses"].items():
        assert lazy["losses"][step] == pytest.approx([loss, norm], rel=1e-4)
    assert lazy["counters"][0] <= 2


@pytest.mark.xla
def test_a_lazy_device_refuses_varying_shapes(ranks: Ranks, tmp_path: Path) -> None:
    outcome = ranks.run(train_ragged, "xla", str(tmp_path), [], 4)
    assert outcome.codes == [1]
    assert "input_ids of shape" in outcome.logs[0]
    assert "data_collator=PadTo(128)" in outcome.logs[0]
