"""The engine as a training loop sees it: save, restore, wait."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, UsageError
from ..runtime.base import Runtime
from ..runtime.host import HostGroup
from ..runtime.select import runtime_for
from .board import Board
from .describe import describe
from .drafting import Answer, Draft, Planner, agree, check_disk, draft, values_to_bytes
from .handle import SaveHandle
from .loading import Loader
from .manifest import Manifest, read_manifest
from .names import check_writable, checkpoint_path, checkpoints, delete, discard, step_of, temporary_path
from .owner import Ownership, boot_id
from .retention import KeepLast, Retention, Saved, superfluous
from .saving import Saving, describe_error
from .snapshot import extents_of, plan_copies, take
from .staging import StagingMemory
from .values import decode_plain
from .whole import check_whole

logger = logging.getLogger("stepmark")

_FAREWELL = 10.0  # seconds that rank 0 gives the others to read a save's outcome
MAX_FILE_SIZE = 5_000_000_000  # bytes, as transformers cuts its files


class Checkpointer:
    """Saves and restores a training state in `folder`, as `checkpoint-<step>` folders that are whole or not there.

    All ranks of `group` (default: all of the run) call `save`, `restore`, `latest` and `close` together. A state is a
    dict of sections: modules, optimizers, objects with `state_dict` and `load_state_dict`, or nested dicts and lists of
    tensors and plain values. `keep_last` and `keep` say which checkpoints stay; without either, all do. `async_save`:
    `save` returns once the state is copied, and writing goes on behind. `save_timeout`, in seconds, is the deadline of
    every phase. `when_busy`: a save that comes while the last one is being written waits for it, or is skipped.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = None,
        keep: Sequence[Retention] = (),
        group: HostGroup | None = None,
        runtime: Runtime | None = None,
        async_save: bool = True,
        save_timeout: float = 1800.0,
        when_busy: Literal["wait", "skip"] = "wait",
        mesh: Mapping[str, int] | None = None,
        max_file_size: int = MAX_FILE_SIZE,
        threads: int = 2,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise UsageError(f"keep_last: {keep_last} is too few; the newest checkpoint always stays")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy: {when_busy!r} is unknown; choose 'wait' or 'skip'")
        self.folder = Path(folder).absolute()
        self._policies = [*([KeepLast(keep_last)] if keep_last is not None else []), *keep]
        self._group = group or HostGroup.of_processes()
        self._runtime = runtime
        self._async = async_save
        self._timeout = save_timeout
        self._when_busy = when_busy
        self._mesh = dict(mesh or {"dp": self._group.size})
        self._max_file_size = max_file_size
        self._threads = threads
        self._memory = StagingMemory()
        self._owner: Ownership | None = None
        self._planner: Planner | None = None
        self._count = 0
        self._flying: SaveHandle | None = None
        self._saved: dict[Path, Saved] = {}

    # saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        files: Callable[[Path], None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        model_only: bool = False,
        metrics: Mapping[str, float] | None = None,
        block: bool | None = None,
    ) -> SaveHandle | None:
        """Saves the state as `checkpoint-<step>`; returns once training may go on, or with `block` once it is durable.

        `files` adds files of its own to the folder it is given; rank 0 calls it, at once. `metadata`, plain values, can
        be read without the state; `metrics` serve `KeepBest`. `model_only` saves the modules and nothing else. None:
        skipped, because the last save was still being written. Raises CheckpointError, also for the save before, if it
        failed.
        """
        owner, planner = self._claim()
        self._count += 1
        save = f"{owner.identity}-{self._count:06d}"
        temporary = temporary_path(self.folder, step, save)
        plain = {"metadata": metadata, "metrics": metrics, "model_only": model_only}
        drafted, answers = self._agree(step, save, temporary, state, files, plain)
        if answers is None:
            logger.warning("step %s is not saved: the save before is still being written", step)
            return None
        board = Board(owner.folder / save, self._group.rank)
        board.open()
        handle = SaveHandle(step)
        try:
            saving, memory = self._copy(drafted, answers, planner, board, owner)
        except BaseException as error:
            board.fail(describe_error(error))
            self._discard(temporary)
            self._farewell(board)
            raise
        self._flying = handle
        self._run(saving, memory, handle)
        self.check()
        return handle

    def _agree(
        self,
        step: int,
        save: str,
        temporary: Path,
        state: Mapping[str, Any],
        write_files: Callable[[Path], None] | None,
        plain: Mapping[str, Any],
    ) -> tuple[Draft, list[Answer] | None]:
        """Describes the state and hears all ranks; nothing is left where one of them cannot save."""
        drafted: Draft | None = None
        problem: BaseException | None = None
        busy = self._when_busy == "skip" and self._flying is not None and not self._flying.done()
        try:
            if not busy:
                self.wait()
                on_rank_0 = write_files if self._group.rank == 0 else None
                drafted = draft(step, save, temporary, state, write_files=on_rank_0, **plain)
        except Exception as error:
            problem = error
        digests = drafted.tables.digests() if drafted is not None else {}
        told = describe_error(problem) if problem is not None else None
        try:
            answers = agree(self._group, Answer(step, busy, told, digests), problem)
        except BaseException:
            self._discard(temporary)
            raise
        if answers is None:
            self._discard(temporary)
        return drafted, answers  # type: ignore[return-value]

    def _copy(
        self, drafted: Draft, answers: list[Answer], planner: Planner, board: Board, owner: Ownership
    ) -> tuple[Saving, memoryview]:
        board.enter("planning")
        plan, values = planner.plan(drafted, answers)
        extents, size = extents_of(plan, self._group.rank)
        self._memory.check(size)
        check_disk(self.folder, plan)
        entries = drafted.entries()
        runtime = self._runtime_of(entry.tensor for entry in entries.values())
        memory = self._memory.take(size, pinned=runtime.device.type == "cuda")
        board.enter("copying")
        runtime.step_boundary(wait=True)
        take(plan_copies(plan, extents, entries), memory, runtime)
        kinds = {name: section["kind"] for name, section in values.items()}
        first = self._group.rank == 0
        saving = Saving(
            rank=self._group.rank,
            temporary=drafted.temporary,
            plan=plan,
            extents=extents,
            manifest=drafted.manifest(self._group.size, self._mesh, kinds),
            board=board,
            timeout=self._timeout,
            threads=self._threads,
            lost=owner.lost,
            committed=self._retain,
            values=values_to_bytes(values) if first else b"",
            extra=drafted.extra,
        )
        return saving, memory.numpy().data

    def _run(self, saving: Saving, memory: memoryview, handle: SaveHandle) -> None:
        try:
            handle.succeed(saving.run(memory))
        except BaseException as error:
            handle.fail(error)
        self._farewell(saving.board)

    def _farewell(self, board: Board) -> None:
        """Leaves a save's board; rank 0 removes it when all have."""
        board.leave()
        if self._group.rank == 0:
            board.close(range(self._group.size), time.monotonic() + min(self._timeout, _FAREWELL))

    def _retain(self, newest: Path) -> None:
        """Deletes what no policy keeps, now that `newest` is committed."""
        if not self._policies:
            return
        known = {}
        for path in checkpoints(self.folder):
            try:
                known[path] = self._saved.get(path) or _saved(path)
            except CheckpointError as error:
                logger.warning("%s is left where it is: %s", path, error)
        known[newest] = _saved(newest)
        self._saved = known
        for step in superfluous(list(known.values()), self._policies):
            path = checkpoint_path(self.folder, step)
            if path != newest:
                assert self._owner is not None
                try:
                    delete(path, f"{self._owner.identity}-{self._count:06d}")
                except OSError as error:
                    logger.warning("%s could not be deleted: %s", path, describe_error(error))

    def check(self) -> None:
        """Raises the error of a save that has failed since the last call. It costs nothing: call it often."""
        flying = self._flying
        if flying is not None and flying.done():
            self._flying = None
            if flying.error() is not None:
                flying.result()

    def wait(self) -> None:
        """Returns when no save is on its way. Raises the error of one that failed."""
        flying, self._flying = self._flying, None
        if flying is not None:
            flying.result()

    # restoring

    def restore(self, state: Mapping[str, Any], checkpoint: str | Path | int | None = None) -> int | None:
        """Gives the state the values of a checkpoint, in place; returns its step.

        `checkpoint`: a step, a path, or None for the newest that is whole (None is returned where there is none at
        all). The checkpoint may hold more sections than the state. Raises CheckpointMismatch before anything is changed
        where it is of another model, CheckpointDamaged where it is not whole, and CheckpointNotFound.
        """
        self._claim()
        self.wait()
        tensors = [entry.tensor for section in describe(state) for entry in section.entries.values()]
        loader = Loader(self._group, self._runtime_of(tensors), self._threads)
        if checkpoint is None:
            path = loader.newest(self._group.broadcast(checkpoints(self.folder)), state)
            return None if path is None else step_of(path)
        path = self._named(checkpoint)
        loader.named(path, state)
        return read_manifest(path).step

    def _named(self, checkpoint: str | Path | int) -> Path:
        path = checkpoint_path(self.folder, checkpoint) if isinstance(checkpoint, int) else Path(checkpoint)
        if not path.is_dir():
            raise CheckpointNotFound(f"there is no checkpoint {path}")
        return path

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, as far as can be told without reading the tensors; None without any."""
        found = None
        if self._group.rank == 0:
            for path in checkpoints(self.folder):
                try:
                    check_whole(path, read_manifest(path))
                except CheckpointDamaged as error:
                    logger.warning("%s is damaged: %s", path, error)
                    continue
                found = path
                break
        found = self._group.broadcast(found)
        assert found is None or isinstance(found, Path)
        return found

    def manifest(self, checkpoint: str | Path | int) -> Manifest:
        """What a checkpoint holds. Raises CheckpointNotFound or CheckpointDamaged."""
        return read_manifest(self._named(checkpoint))

    def metadata(self, checkpoint: str | Path | int) -> dict[str, Any]:
        """The plain values that were saved with it as `metadata`."""
        return dict(decode_plain(self.manifest(checkpoint).metadata))

    # coming and going

    def claim(self) -> None:
        """Takes the folder for this run. `save` and `restore` do it as well; collective.

        Raises CheckpointBusy where another live run has it, and CheckpointError where it cannot be written to.
        """
        self._claim()

    def _claim(self) -> tuple[Ownership, Planner]:
        if self._owner is None or self._planner is None:
            problem: BaseException | None = None
            if self._group.rank == 0:
                try:
                    check_writable(self.folder)
                    self._owner = Ownership.claim(self.folder)
                except (CheckpointError, OSError) as error:
                    problem = error
            identity = self._owner.identity if self._owner is not None else None
            told = self._group.broadcast((identity, problem and (type(problem), describe_error(problem))))
            if problem is not None:
                raise problem
            if told[1] is not None:
                raise told[1][0](told[1][1])
            nodes = self._group.all_gather(boot_id())
            if self._owner is None:
                first = nodes.index(nodes[self._group.rank]) == self._group.rank
                self._owner = Ownership.join(self.folder, told[0], self._group.rank, beat=first)
            self._planner = Planner(self._group, [nodes.index(node) for node in nodes], self._max_file_size)
            atexit.register(self.close)
        return self._owner, self._planner

    def close(self) -> None:
        """Waits for the save on its way, and gives the folder back. Raises the error of a save that failed."""
        atexit.unregister(self.close)
        try:
            self.wait()
        finally:
            if self._owner is not None:
                self._owner.release(whole=self._group.rank == 0)
                self._owner = None
            self._memory.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _runtime_of(self, tensors: Any) -> Runtime:
        if self._runtime is None:
            devices = [tensor.device for tensor in tensors if isinstance(tensor, Tensor)]
            device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
            return runtime_for(device)
        return self._runtime

    def _discard(self, temporary: Path) -> None:
        if self._group.rank == 0:
            discard(temporary)


def _saved(path: Path) -> Saved:
    manifest = read_manifest(path)
    return Saved(manifest.step, manifest.time, decode_plain(manifest.metrics))
