"""transformers' own TrainingArguments, passed to the Trainer."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from stepmark import Trainer, TrainingArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import DataError, UsageError
from stepmark.trainer.callbacks import reporters
from stepmark.trainer.compat.transformers_arguments import converted
from stepmark.trainer.training_arguments import Seq2SeqTrainingArguments
from tests.support.programs import VOCABULARY, Blocks, tiny_model

# Where torch_xla is installed, transformers' arguments create its device.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_run_with_transformers_arguments_is_that_with_ours(tmp_path: Path) -> None:
    common = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "seed": 3}
    common |= {"logging_steps": 1, "save_strategy": "no", "optim": "sgd", "report_to": "none", "disable_tqdm": True}
    theirs = transformers.TrainingArguments(output_dir=str(tmp_path / "a"), use_cpu=True, do_train=True, **common)
    ours = TrainingArguments(output_dir=str(tmp_path / "b"), device="cpu", **common)
    losses = []
    for args in (theirs, ours):
        trainer = Trainer(tiny_model(), args, train_dataset=Blocks(8))
        trainer.train()
        losses.append([(log["loss"], log["learning_rate"]) for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_fields_that_cannot_be_converted_are_all_named(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, auto_find_batch_size=True, ddp_timeout=5)
    with pytest.raises(UsageError, match=r"auto_find_batch_size: .*ddp_timeout: "):
        converted(args)


def test_fields_of_a_recipe_keep_their_dtype_in_every_class_of_arguments(tmp_path: Path) -> None:
    fields = TrainingFields(output_dir=str(tmp_path), dtype="bfloat16")
    made = [converted(fields, kind) for kind in (None, Seq2SeqTrainingArguments)]
    assert [each.dtype for each in made] == ["bfloat16", "bfloat16"]


def test_enumerations_become_their_values(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), eval_strategy="epoch", save_strategy="epoch", use_cpu=True)
    made = converted(args)
    assert (made.eval_strategy, made.save_strategy, made.device_name) == ("epoch", "epoch", "cpu")
    assert all(type(value) is str for value in (made.eval_strategy, made.optim, made.lr_scheduler_type))


@dataclass
class SFTConfig(transformers.TrainingArguments):
    """As TRL declares it: fields beside those of transformers, which its own trainer reads."""

    learning_rate: float = 2e-5
    max_length: int | None = 1024
    packing: bool = False
    model_init_kwargs: dict | None = None


SFTConfig.__module__ = "trl.trainer.sft_config"


@dataclass
class NeuronArguments(transformers.TrainingArguments):
    tensor_parallel_size: int = 1
    kv_size_multiplier: int | None = None


NeuronArguments.__module__ = "optimum.neuron.trainers.training_args"


@dataclass
class OfAScript(SFTConfig):
    alpha: float = 1.0


@pytest.mark.parametrize("kind", [SFTConfig, OfAScript])
def test_what_only_the_trainer_of_another_library_reads_is_refused(tmp_path: Path, kind: type[SFTConfig]) -> None:
    with pytest.raises(UsageError, match=r"^max_length: only trl's .*; packing: only trl's"):
        Trainer(tiny_model(), kind(str(tmp_path), use_cpu=True, max_length=8, packing=True), train_dataset=Blocks(2))
    made = converted(kind(str(tmp_path), use_cpu=True))
    assert made.learning_rate == 2e-5


def test_what_another_library_and_stepmark_have_is_obeyed(tmp_path: Path) -> None:
    assert converted(NeuronArguments(str(tmp_path), use_cpu=True, tensor_parallel_size=2)).tensor_parallel_size == 2
    with pytest.raises(UsageError, match=r"^kv_size_multiplier: only optimum's"):
        converted(NeuronArguments(str(tmp_path), use_cpu=True, kv_size_multiplier=2))


def test_fields_of_a_script_are_for_the_script(tmp_path: Path) -> None:
    assert converted(OfAScript(str(tmp_path), use_cpu=True, alpha=2.0)).learning_rate == 2e-5


def test_the_hooks_of_a_script_read_the_fields_that_it_added(tmp_path: Path) -> None:
    @dataclass
    class Arguments(transformers.TrainingArguments):
        alpha: float = 0.5

    given = Arguments(str(tmp_path), use_cpu=True, alpha=0.7)
    given.beta = 3
    trainer = Trainer(tiny_model(), given)
    assert (trainer.args.alpha, trainer.args.beta) == (0.7, 3)
    assert trainer.args.device.type == "cpu"


SWAPPED: list[tuple[str, dict[str, object]]] = [
    ("data_collator", {"data_collator": Blocks(8)}),
    ("train_dataset", {"train_dataset": len}),
    ("train_dataset", {"train_dataset": "wikitext"}),
    ("eval_dataset", {"train_dataset": Blocks(8), "eval_dataset": "wikitext"}),
    ("eval_dataset", {"train_dataset": Blocks(8), "eval_dataset": tiny_model()}),
    ("callbacks", {"callbacks": transformers.EarlyStoppingCallback()}),
    ("callbacks", {"callbacks": ["early_stopping"]}),
    ("optimizers", {"optimizers": torch.optim.AdamW(tiny_model().parameters())}),
    ("optimizers", {"optimizers": "adamw"}),
]


@pytest.mark.parametrize(("name", "given"), SWAPPED)
def test_an_argument_that_stands_where_another_belongs_is_named(
    tmp_path: Path, name: str, given: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match=name):
        Trainer(tiny_model(), TrainingArguments(str(tmp_path), device="cpu"), **given)  # type: ignore[arg-type]


def test_a_reporter_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "tensorboard" in name else found(name))
    for named in ("tensorboard", ["wandb", "tensorboard"]):
        with pytest.raises(UsageError, match="report_to: (tensorboard|wandb)"):
            reporters(TrainingArguments(str(tmp_path), report_to=named))
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", pytest.fail)
    assert reporters(TrainingArguments(str(tmp_path), report_to="none")) == [], "wandb alone takes longer to import"


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, token: int) -> None:
    """Some devices read it as another token, without an error."""
    samples = [{"input_ids": [1, 2, token, 3], "labels": [1, 2, 3, 4]}] * 8
    args = TrainingArguments(str(tmp_path), device="cpu", max_steps=1, disable_tqdm=True)
    trainer = Trainer(tiny_model(), args, train_dataset=samples, eval_dataset=samples)  # type: ignore[arg-type]
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match=f"input_ids: {token} "):
            use()
    samples[:] = [{"input_ids": [1, 2, 3, 3], "labels": [1, -100, token, 4]}] * 8
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match=f"labels: {token} is outside .*; what is no target is -100"):
            use()
