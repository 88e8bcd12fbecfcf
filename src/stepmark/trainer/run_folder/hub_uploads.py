"""Uploads of a run's model and checkpoints to the Hugging Face hub, as `push_to_hub` and `hub_*` say."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.errors import StepmarkError, UsageError
from stepmark.liveness.console import CONSOLE
from stepmark.liveness.failure_report import FAILURES
from stepmark.liveness.host_group import HostGroup
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
NOT_OF_MODEL = ["optimizer/**", "manifest.json", "state.json", "trainer_state.json"]  # in a checkpoint


class HubRepository:
    """A model repository of the hub, to which rank 0 uploads.

    Args:
        args: `hub_model_id` (default: the name of `output_dir`), `hub_token`, `hub_private_repo`, `hub_revision`.
    """

    def __init__(self, args: TrainingArguments, token: str | None = None, private: bool | None = None) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi(token=token or args.hub_token)
        self._revision = args.hub_revision
        self._uploads: list[Any] = []
        name = args.hub_model_id or Path(args.output_dir).name
        private = args.hub_private_repo if private is None else private
        with _explained(f"hub_model_id: {name} cannot be created or written to"):
            self.name = self._api.create_repo(name, private=private, exist_ok=True).repo_id

    def upload(
        self, folder: Path, message: str, ignored: list[str], into: str = "", revision: str | None = None
    ) -> Any:
        """Uploads a folder in one commit, and returns what huggingface_hub says of it."""
        with _explained(f"push_to_hub: the upload to {self.name} has failed"):
            return self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                path_in_repo=into or None,
                commit_message=message,
                ignore_patterns=ignored,
                revision=revision or self._revision,
            )

    def upload_in_background(self, staged: Path, message: str, uploads: list[tuple[str, list[str]]]) -> None:
        """Uploads `staged` once for each (folder in the repository, what is ignored), and removes it afterwards."""

        def run() -> None:
            try:
                for into, ignored in uploads:
                    self.upload(staged, message, ignored, into)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

        self.in_background(run)

    def in_background(self, work: Callable[[], Any]) -> Any:
        """Runs an upload in a thread, and returns its future."""
        self._uploads.append(self._api.run_as_future(work))
        return self._uploads[-1]

    @property
    def busy(self) -> bool:
        """Whether an upload in the background has not ended."""
        return any(not each.done() for each in self._uploads)

    def wait(self) -> None:
        """Waits for the uploads in the background. One that has failed is a warning: its checkpoint is on disk."""
        while self._uploads:
            try:
                self._uploads.pop(0).result()
            except StepmarkError as error:
                logger.warning("%s", error)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Inside the block, an error of the hub or the network is a StepmarkError, with its first line."""
    try:
        yield
    except StepmarkError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StepmarkError(
            f"{what}: {first}; check the token (`hf auth login`, or hub_token) and the network"
        ) from error


def _as_told(error: Exception) -> StepmarkError:
    if not isinstance(error, StepmarkError):
        raise error
    return error


class HubCallback(TrainerCallback):
    """Uploads each checkpoint of a run when it is complete on disk, on rank 0, in the background."""

    def __init__(self, repository: HubRepository | None) -> None:
        self._repository = repository  # None on other ranks, which have the callback too: all wait for the same saves

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        repository = self._repository
        if repository is None or (repository.busy and not args.hub_always_push):
            return
        folder = checkpoint_path(Path(args.output_dir), state.global_step)
        staged = _linked(folder, Path(args.output_dir) / f".hub-{state.global_step}")
        complete = {"checkpoint": LAST_CHECKPOINT, "all_checkpoints": folder.name}.get(args.hub_strategy)
        uploads: list[tuple[str, list[str]]] = [("", NOT_OF_MODEL)]
        uploads += [] if complete is None else [(complete, [])]
        repository.upload_in_background(staged, f"Training in progress, step {state.global_step}", uploads)


def _linked(folder: Path, copied: Path) -> Path:
    """A copy of a checkpoint, in hard links where the file system has them, that outlives the checkpoint."""
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied, copy_function=_link)
    return copied


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


def model_card(trainer: Any, model: nn.Module, **details: Any) -> str:
    """The text of a model card, made by transformers of what the Trainer knows."""
    from transformers.modelcard import TrainingSummary
    from transformers.trainer_utils import SchedulerType

    args = copy.copy(trainer.args)
    args.lr_scheduler_type = SchedulerType(args.lr_scheduler_type)
    if getattr(model, "config", None) is None:
        details = {"finetuned_from": "", **details}
    known = SimpleNamespace(
        model=model,
        args=args,
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
    )
    return str(TrainingSummary.from_trainer(known, **details).to_model_card())


class HubUploads:
    """The uploads of a Trainer: rank 0 has a repository, once `create` was called; the others have none."""

    def __init__(self, host: HostGroup) -> None:
        self.repository: HubRepository | None = None
        self._host = host

    def create(self, args: TrainingArguments, token: str | None, private: bool | None) -> None:
        """Creates the repository of the arguments, or finds that it exists. Collective.

        Raises StepmarkError, on all ranks, where it cannot be created.
        """

        def create() -> None:
            if not extracting_graphs():
                self.repository = HubRepository(args, token, private)

        on_rank_0(self._host, create, _as_told)

    def exists(self) -> bool:
        """Whether rank 0 has a repository. Collective."""
        return bool(self._host.broadcast(self.repository is not None))

    def wait(self) -> None:
        """Waits for uploads in the background; one that has failed is a warning."""
        if self.repository is not None:
            self.repository.wait()

    def push(self, args: TrainingArguments, message: str | None, blocking: bool, revision: str | None) -> Any:
        """Uploads the run's folder, when earlier uploads are complete; see `Trainer.push_to_hub`."""
        repository = self.repository
        if repository is None:
            return None
        repository.wait()

        def upload() -> Any:
            told = message or "End of training"
            return repository.upload(Path(args.output_dir), told, NOT_MODEL, revision=revision)

        return upload() if blocking else repository.in_background(upload)
