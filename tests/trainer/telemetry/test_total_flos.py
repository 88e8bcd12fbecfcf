"""`total_flos`, as transformers counts them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.trainer.telemetry.throughput import TotalFlos
from tests.support.programs import Blocks, StopsAt, tiny_model


def trained(folder: Path, *stops: int, resume: bool = False) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), device="cpu", max_steps=4, save_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(tiny_model(), args, train_dataset=Blocks(16), callbacks=[StopsAt(stop) for stop in stops])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_rows_that_only_keep_the_shape_do_not_count() -> None:
    """The ranks' shares of a step with an odd number of samples give the same number, that of the samples."""
    model = tiny_model()
    count = TotalFlos(model)
    tokens = torch.ones(2, 8, dtype=torch.long)

    def share(*rows: int) -> float:
        made = [MicroBatch({"input_ids": tokens, "labels": tokens}, each, 8) for each in rows]
        return count.of(StepBatch(made, 3, 1.0, {"samples": 0}))

    expected = 6 * model.num_parameters(exclude_embeddings=True) * 3 * 8
    assert [share(2), share(1), share(0), share(2, 1)] == [expected] * 4


def test_operations_are_counted_over_the_complete_run(tmp_path: Path) -> None:
    complete = trained(tmp_path / "a")
    tokens = 16 * len(Blocks(16)[0]["input_ids"])
    assert complete.state.total_flos == 6 * complete.model.num_parameters(exclude_embeddings=True) * tokens
    assert complete.state.log_history[-1]["total_flos"] == complete.state.total_flos
    results = json.loads((tmp_path / "a" / "train_results.json").read_text())
    assert results["total_flos"] == complete.state.total_flos
    trained(tmp_path / "b", 2)
    assert trained(tmp_path / "b", resume=True).state.total_flos == complete.state.total_flos
