"""`total_flos`, as transformers counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.errors import UsageError
from stepmark.trainer.telemetry.throughput import TotalFlos
from tests.support.programs import Blocks, StopsAt, tiny_model
from tests.support.ranks import Ranks


def trained(folder: Path, *stops: int, resume: bool = False, **more: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), device="cpu", max_steps=4, save_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, disable_tqdm=True, **more,
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
        made = [MicroBatch({"input_ids": tokens, "labels": tokens}, each, 8, filled=each < 2) for each in rows]
        return count.per_token * count.tokens(StepBatch(made, 3, 1.0, {"samples": 0}))

    expected = 6 * model.num_parameters(exclude_embeddings=True) * 3 * 8
    assert [share(2), share(1), share(0), share(2, 1)] == [expected] * 4


def test_tokens_are_those_of_one_rank_however_many_a_process_hosts() -> None:
    short, long = (MicroBatch({"input_ids": torch.ones(2, length, dtype=torch.long)}, 2, length) for length in (8, 12))
    count = TotalFlos(tiny_model())
    alone = count.tokens(StepBatch([short], 4, 1.0, {"samples": 0}))
    assert count.tokens(StepBatch([short, long], 4, 1.0, {"samples": 0}), hosted=2) == alone == 4 * 8


def test_operations_are_counted_over_the_complete_run(tmp_path: Path) -> None:
    complete = trained(tmp_path / "a")
    tokens = 16 * len(Blocks(16)[0]["input_ids"])
    assert complete.state.total_flos == 6 * complete.model.num_parameters(exclude_embeddings=True) * tokens
    assert complete.state.log_history[-1]["total_flos"] == complete.state.total_flos
    results = json.loads((tmp_path / "a" / "train_results.json").read_text())
    assert results["total_flos"] == complete.state.total_flos
    trained(tmp_path / "b", 2)
    assert trained(tmp_path / "b", resume=True).state.total_flos == complete.state.total_flos


def test_input_tokens_are_counted_over_the_complete_run_and_logged_where_asked(tmp_path: Path) -> None:
    given = {"include_num_input_tokens_seen": True, "logging_steps": 2}
    width = len(Blocks(16)[0]["input_ids"])
    trained(tmp_path, 2, **given)
    resumed = trained(tmp_path, resume=True, **given)
    logged = [log["num_input_tokens_seen"] for log in resumed.state.log_history if "loss" in log]
    assert logged == [8 * width, 16 * width]
    assert resumed.state.num_input_tokens_seen == 16 * width
    assert resumed._train_batch_size == resumed.args.per_device_train_batch_size == 2
    silent = trained(tmp_path / "silent", logging_steps=2)
    assert not any("num_input_tokens_seen" in log for log in silent.state.log_history)
    assert TrainingArguments(include_num_input_tokens_seen=True).include_num_input_tokens_seen == "all"
    assert TrainingArguments(include_num_input_tokens_seen=False).include_num_input_tokens_seen == "no"
    with pytest.raises(UsageError, match="^include_num_input_tokens_seen: should be true or all, false or no"):
        TrainingArguments(include_num_input_tokens_seen="non_padding")


class Uneven(Blocks):
    """Each sample is longer than the one before."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[: 2 + index] for name, each in super().__getitem__(index).items()}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in samples], True, value)
        for name, value in (("input_ids", 0), ("labels", -100))
    }


def joined(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One row of all samples."""
    return {name: torch.cat([each[name] for each in samples])[None] for name in samples[0]}


def count_uneven(folder: str) -> list[float]:
    fields = {"include_num_input_tokens_seen": True, "train_sampling_strategy": "sequential", "device": "cpu"}
    fields |= {"num_train_epochs": 1, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(folder, **fields)
    trainer = Trainer(tiny_model(), args, train_dataset=Uneven(5), data_collator=padded)
    trainer.train()
    logged = [log.get("num_input_tokens_seen") for log in trainer.state.log_history if "loss" in log]
    return [*logged, trainer.state.num_input_tokens_seen, trainer.state.total_flos]


def test_tokens_are_those_of_all_ranks_where_asked_for(tmp_path: Path, ranks: Ranks) -> None:
    """Of samples with 2 to 6 tokens, rank 0 has the first two in the first step, and the last one in the second."""
    told = ranks.run(count_uneven, str(tmp_path / "two"), nproc=2).check()
    total = 22 * 6 * tiny_model().num_parameters(exclude_embeddings=True)
    assert told == [[16, 22, 22, total]] * 2
    assert count_uneven(str(tmp_path / "one")) == [6, 16, 22, 22, total]


def test_samples_that_share_a_row_count_once(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=4, device="cpu")
    trainer = Trainer(tiny_model(), args, train_dataset=Uneven(4), data_collator=joined)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 + 3 + 4 + 5


def test_the_samples_of_a_process_count_as_they_are(tmp_path: Path) -> None:
    """The last step of each epoch has three of four."""
    args = TrainingArguments(str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, device="cpu")
    found = Trainer(tiny_model(), args, train_dataset=Blocks(7)).train().metrics
    assert found["train_samples_per_second"] * found["train_runtime"] == pytest.approx(14)
    assert found["train_steps_per_second"] * found["train_runtime"] == pytest.approx(4)
