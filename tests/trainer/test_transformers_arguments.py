"""transformers' own TrainingArguments, passed to the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.trainer.transformers_arguments import converted
from tests.support.programs import Blocks, tiny_model

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
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, torch_compile=True, ddp_timeout=5)
    with pytest.raises(UsageError, match=r"torch_compile: .*ddp_timeout: "):
        converted(args)


def test_enumerations_become_their_values(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), eval_strategy="epoch", save_strategy="epoch", use_cpu=True)
    made = converted(args)
    assert (made.eval_strategy, made.save_strategy, made.device_name) == ("epoch", "epoch", "cpu")
    assert all(type(value) is str for value in (made.eval_strategy, made.optim, made.lr_scheduler_type))
