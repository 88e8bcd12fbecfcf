"""Uploads of a run's model and checkpoints to the Hugging Face hub, as `push_to_hub` and `hub_*` say."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.errors import StepmarkError, UsageError
from stepmark.filesystem.error_advice import explained, first_line
from stepmark.filesystem.files import make_folder, replace_file
from stepmark.liveness.console import CONSOLE
from stepmark.liveness.failure_report import FAILURES
from stepmark.liveness.host_group import HostGroup
from stepmark.model_folder.consolidate import consolidate
from stepmark.model_folder.new_folder import WritingListener
from stepmark.model_folder.output_files import MAX_SHARD
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.output_folder import EARLIER, on_rank_0
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS, SYSTEM
from stepmark.trainer.run_folder.status import STATUS
from stepmark.trainer.training_arguments import TrainingArguments

logger = logging.getLogger("stepmark")

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
LAST_CHECKPOINT = "last-checkpoint"
CARD = "README.md"
# Files of a run that are not part of its model, and files that are being written.
NOT_MODEL = [
    *("checkpoint-*", "checkpoint-*/**", ".*", ".*/**", "best"),
    *(METRICS, EVENTS, STATUS, f"{SYSTEM}/**", f"{FAILURES}/**", f"{CONSOLE}/**", f"{EARLIER}*/**"),
]


class HubUploads(TrainerCallback):
    """A Trainer's uploads to its repository on the hub. Rank 0 has one, once `create` was called; the other ranks have
    none, and neither has a process that only extracts graphs: there `name` is None, and the calls do nothing. As a
    callback, of all ranks so that they wait for the same saves, it uploads each checkpoint that is complete on disk."""

    def __init__(self, host: HostGroup) -> None:
        self.name: str | None = None
        self._host = host
        self._api: Any = None
        self._uploads: list[Any] = []

    def create(self, args: TrainingArguments, token: str | None, private: bool | None) -> None:
        """Creates the repository of the arguments, or finds that it exists. Collective.

        Raises StepmarkError, on all ranks, where it cannot be created.
        """

        def create() -> None:
            if extracting_graphs():
                return
            from huggingface_hub import HfApi

            self._api = HfApi(token=token or args.hub_token)
            name = args.hub_model_id or Path(args.output_dir).name
            is_private = args.hub_private_repo if private is None else private
            with explained(partial(_of_hub, f"hub_model_id: {name} cannot be created or written to")):
                self.name = self._api.create_repo(name, private=is_private, exist_ok=True).repo_id

        on_rank_0(self._host, create, lambda error: StepmarkError(str(error)), StepmarkError)

    def push(self, args: TrainingArguments, message: str | None, blocking: bool, revision: str | None) -> Any:
        """Uploads the run's folder, when earlier uploads are complete; see `Trainer.push_to_hub`."""
        self.wait()
        folder, message = Path(args.output_dir), message or "End of training"
        upload = partial(self._upload, folder, message, NOT_MODEL, revision or args.hub_revision)
        return upload() if blocking else self._in_background(upload)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Uploads a copy of the checkpoint in the background, as `hub_strategy` and `hub_always_push` say."""
        step = state.global_step
        if self.name is None or (not args.hub_always_push and any(not each.done() for each in self._uploads)):
            return
        folder = checkpoint_path(Path(args.output_dir), step)
        staged = Path(args.output_dir) / f".hub-{step}"  # outlives the checkpoint; in hard links where it can
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged, copy_function=_link)
        model = staged.with_name(f"{staged.name}-model")
        complete = {"checkpoint": LAST_CHECKPOINT, "all_checkpoints": folder.name}.get(args.hub_strategy)
        message = f"Training in progress, step {step}"

        def upload() -> None:
            try:
                consolidate(staged, model, "safetensors", MAX_SHARD, WritingListener())
                self._upload(model, message, [], args.hub_revision)
                if complete is not None:
                    self._upload(staged, message, [], args.hub_revision, complete)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
                shutil.rmtree(model, ignore_errors=True)

        self._in_background(upload)

    def wait(self) -> None:
        """Waits for the uploads in the background. One that has failed is a warning: its checkpoint is on disk."""
        while self._uploads:
            try:
                self._uploads.pop(0).result()
            except StepmarkError as error:
                logger.warning("%s", error)

    def _upload(self, folder: Path, message: str, ignored: list[str], revision: str | None, into: str = "") -> Any:
        with explained(partial(_of_hub, f"push_to_hub: the upload to {self.name} has failed")):
            return self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                path_in_repo=into or None,
                commit_message=message,
                ignore_patterns=ignored,
                revision=revision,
            )

    def _in_background(self, work: Callable[[], Any]) -> Any:
        self._uploads.append(self._api.run_as_future(work))
        return self._uploads[-1]


def _of_hub(what: str, error: Exception) -> StepmarkError:
    """An error of the hub or the network, with its first line."""
    why = f"{what}: {first_line(error)}; check the token (`hf auth login`, or hub_token) and the network"
    return StepmarkError(why)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_hub(args: TrainingArguments, shards: int) -> None:
    """Raises UsageError for an unknown `hub_strategy`, or one that would upload checkpoints of shards."""
    if args.hub_strategy not in STRATEGIES:
        raise UsageError(f"hub_strategy: {args.hub_strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    if args.push_to_hub and shards > 1 and args.hub_strategy != "end":
        raise UsageError(
            f"hub_strategy: {args.hub_strategy} uploads checkpoints, which hold shards where several ranks hold the "
            "model together; set it to end"
        )


def write_model_card(trainer: Any, **details: Any) -> None:
    """Writes a model card to the run's folder, made by transformers of what the Trainer knows."""
    from transformers.modelcard import TrainingSummary
    from transformers.trainer_utils import SchedulerType

    folder, args = Path(trainer.args.output_dir), copy.copy(trainer.args)
    args.lr_scheduler_type = SchedulerType(args.lr_scheduler_type)
    if getattr(trainer.model, "config", None) is None:
        details = {"finetuned_from": "", **details}
    names = ("model", "state", "train_dataset", "eval_dataset")
    known = SimpleNamespace(args=args, **{name: getattr(trainer, name) for name in names})
    text = str(TrainingSummary.from_trainer(known, **details).to_model_card())
    make_folder(folder)
    replace_file(folder / CARD, text.encode())
