"""What callbacks change besides tensors: a resumed run has it, or was told that no checkpoint does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from stepmark import Mesh, Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.training.optimizer import build_optimizer
from tests.support.models import with_lora
from tests.support.programs import VOCABULARY, Blocks, StopsAt, checksum, tiny_model
from tests.support.ranks import Ranks

STEPS, CHANGED, SAVED, STOPPED = 7, 2, 3, 4
Change = Callable[[Trainer], None]


class Changes(TrainerCallback):
    """Calls a function once, at an event of a step."""

    def __init__(self, change: Change, step: int = CHANGED, event: str = "on_step_end") -> None:
        self.trainer: Any = None
        setattr(
            self, event, lambda args, state, control, **_: change(self.trainer) if state.global_step == step else None
        )


def freeze(trainer: Trainer) -> None:
    for name, parameter in trainer.model.named_parameters():
        if ".mlp." in name:
            parameter.requires_grad_(False)


def set_decay(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group.update(weight_decay=0.3, betas=(0.5, 0.6))


def set_base_rates(trainer: Trainer) -> None:
    schedule: Any = trainer.lr_scheduler
    schedule.base_lrs = [3 * rate for rate in schedule.base_lrs]


class Curriculum(list[Any]):
    """Samples of which a callback sets how far they are shifted."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.shift, self.order = 0, [0]

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return {**sample, "labels": sample["labels"][self.shift :] + sample["labels"][: self.shift]}


def set_shift(trainer: Trainer) -> None:
    trainer.train_dataset.shift = 3  # type: ignore[union-attr]


def set_rates(trainer: Trainer) -> None:
    """For a step alone, since the schedule sets others after it."""
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.1


def set_intervals(trainer: Trainer) -> None:
    trainer.state.logging_steps = trainer.state.save_steps = 2


def free(trainer: Trainer) -> None:
    trainer.model.requires_grad_(True)
    for group in trainer.optimizer.param_groups:
        group.update(weight_decay=0.0)


def set_max_steps(trainer: Trainer) -> None:
    trainer.state.max_steps = STEPS - 1


class Thaws(Changes):
    """What was frozen when training began is trained from a step on, and other hyperparameters count."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        for change in (freeze, set_decay, set_base_rates):
            change(self.trainer)


CHANGES: dict[str, Change] = {
    "freeze": freeze,
    "decay": set_decay,
    "rates": set_base_rates,
    "base rates at the save": set_base_rates,
    "rates at the save": set_rates,
    "intervals": set_intervals,
    "free": free,
    "dataset": set_shift,
    "max steps": set_max_steps,
}


def make(folder: str, stop: int | None, change: Changes, **options: Any) -> Trainer:
    sample = [index % VOCABULARY for index in range(8)]
    given = {"learning_rate": 0.01, "save_steps": SAVED, "logging_steps": 1, "disable_tqdm": True, **options}
    arguments = TrainingArguments(folder, device="cpu", max_steps=STEPS, per_device_train_batch_size=1, **given)
    model = tiny_model(layers=2)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Curriculum(
            {"input_ids": sample[index:] + sample[:index], "labels": sample} for index in range(8)
        ),
        callbacks=[change, StopsAt(stop)],
    )
    change.trainer = trainer
    return trainer


def train(folder: str, name: str, stop: int | None, options: dict[str, Any], resume: bool) -> list[Any]:
    kind, step = Thaws if name == "free" else Changes, SAVED if name.endswith("save") else CHANGED
    trainer = make(folder, stop, kind(CHANGES[name], step), **options)
    trainer.train(resume_from_checkpoint=resume)
    return [checksum(trainer), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][SAVED:]]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        pytest.param(1, {}, id="one rank"),
        pytest.param(2, {"zero_1": True}, id="zero_1"),
        pytest.param(2, {"fsdp": "full_shard"}, id="fsdp"),
        pytest.param(2, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}, id="pipeline"),
    ],
)
def test_what_a_callback_changes_is_so_in_a_resumed_run(
    ranks: Ranks, tmp_path: Path, name: str, nproc: int, options: dict[str, Any]
) -> None:
    def run(folder: str, stop: int | None, resume: bool, change: str = name) -> list[Any]:
        return ranks.run(train, str(tmp_path / folder), change, stop, options, resume, nproc=nproc).check()

    whole = run("whole", None, False)
    run("cut", STOPPED, False)
    assert run("cut", None, True) == whole


def test_arguments_of_the_resumed_run_count_where_no_callback_has_changed_them(tmp_path: Path) -> None:
    """Of the optimizer, as before."""
    make(str(tmp_path / "run"), STOPPED, Changes(set_base_rates), weight_decay=0.1).train()
    resumed = make(str(tmp_path / "run"), None, Changes(set_base_rates), weight_decay=0.2)
    resumed.train(resume_from_checkpoint=True)
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} <= {0.2, 0.0}


def test_a_rollback_undoes_what_was_changed_after_its_checkpoint() -> None:
    """As a resumed process does, also where nothing had been changed before it; a tensor stays the same one."""
    named = build_optimizer("adamw_torch", list(tiny_model().named_parameters()), Mesh.create(device="cpu").runtime)
    group = named.param_groups[0]
    group["eps"] = live = torch.tensor(group["eps"], dtype=torch.float64)
    before, decay = named.changed_groups(), group["weight_decay"]
    live.fill_(0.25)
    group.update(weight_decay=0.3, mine=1)
    changed = named.changed_groups()
    assert {"weight_decay", "mine", "eps"} <= changed[0].keys()
    named.load_changed_groups(before)
    assert (group["weight_decay"], group["eps"]) == (decay, live)
    named.load_changed_groups(changed)
    assert group["eps"] is live
    assert (group["weight_decay"], float(live)) == (0.3, 0.25)


def left_gradient(trainer: Trainer) -> None:
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)


def write(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(0.9)


def set_dropout(trainer: Trainer) -> None:
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def count(trainer: Trainer) -> None:
    block: Any = trainer.model.transformer.h[0]
    block.seen += 1


def append(trainer: Trainer) -> None:
    trainer.model.transformer.h[0].history.append(1)


def move(trainer: Trainer) -> None:
    block = trainer.model.transformer.h[0]
    block.moved = block.moved * 0.5


def replace(trainer: Trainer) -> None:
    trainer.model.transformer.ln_f.weight = nn.Parameter(torch.ones(32))


def register(trainer: Trainer) -> None:
    trainer.model.register_buffer("late", torch.ones(2))


def untie(trainer: Trainer) -> None:
    trainer.model.lm_head.weight = nn.Parameter(trainer.model.lm_head.weight.detach().clone())


def average(trainer: Trainer) -> None:
    """As a callback that keeps an average of the model."""
    (callback,) = (each for each in trainer._callbacks.handler.callbacks if isinstance(each, Changes))
    callback.average = torch.optim.swa_utils.AveragedModel(trainer.model)


class Average:
    """An average of one's own."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}


def average_in_object(trainer: Trainer) -> None:
    (callback,) = (each for each in trainer._callbacks.handler.callbacks if isinstance(each, Changes))
    callback.own = Average(trainer.model)


def reorder(trainer: Trainer) -> None:
    trainer.train_dataset.order = [1]  # type: ignore[union-attr]


def hook_module(trainer: Trainer) -> None:
    trainer.model.transformer.h[0].register_forward_hook(lambda module, args, output: None)


def hook_parameter(trainer: Trainer) -> None:
    trainer.model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * 0.5)


def hook_optimizer(trainer: Trainer) -> None:
    trainer.optimizer.register_step_pre_hook(lambda *given: None)


def unhook(trainer: Trainer) -> None:
    trainer.model.transformer.drop._forward_hooks.clear()


def stop(trainer: Trainer) -> None:
    trainer.control.should_training_stop = True


class Known(nn.Module):
    """Whose number is in its extra state."""

    number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def increase(trainer: Trainer) -> None:
    trainer.model.known.number += 1


@pytest.mark.parametrize(
    ("change", "step", "event", "told"),
    [
        (append, CHANGED, "on_step_end", "transformer.h.0.history: changed by training, and in no checkpoint"),
        (move, CHANGED, "on_step_end", "transformer.h.0.moved: changed by training, and in no checkpoint"),
        (increase, CHANGED, "on_step_end", None),
        (replace, CHANGED, "on_step_end", "transformer.ln_f.weight: added, removed, replaced or reshaped in training"),
        (register, CHANGED, "on_step_end", "^late: added, removed, replaced or reshaped in training"),
        (untie, CHANGED, "on_step_end", "^lm_head.weight: added, removed, replaced or reshaped in training"),
        (average, CHANGED, "on_step_end", "Changes.average: changed by training, and in no checkpoint; a persistent"),
        (average_in_object, CHANGED, "on_step_end", "Changes.own: changed by training, and in no checkpoint"),
        (
            set_decay,
            SAVED,
            "on_save",
            "betas of the optimizer, .*: written to in on_save, after the checkpoint was made",
        ),
        (freeze, SAVED, "on_save", r"\.requires_grad.*: written to in on_save, after the checkpoint was made"),
        (set_intervals, SAVED, "on_save", "state.*steps: written to in on_save, after the checkpoint was made"),
        (left_gradient, SAVED, "on_step_end", "a gradient is there between steps"),
        (left_gradient, SAVED, "on_save", "a gradient is there between steps"),
        (write, SAVED, "on_save", "written to in on_save, after the checkpoint was made"),
        (set_dropout, CHANGED, "on_step_end", "transformer.drop.p, .*changed by training, and in no checkpoint"),
        (count, CHANGED, "on_step_end", "transformer.h.0.seen: changed by training, and in no checkpoint"),
        (write, CHANGED, "on_step_end", None),
        (write, 0, "on_train_begin", None),
        (freeze, CHANGED, "on_step_end", None),
        (stop, SAVED, "on_save", "control.should_training_stop: written to in on_save, after the checkpoint was made"),
        (set_shift, CHANGED, "on_step_end", None),
        (reorder, CHANGED, "on_step_end", "train_dataset.order: changed by training, and in no checkpoint"),
        (hook_module, CHANGED, "on_step_end", "hooks of transformer.h.0: changed by training, and in no checkpoint"),
        (
            hook_parameter,
            CHANGED,
            "on_step_end",
            "hooks of transformer.ln_f.weight: changed by training, and in no checkpoint",
        ),
        (hook_optimizer, CHANGED, "on_step_end", "hooks of optimizer: changed by training, and in no checkpoint"),
        (hook_module, 0, "on_train_begin", None),
        (hook_module, 0, "on_step_begin", None),
        (unhook, CHANGED, "on_step_end", "hooks of transformer.drop: changed by training, and in no checkpoint"),
    ],
)
def test_what_no_checkpoint_has_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Change, step: int, event: str, told: str | None
) -> None:
    trainer = make(str(tmp_path), None, Changes(change, step, event))
    block: Any = trainer.model.transformer.h[0]
    block.register_buffer("seen", torch.zeros(1), persistent=False)
    block.history, block.moved = [], torch.ones(2)
    trainer.model.transformer.drop.register_forward_hook(lambda module, args, output: None)
    trainer.model.known = Known()
    trainer.model.known.number = 1
    with caplog.at_level(logging.WARNING, logger="stepmark"):
        trainer.train()
    found = [each for each in caplog.messages if "A resumed run may train differently" in each]
    assert len(found) == (told is not None)
    assert told is None or re.search(told, found[0])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning")
@pytest.mark.parametrize(("part", "told"), [("lora_B", 0), ("ln_f.bias", 1)])
def test_what_is_written_to_the_base_of_an_adapter_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, told: int
) -> None:
    def scale(trainer: Trainer) -> None:
        with torch.no_grad():
            next(each for name, each in trainer.model.named_parameters() if part in name).mul_(1.5)

    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", max_steps=4, save_steps=1, disable_tqdm=True)
    model, change = with_lora(tiny_model(), {}), Changes(scale)
    change.trainer = Trainer(model, args, train_dataset=Blocks(8), callbacks=[change])
    change.trainer.train()
    lost = [each for each in caplog.messages if "changed by training, and in no checkpoint" in each]
    assert len(lost) == told
    assert all(f"transformer.{part}:" in each for each in lost)


def test_a_resumed_run_tells_what_it_writes_when_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(str(tmp_path), STOPPED, Changes(write, 0, "on_train_begin")).train()
    make(str(tmp_path), None, Changes(write, SAVED, "on_train_begin")).train(resume_from_checkpoint=True)
    told = [each for each in caplog.messages if "written to in on_train_begin, which a resumed run calls again" in each]
    assert len(told) == 1


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 0.1), ("learning_rate", 0.5), ("eval_steps", 2)])
def test_arguments_that_are_set_too_late_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    trainer = make(str(tmp_path), None, Changes(lambda trainer: setattr(trainer.args, name, value), CHANGED))
    begins = f"{name}: set in training, which goes on with {name}={getattr(trainer.args, name)}; set it earlier."
    trainer.train()
    assert sum(each.startswith(begins) for each in caplog.messages) == (name != "eval_steps")


def test_what_no_checkpoint_can_have_of_a_schedule_is_named_before_training(tmp_path: Path) -> None:
    trainer = make(str(tmp_path), None, Changes(freeze))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule.other = object()
    trainer.optimizer, trainer.lr_scheduler = optimizer, schedule
    with pytest.raises(UsageError, match=r"lr_scheduler\['other'\] is a builtins.object, neither a tensor nor"):
        trainer.train()
    assert trainer.state.global_step == 0


class Again(TrainerCallback):
    """Changes more at each call of an event, of which a resumed run has some a second time."""

    def __init__(self, event: str) -> None:
        self.trainer: Any = None
        setattr(self, event, self.change)

    def change(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.train_dataset.shift += 1
        for group in self.trainer.optimizer.param_groups:
            group.update(weight_decay=group["weight_decay"] + 0.1, lr=group["lr"] * 0.5)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_what_a_resumed_run_calls_again_changes_nothing_again(tmp_path: Path, event: str, given: bool) -> None:
    def run(folder: str, stop: int | None, resume: bool) -> str:
        callback: Any = Again(event)
        trainer = make(str(tmp_path / folder), stop, callback)
        if given:
            trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)
        trainer.train(resume_from_checkpoint=resume)
        return checksum(trainer)

    whole = run("whole", None, False)
    run("cut", STOPPED, False)
    assert run("cut", None, True) == whole


class Later(TrainerCallback):
    """Sets, where an epoch begins, what the dataset's class has a value of, from a step on that no whole epoch has."""

    trainer: Any = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= SAVED:
            self.trainer.train_dataset.shift = 3


class Shifted(Curriculum):
    shift = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        del self.shift


def test_a_value_of_a_datasets_class_stays_where_a_resumed_run_begins_the_epoch_again(tmp_path: Path) -> None:
    def run(folder: str, stop: int | None, resume: bool) -> str:
        callback: Any = Later()
        trainer = make(str(tmp_path / folder), stop, callback)
        trainer.train_dataset = Shifted(trainer.train_dataset)
        trainer.train(resume_from_checkpoint=resume)
        return checksum(trainer)

    whole = run("whole", None, False)
    run("cut", STOPPED, False)
    assert run("cut", None, True) == whole


class Drops(Trainer):
    """Leaves the gradients of a step out, or doubles them, after the passes of a micro-batch."""

    how = ""

    def training_step(self, *given: Any, **options: Any) -> Any:
        loss = super().training_step(*given, **options)
        for parameter in self.model.parameters() if self.state.global_step == 1 else ():
            if self.how == "drop":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(2)
        return loss


def drop(folder: str, how: str, options: dict[str, Any]) -> list[Any]:
    sample = [index % VOCABULARY for index in range(8)]
    ranks = 2 // options.get("of", 2)
    arguments = TrainingArguments(
        folder,
        device="cpu",
        max_steps=3,
        per_device_train_batch_size=ranks,
        logging_steps=1,
        disable_tqdm=True,
        optim="sgd",
        max_grad_norm=0.0,
        **{key: value for key, value in options.items() if key != "of"},
    )
    model = tiny_model()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    trainer = Drops(model, arguments, train_dataset=[{"input_ids": sample, "labels": sample}] * 8)
    trainer.how = how
    try:
        trainer.train()
    except UsageError as error:
        return [str(error)]
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("how", ["drop", "double"])
def test_gradients_that_training_step_changes_count_or_are_refused(ranks: Ranks, tmp_path: Path, how: str) -> None:
    def run(name: str, nproc: int, **options: Any) -> list[list[Any]]:
        found: list[list[Any]] = ranks.run(drop, str(tmp_path / name), how, options, nproc=nproc).check()
        return found

    (one,) = run("one", 1, of=1)
    assert (one[1] == 0) == (how == "drop")
    assert how == "drop" or one[1] > 1.5 * one[0]
    (hosted,) = run("hosted", 1, data_parallel_replicas=2)
    shards = run("fsdp", 2, fsdp="full_shard")
    for found in (hosted, *shards):
        assert found == pytest.approx(one, rel=1e-4)
    for options in ({}, {"zero_1": True}):
        found = run(f"ranks {options}", 2, **options)
        assert [each[0].partition(",")[0] for each in found] == [
            "gradients were changed after the step's last backward pass"
        ] * 2


def test_a_schedule_that_follows_a_metric_needs_its_name(tmp_path: Path) -> None:
    """Where the run evaluates; elsewhere a callback may advance it."""
    trainer = make(str(tmp_path), None, Changes(freeze))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer.args.eval_strategy, trainer.eval_dataset = "steps", trainer.train_dataset
    with pytest.raises(UsageError, match="metric_for_best_model: ReduceLROnPlateau follows a metric of evaluations"):
        trainer.train()


def test_a_loss_function_that_is_set_in_training_counts_at_once(tmp_path: Path) -> None:
    def nothing(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs["logits"].sum() * 0.0

    change = Changes(lambda trainer: setattr(trainer, "compute_loss_func", nothing), CHANGED)
    trainer = make(str(tmp_path), None, change)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [each == 0.0 for each in losses] == [step > CHANGED for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_another_optimizer_or_schedule_is_refused_in_training(tmp_path: Path, name: str) -> None:
    """It would have no effect."""

    def replace(trainer: Trainer) -> None:
        setattr(trainer, name, getattr(trainer, name))
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        setattr(trainer, name, optimizer if name == "optimizer" else torch.optim.lr_scheduler.ConstantLR(optimizer))

    trainer = make(str(tmp_path), None, Changes(replace))
    with pytest.raises(UsageError, match=f"training has begun with another {name}"):
        trainer.train()
    replace(trainer)
