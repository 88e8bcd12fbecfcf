"""Labels that are a list of samples, each of its own shapes, as those of object detection are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepmark import Trainer, TrainingArguments
from tests.support.ranks import Ranks

SAMPLES = 7


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        boxes = torch.arange(4.0 * (1 + index % 4)).reshape(-1, 4) + index
        return {"pixels": torch.full((4,), float(index)), "labels": {"boxes": boxes, "image_id": index}}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pixels": torch.stack([row["pixels"] for row in rows]), "labels": [row["labels"] for row in rows]}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 4)

    def forward(self, pixels: Tensor, labels: list[dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        found = self.head(pixels)
        if labels is None:
            return {"found": found}
        losses = [(each["boxes"] - one).abs().mean() for one, each in zip(found, labels, strict=True)]
        return {"loss": torch.stack(losses).mean(), "found": found}


def detect(folder: str, compute_metrics: Any = None, **options: Any) -> tuple[Any, dict[str, float]]:
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=2, save_strategy="no", disable_tqdm=True,
        device="cpu", remove_unused_columns=False, **options,
    )  # fmt: skip
    data = Images()
    trainer = Trainer(
        Detector(), args, train_dataset=data, eval_dataset=data, data_collator=collate, compute_metrics=compute_metrics
    )
    trainer.train()
    return trainer.predict(data), trainer.evaluate()


def check(labels: list[Any]) -> None:
    """Every sample's label is there, whole, and in order."""
    assert len(labels) == SAMPLES
    for index, (label, sample) in enumerate(zip(labels, Images(), strict=False)):
        assert label["image_id"] == index
        assert np.array_equal(label["boxes"], sample["labels"]["boxes"].numpy())


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_labels_of_all_samples_are_whole(tmp_path: Path, batch: int) -> None:
    found, _ = detect(str(tmp_path), per_device_eval_batch_size=batch)
    check(found.label_ids)
    assert found.predictions.shape == (SAMPLES, 4)


def predicted(folder: str) -> float:
    found, metrics = detect(folder, per_device_eval_batch_size=2)
    check(found.label_ids)
    return metrics["eval_loss"]


def test_labels_of_several_ranks_are_in_order(tmp_path: Path, ranks: Ranks) -> None:
    losses = ranks.run("tests.trainer.test_sample_lists:predicted", str(tmp_path), nproc=2).check()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_can_be_kept_apart(tmp_path: Path, replicas: int) -> None:
    """Of two ranks, the last has no samples in the last step, and no item."""
    seen: list[Any] = []
    found, metrics = detect(
        str(tmp_path),
        lambda given: seen.append(given) or {"batches": len(given.predictions)},
        per_device_eval_batch_size=3,
        eval_do_concat_batches=False,
        data_parallel_replicas=replicas,
    )
    assert [len(each) for each in found.label_ids] == [len(each) for each in found.predictions] == [3, 3, 1]
    check([label for each in found.label_ids for label in each])
    assert metrics["eval_batches"] == 3
    assert [len(each) for each in seen[-1].label_ids] == [3, 3, 1]
