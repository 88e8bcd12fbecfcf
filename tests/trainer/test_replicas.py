"""Fewer processes than data parallel ranks: what the run says and keeps, and what is refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import TrainerCallback

from stepmark import Mesh, Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.logical_rank_programs import PRECISIONS, Normalized, Samples, make_model
from tests.support.programs import VOCABULARY
from tests.support.ranks import Ranks

PROGRAM = "tests.support.logical_rank_programs:train"
CELL = {
    "model": "gpt2",
    "sharding": "plain",
    "precision": "fp32",
    "optimizer": "adamw",
    "data": "shuffled",
    "accumulation": 1,
    "replicas": None,
}
assert CELL["precision"] in PRECISIONS


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given = {"max_steps": 2, "per_device_train_batch_size": 2, "data_parallel_replicas": 2, "save_strategy": "no"}
    return TrainingArguments(**{"output_dir": str(folder), "device": "cpu", "disable_tqdm": True, **given, **options})


def train(
    folder: Path, kind: Callable[..., Trainer] = Trainer, model: nn.Module | None = None, **options: Any
) -> Trainer:
    trainer = kind(model or make_model("gpt2"), arguments(folder, **options), train_dataset=Samples(16))
    trainer.train()
    return trainer


@pytest.mark.parametrize("sharding", ["plain", "fsdp"])
def test_a_run_that_goes_on_with_fewer_processes_keeps_its_batches_and_bits(
    ranks: Ranks, tmp_path: Path, sharding: str
) -> None:
    """Without data_parallel_replicas."""
    cell = {**CELL, "sharding": sharding}
    expected = ranks.run(PROGRAM, str(tmp_path / "whole"), cell, nproc=3).check()[0]
    ranks.run(PROGRAM, str(tmp_path / "fewer"), cell, 3, nproc=3).check()
    outcome = ranks.run(PROGRAM, str(tmp_path / "fewer"), cell, 7, nproc=2)
    outcome.check()
    assert "replicas 3 on 2 processes, up to 2 one after another; the same bits as on 3" in outcome.logs[0]
    (found,) = ranks.run(PROGRAM, str(tmp_path / "fewer"), cell, nproc=1).check()
    assert found == expected


@pytest.mark.parametrize("sharding", ["plain", "fsdp"])
def test_a_sum_of_two_has_the_bits_of_one_process(ranks: Ranks, tmp_path: Path, sharding: str) -> None:
    """Which the backend adds, in whatever order."""
    cell = {**CELL, "sharding": sharding, "replicas": 2}
    expected = ranks.run(PROGRAM, str(tmp_path / "two"), cell, nproc=2).check()[0]
    assert ranks.run(PROGRAM, str(tmp_path / "one"), cell, nproc=1).check() == [expected]


def test_more_processes_are_as_many_ranks_and_the_larger_batch_is_said(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(PROGRAM, str(tmp_path), CELL, 3, nproc=1).check()
    outcome = ranks.run(PROGRAM, str(tmp_path), CELL, 5, nproc=2)
    outcome.check()
    assert "the global batch was 2 samples and is now 4" in outcome.logs[0]


def test_more_processes_than_asked_for_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    outcome = ranks.run(PROGRAM, str(tmp_path), {**CELL, "replicas": 1}, nproc=2)
    assert outcome.codes == [1, 1]
    assert "data_parallel_replicas: 1 cannot be divided over 2 data parallel processes" in outcome.logs[0]


def test_number_of_threads_stays_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with caplog.at_level(logging.WARNING, logger="stepmark"):
            train(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, resume_from_checkpoint="true")
        assert torch.get_num_threads() == 1
        assert "OMP_NUM_THREADS was 2 and is 1: losses differ by rounding from here on" in caplog.text
        torch.set_num_threads(2)
        monkeypatch.delenv("OMP_NUM_THREADS")
        train(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, resume_from_checkpoint="true")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


class Gathering(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, **options: Any) -> Any:
        outputs = model(**inputs)
        self.accelerator.gather(outputs.loss)
        return (outputs.loss, outputs) if options.get("return_outputs") else outputs.loss


class Sharding(Trainer):
    def get_train_dataloader(self) -> Any:
        data = self.train_dataset
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))


class Growing(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen = torch.cat([self.seen, self.seen])
        return super().forward(input_ids, labels)


class Halves(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.norm.weight.data = model.norm.weight.data * 0.5


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("data_parallel_replicas: the loss joins what ranks have computed, so each of the 2 data", {"kind": Gathering}),
        ("data_parallel_replicas: the sampler divides its samples among processes, so each", {"kind": Sharding}),
        ("model: the buffer seen gets another shape or dtype in the passes", {"model": Growing}),
        (
            "on_substep_end: parameters were changed, frozen or unfrozen, when",
            {"model": Normalized, "kind": partial(Trainer, callbacks=[Halves()]), "gradient_accumulation_steps": 2},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_a_process_for_each_rank_is_refused(tmp_path: Path, message: str, given: dict[str, Any]) -> None:
    model: Callable[[], nn.Module] | None = given.pop("model", None)
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        train(tmp_path, model=model() if model else None, **given)


@pytest.mark.parametrize(
    ("processes", "message", "given"),
    [
        (4, "fsdp and data_parallel_replicas: torch adds copies of the shards", (2,)),
        (1, "fsdp: the data parallel ranks use other layers or parameters", (1, True)),
    ],
)
def test_what_fsdp_cannot_host(
    ranks: Ranks, tmp_path: Path, processes: int, message: str, given: tuple[Any, ...]
) -> None:
    outcome = ranks.run(train_sharded, str(tmp_path), *given, nproc=processes)
    assert set(outcome.codes) == {1}
    assert message in outcome.logs[0]


class Descent(torch.optim.Optimizer):
    """Says nothing of what it needs to update an element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in (each for group in self.param_groups for each in group["params"]):
            each.data.sub_(each.grad, alpha=0.1)


@pytest.mark.parametrize("replicas", [2, None])
def test_one_process_of_several_takes_no_optimizer_that_shards_do_not_suit(tmp_path: Path, replicas: Any) -> None:
    """With fsdp it may become several processes. Where it stays one, any optimizer does."""
    model = make_model("gpt2")
    given = arguments(tmp_path, data_parallel_replicas=replicas, fsdp="full_shard")
    trainer = Trainer(model, given, train_dataset=Samples(16), optimizers=(Descent(model.parameters()), None))
    if replicas is None:
        trainer.train()
    else:
        with pytest.raises(UsageError, match="fsdp: it is unknown what Descent needs to update an element"):
            trainer.train()


class Skipping(Normalized):
    """Leaves its norm out for some samples."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        if int(input_ids.sum()) % 2:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())
        return {"loss": loss}


def train_sharded(folder: str, copies: int = 1, skips: bool = False) -> None:
    given: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"dp_replicate_size": copies}}
    train(Path(folder), model=Skipping() if skips else None, data_parallel_replicas=4, max_steps=4, **given)


@pytest.mark.xla
def test_lazy_devices_cannot_host(ranks: Ranks) -> None:
    outcome = ranks.run(make_lazy_mesh)
    assert outcome.codes == [1]
    assert "data_parallel_replicas: xla adds in an order of its own; leave it out" in outcome.logs[0]


def make_lazy_mesh() -> None:
    Mesh.create(device="xla", data_parallel_replicas=2)


def test_logical_ranks_see_their_own_samples(tmp_path: Path) -> None:
    seen: list[int] = []

    class Seeing(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            seen.append(int(inputs["input_ids"][0, 0]))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = train(tmp_path, Seeing, max_steps=2, gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    tokens = Samples(16).tokens[:, 0].tolist()
    assert seen == [tokens[index] for index in (0, 4, 2, 6, 8, 12, 10, 14)]  # a rank's micro-batches, then the other's
    assert trainer.args.world_size == 1
    assert max(tokens) < VOCABULARY


class Contrasting(Normalized):
    """Its loss has the samples of all ranks, by torch's own collectives."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        if self.training and dist.get_world_size() > 1:
            dist.all_reduce(found["logits"].detach().mean())
        return found


def contrast(folder: str, replicas: int | None, last: int) -> None:
    train(Path(folder), model=Contrasting(), data_parallel_replicas=replicas, max_steps=last, **SAVING)


SAVING = {"save_strategy": "steps", "save_steps": 1, "resume_from_checkpoint": "true"}


def test_a_loss_that_joins_ranks_is_never_hosted(ranks: Ranks, tmp_path: Path) -> None:
    """One process would leave the collective out without a word: the checkpoint says that each rank needs its own."""
    outcome = ranks.run(contrast, str(tmp_path / "given"), 3, 2, nproc=2)
    assert outcome.codes == [1, 1]
    assert "data_parallel_replicas: the model or its loss calls torch.distributed, so each of the 3" in outcome.logs[0]
    ranks.run(contrast, str(tmp_path / "fewer"), None, 2, nproc=3).check()
    outcome = ranks.run(contrast, str(tmp_path / "fewer"), None, 3, nproc=2)
    outcome.check()
    assert "the global batch was 6 samples and is now 4" in outcome.logs[0]
    assert "replicas" not in outcome.logs[0]


class Growing(Normalized):
    """Keeps a table for the longest sequence so far, as some rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("longest", torch.zeros(1), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.register_buffer("longest", torch.full((1 + dist.get_rank(),), 1.0 + dist.get_rank()), persistent=False)
        return super().forward(input_ids, labels)


def grow(folder: str) -> list[float]:
    trainer = train(Path(folder), model=Growing(), data_parallel_replicas=None, save_strategy="no")
    assert trainer.mesh.needs_processes is not None
    return list(trainer.model.longest.tolist())


def test_buffers_that_checkpoints_do_not_have_stay_each_ranks_own(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(grow, str(tmp_path), nproc=2).check() == [[1.0], [2.0, 2.0]]
