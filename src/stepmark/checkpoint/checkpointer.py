"""The checkpoint engine's interface to a training loop: save, restore, wait."""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.coordination.run_ownership import CLAIMING, RunOwnership
from stepmark.checkpoint.downloads import checkpoint_copy
from stepmark.checkpoint.format.checkpoint_folders import (
    LEFT,
    checkpoint_path,
    checkpoints,
    checkpoints_to_restore,
    resolve_link,
    step_of,
    temporary_path,
)
from stepmark.checkpoint.format.integrity import check_size, what_is_wrong
from stepmark.checkpoint.format.manifest import MANIFEST, Manifest, parse_manifest, read_manifest, save_of
from stepmark.checkpoint.host_memory import StagingMemory, free_host_memory, shortage
from stepmark.checkpoint.mirror import Mirror
from stepmark.checkpoint.operation import Operation, SaveHandle
from stepmark.checkpoint.places import BucketPlace, FolderPlace, copy_checkpoint, explained, manifest_of, upload
from stepmark.checkpoint.restore.restore import Accept, Restored, Restorer, newest_of_both
from stepmark.checkpoint.retention_policies import KeepLast, Retention
from stepmark.checkpoint.save.background import Background
from stepmark.checkpoint.save.commit import Commit, values_to_bytes
from stepmark.checkpoint.save.delete_old_checkpoints import CheckpointCleaner
from stepmark.checkpoint.save.division import Division
from stepmark.checkpoint.save.request import (
    RankReport,
    SavePlanner,
    SaveRequest,
    agree,
    check_disk,
    disk_need,
    prepare_save,
)
from stepmark.checkpoint.save.snapshot import PendingCopies, begin_copies, extents_of, plan_copies
from stepmark.checkpoint.save.write import SaveWriter
from stepmark.checkpoint.sections import check_state, describe, runtime_of
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, UsageError
from stepmark.filesystem.cache_folder import working_folder
from stepmark.filesystem.files import SOON, read_file
from stepmark.filesystem.json_values import decode_plain
from stepmark.filesystem.local_paths import address_of
from stepmark.filesystem.objects import Bucket
from stepmark.filesystem.printable import listed
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.process_exit import end_process
from stepmark.liveness.progress import SAVE, in_phase
from stepmark.liveness.status_board import StatusBoard
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import can_pin
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved

logger = logging.getLogger("stepmark")

MAX_FILE_SIZE = 5_000_000_000  # bytes, as in transformers
APART = 1800.0  # seconds between the first and the last rank at the first collective, as in torch
MARGIN = 60.0  # seconds by which torch's deadline is later than that of TimedGroup, which names the late ranks


class Checkpointer:
    """Saves and restores a training state in `folder`, as complete `checkpoint-<step>` folders. With an address in its
    place (`s3://bucket/run`), it works in a folder of the cache, from which rank 0 uploads each checkpoint, and to
    which it downloads the newest one at the first call.

    All ranks of `group` call `save`, `restore`, `latest` and `close` together. A state is a dict of sections: modules,
    optimizers, objects with `state_dict` and `load_state_dict`, or nested dicts and lists of tensors and plain values.
    Any tensor may be a DTensor (torch.distributed.tensor), sharded or replicated on any mesh.

    Threads that call it concurrently wait for each other. A process that is forked from this one cannot use it.

    Args:
        folder: The run's folder, which all ranks see, or its address. It is created if it does not exist.
        keep_last: How many checkpoints to keep, the newest; at least 1. None (default) for no such limit.
        keep: Further retention policies. What any policy keeps stays; without a policy every checkpoint does.
        group: The ranks that save together. Default: all ranks of the run.
        runtime: The device runtime. Default: that of the first tensor that is not on the CPU.
        async_save: Whether `save` returns once the state may change, and writes in the background. Default: True.
        save_timeout: Seconds that each phase of a save or restore may take. A process that cannot end by itself after
            this deadline is terminated. Default: 1800.
        mesh: The size of each mesh axis, for the manifest. Default: `{"dp": <world size>}`.
        max_file_size: Bytes of tensors per file; a larger tensor gets a separate file. Default: 5 GB.
        threads: Threads that write concurrently; twice as many read. Default: 2.

    Attributes:
        folder: The absolute path of the run's folder; of an address, that of the one in the cache.

    Raises:
        UsageError: An argument is invalid.
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
        mesh: Mapping[str, int] | None = None,
        max_file_size: int = MAX_FILE_SIZE,
        threads: int = 2,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise UsageError(f"keep_last: {keep_last} is too few; the newest checkpoint always stays")
        if not 0 < save_timeout < math.inf:
            raise UsageError(f"save_timeout: {save_timeout!r} is not a finite number of seconds above 0")
        self._address = address_of(folder)
        self.folder = Path(folder).absolute() if self._address is None else working_folder(self._address)
        if (self.folder / MANIFEST).exists():
            raise UsageError(f"folder: {folder} is a checkpoint; give the folder around it, and name it to `restore`")
        self._place = self._address  # where a folder that ranks do not share is completed
        self._mirror: Mirror | None = None  # that follows the folder there, on rank 0
        self._downloaded: set[Path] = set()  # in a folder that rank 0 does not see
        self._patience = SOON  # seconds in which it would appear
        self._group = group or HostGroup.of_processes(timedelta(seconds=max(save_timeout, CLAIMING, APART) + MARGIN))
        self._timed_group = TimedGroup(self._group, save_timeout)
        self._runtime = runtime
        self._async = async_save
        self._timeout = save_timeout
        self._mesh = _checked_mesh(mesh or {"dp": self._group.size})
        self._threads = threads
        self._policies = [*([KeepLast(keep_last)] if keep_last is not None else []), *keep]
        self._cleaner = CheckpointCleaner(self.folder, self._policies)
        self._background = Background(self._group.rank, self._group.size, save_timeout, self._cleaner)
        self._memory = StagingMemory()
        self._ownership: RunOwnership | None = None
        self._max_file_size = max_file_size
        self._planner: SavePlanner  # of the claim
        self._lock = threading.RLock()
        self._process = 0  # the only one that may call, once it has claimed the folder
        self._timestamps = TimestampSource()
        self._finalizer: Finalize | None = None
        self._hook: RemovableHandle | None = None
        self._copies: PendingCopies | None = None  # of the last save
        self._count = 0

    # Saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        files: Callable[[Path], object] | None = None,
        metadata: Mapping[str, Any] | None = None,
        model_only: bool = False,
        metrics: Mapping[str, float] | None = None,
        block: bool | None = None,
    ) -> SaveHandle:
        """Saves the state as `checkpoint-<step>`; collective. Waits for the save before.

        Args:
            step: The step, from 0 on, the same on all ranks.
            state: The sections to save, by name.
            files: Called at once on rank 0 with a folder to which it may add files. A function that it returns is
                called before the checkpoint is committed, in the background, to complete them.
            metadata: Plain values that can be read without the state.
            metrics: Values for `KeepBest`, by name.
            model_only: Whether to save only the modules. Default: False.
            block: Whether to return only once the checkpoint is durable, or uploaded. Default: not `async_save`.

        Returns:
            A handle whose `result()` waits until the checkpoint is durable. Where the process only extracts graphs
            (`NEURON_EXTRACT_GRAPHS_ONLY`) nothing is written, and the handle is done at once.

        Raises:
            UsageError: The state cannot be saved, or the ranks save different steps.
            CheckpointBusy: Another live run owns the folder.
            CheckpointError: This save, or the one before, has failed on any rank.
        """
        with self._one_call():
            if extracting_graphs():
                runtime = self._runtime or runtime_of(describe(state))
                runtime.step_boundary(wait=True)  # so that the graphs are those of a real run
                warn_not_saved(f"step {step}")
                skipped = SaveHandle(step)
                skipped.succeed(checkpoint_path(self.folder, step))
                return skipped
            ownership = self._join()
            name = self._next_name(ownership)
            temporary = temporary_path(self.folder, step, name)
            handle = SaveHandle(step, name)
            write_files = files if self._group.rank == 0 else None
            prepare = partial(
                prepare_save, step, name, temporary, state, write_files, metadata, metrics, model_only=model_only
            )
            what, failure = f"save of step {step}", f"step {step} was not saved"
            with self._attempt(what, failure, ownership.board(name), handle, temporary) as operation:
                request, reports = self._agree(operation, "agreeing on a save", step, prepare)
                writer, memory = self._copy(operation, ownership, request, reports)
                operation.goes_on = True
            self._copies = writer.copies
            self._background.begin(writer, memory, self._memory.readers)
            if block if block is not None else not self._async:
                self.wait()
            return handle

    def _next_name(self, ownership: RunOwnership) -> str:
        self._count += 1
        return f"{ownership.identity}-{self._count:06d}"

    @contextmanager
    def _attempt(
        self, what: str, failure: str, board: StatusBoard, handle: SaveHandle | None = None, folder: Path | None = None
    ) -> Iterator[Operation]:
        """A save, which has a handle and a folder, or a restore, until it has ended or goes on in the background. An
        error of the file system is raised as CheckpointError, after the words of `failure`."""
        operation = Operation(what, failure, board, self._timeout, handle, folder)
        try:
            yield operation
        except BaseException as error:
            operation.end(error)
            self._background.leave(operation)
            if isinstance(error, OSError):
                raise CheckpointError(f"{failure}: {describe_error(error)}") from error
            raise
        if not operation.goes_on:
            operation.end()
            self._background.leave(operation)

    def _agree(
        self, operation: Operation, what: str, step: int, prepare: Callable[[], Any]
    ) -> tuple[Any, list[RankReport]]:
        """Prepares the operation, once the save before has ended; raises on all ranks where one cannot go on."""
        prepared: Any = None
        problem: BaseException | None = None
        try:
            operation.board.open()
            self.wait()
            operation.enter("joining")
            prepared = prepare()
            operation.leave()  # the collective, which begins now, has its own deadline
        except Exception as error:
            problem = error
        finally:
            operation.stop()
        report = RankReport(step, None if problem is None else describe_error(problem))
        if problem is None and isinstance(prepared, SaveRequest):
            report = RankReport(step, None, prepared.tables.checksums(), self._memory.size, free_host_memory())
        return prepared, agree(self._timed_group, operation.board, what, report, problem)

    def _copy(
        self, operation: Operation, ownership: RunOwnership, request: SaveRequest, reports: list[RankReport]
    ) -> tuple[SaveWriter, memoryview]:
        """Plans what this rank writes, and copies it. Raises CheckpointError, on all ranks of this node, where their
        copies do not fit into its memory."""
        operation.enter("planning")
        nodes = ownership.nodes
        plan, values = self._planner.plan(request, reports, operation.board)
        extents, size = extents_of(plan, self._group.rank)
        ranks = [rank for rank, node in enumerate(nodes) if node == nodes[self._group.rank]]
        needs = [max(0, extents_of(plan, rank)[1] - reports[rank].held) for rank in ranks]
        free = [reports[rank].free for rank in ranks]
        if (short := shortage(needs, free, "its copy of the state", "the copies of the")) is not None:
            why = f"saving needs {short}; use more nodes, a smaller state, or machines with more memory"
            raise CheckpointError(why)
        if ownership.is_first:
            self._background.tidy()
        if self._group.rank == 0:
            self._background.make_room(self.folder, disk_need(plan), request.manifest.save)
            check_disk(self.folder, plan)
        runtime = self._runtime or runtime_of(request.sections)
        memory = self._memory.take(size, pinned=can_pin(runtime.device))
        operation.enter("copying")
        entries = {(each.group, name): entry for each in request.sections for name, entry in each.entries.items()}
        planned = plan_copies(plan, extents, entries)
        copies = begin_copies(planned, request.sections, memory, runtime, self._copies, threads=self._threads)
        if self._hook is None and not runtime.lazy:
            self._hook = register_optimizer_step_pre_hook(self._before_update)
        if not copies.left:
            operation.leave()  # else once they have been made
        kinds = {name: section["kind"] for name, section in values.items()}
        division = Division(ownership.folders, partial(upload, str(self._place)), self._downloaded)
        uploads = self._address is not None or (self._mirror is not None and ownership.divided)
        writer = SaveWriter(
            operation=operation,
            rank=self._group.rank,
            temporary=request.temporary,
            plan=plan,
            extents=extents,
            copies=copies,
            threads=self._threads,
            commit=Commit(
                values=values_to_bytes(values) if self._group.rank == 0 else b"",
                extra=request.extra,
                complete=request.complete,
                manifest=replace(request.manifest, world_size=self._group.size, mesh=self._mesh, sections=kinds),
                lost=ownership.claim.lost,
                clock=self._timestamps,
                upload=partial(self._upload, request.manifest.step) if uploads else None,
            ),
            division=division if ownership.divided else None,
        )
        return writer, memory.numpy().data

    def _before_update(self, *_: Any) -> None:
        """Before any optimizer's step: what it would write has been copied."""
        if self._copies is not None and not torch.compiler.is_compiling() and not self._is_forked:
            self._copies.wait()

    def check(self) -> None:
        """Raises the error of a save that has failed since the last call. It is cheap, and does not wait."""
        self._background.check()

    def wait(self) -> None:
        """Waits until no save is in progress. Raises the error of one that has failed."""
        with self._one_call():
            self._background.wait()
            if self._copies is not None:
                self._copies.free()

    def delete_old(self) -> None:
        """Deletes what the policies do not keep, as after a save, once a reader has ended. On rank 0, in any thread."""
        for newest in checkpoints(self.folder)[:1]:
            if (save := save_of(newest)) is not None:
                self._cleaner.after(newest, save)

    # Restoring

    def restore(
        self, state: Mapping[str, Any], checkpoint: str | Path | int | None = None, *, accept: Accept | None = None
    ) -> int | None:
        """Gives the state the values of a checkpoint, in place; collective.

        How an optimizer computes (`foreach`, `fused`, `capturable`) stays as it is in the live one.

        Args:
            state: The sections to restore, by name. The checkpoint may hold more.
            checkpoint: A step, a path or an address. None (default) for the newest complete checkpoint of the folder.
            accept: Called with the path and the manifest before anything is compared; raises to refuse the checkpoint.

        Returns:
            The step; None where `checkpoint` is None and the folder has no checkpoint.

        Raises:
            CheckpointNotFound: The checkpoint does not exist.
            CheckpointMismatch: It was saved from another model; nothing is changed.
            CheckpointDamaged: It is incomplete or corrupted. Corrupted bytes of a tensor are only found while they are
                read, when other tensors may have their new values: restore another checkpoint, or rebuild the state.
            CheckpointBusy: Another live run owns the folder.
        """
        restored = self.restore_from(state, checkpoint, accept=accept)
        if restored is not None and checkpoint is not None and self._group.rank == 0:
            later = [each.name for each in checkpoints(self.folder) if (step_of(each) or 0) > restored.step]
            if later:
                told = "%s has checkpoints of later steps, from which a restart goes on: delete %s"
                where = " and ".join(filter(None, (self._address, str(self.folder))))
                logger.warning(told, where, listed(later, 3))
        return None if restored is None else restored.step

    def restore_from(
        self, state: Mapping[str, Any], checkpoint: str | Path | int | None = None, *, accept: Accept | None = None
    ) -> Restored | None:
        """As `restore`; returns the checkpoint, and which others were quarantined because they are corrupted."""
        with self._one_call():
            ownership = self._join()
            board = ownership.board(self._next_name(ownership))
            with self._attempt("restore", f"nothing was restored from {self.folder}", board) as operation:
                self._agree(operation, "restoring", 0, partial(check_state, state))
                operation.enter("looking")
                threads, alone = 2 * self._threads, ownership.nodes.count(ownership.nodes[self._group.rank]) == 1
                restorer = Restorer(
                    self._timed_group, operation, threads, alone, self._timestamps, self._runtime, accept
                )
                if self._place is not None:
                    restorer.complete = self._complete
                if checkpoint is None:
                    find = partial(checkpoints_to_restore, self.folder)
                    ask = partial(self._timed_group.ask_first, find, "looking for checkpoints", board=board)
                    found = lambda: [self.folder / path.name for path in ask()]  # noqa: E731
                    return newest_of_both(lambda: restorer.newest(found(), state), partial(self._fetch, board))
                path = self._resolve(checkpoint)
                with self._lease_on(path):
                    return restorer.named(path, state)

    def _fetch(self, board: StatusBoard, *, damaged: bool = False) -> bool:
        """Whether the address had a newer one, which is in the folder then. Collective."""
        work = lambda: self._mirror is not None and self._mirror.fetch(damaged=damaged)  # noqa: E731
        what = f"downloading from {self._address}"
        return self._address is not None and self._timed_group.ask_first(work, what, board=board)

    def complete(self, step: int) -> None:
        """Downloads what the folder of rank 0 lacks of this step's checkpoint, since other machines have uploaded what
        they wrote. Raises CheckpointError where the bucket cannot be read."""
        path = checkpoint_path(self.folder, step)
        if self._place is not None and self._group.rank == 0 and (path / MANIFEST).exists():
            with explained(self._place):
                self._complete(path, read_file(path / MANIFEST))

    def _complete(self, path: Path, data: bytes) -> None:
        """Downloads what this rank's folder lacks of the run's checkpoint with this manifest, if this is the first rank
        that sees the folder."""
        step, ownership = step_of(path), self._ownership
        if path.absolute().parent != self.folder or step is None or ownership is None or not ownership.is_first:
            return
        manifest, here = parse_manifest(data, 1 << 50), FolderPlace(self.folder)  # rank 0 has read it
        if self._group.rank != 0:
            if path.exists() and save_of(path) != manifest.save:  # of another run, or an earlier attempt
                logger.warning("%s is in the way, and is now %s", path, here.set_aside(step, LEFT).name)
            self._downloaded.add(path)  # also one that a run has downloaded which was killed since
        with suppress(CheckpointDamaged):
            for entry in manifest.files:
                check_size(path, entry)
            return
        try:
            copy_checkpoint(BucketPlace(Bucket(str(self._place))), here, step, given=(data, manifest))
        except (CheckpointDamaged, FileNotFoundError) as error:
            logger.warning("%s", describe_error(error))  # so that it is not complete

    def _resolve(self, checkpoint: str | Path | int) -> Path:
        if isinstance(checkpoint, (str, Path)):
            address = address_of(checkpoint)
            path = resolve_link(Path(checkpoint)) if address is None else checkpoint_copy(address)
        else:
            step: Any = None if isinstance(checkpoint, bool) else checkpoint
            try:
                path = checkpoint_path(self.folder, operator.index(step))
            except TypeError:
                raise UsageError(f"checkpoint: {checkpoint!r} is neither a step nor a path") from None
            if self._address is not None and (self.divided_for or not path.is_dir()):  # only there
                path = checkpoint_copy(f"{self._address}/{path.name}")
        if not path.is_dir() and not (self.divided_for and path.absolute().parent == self.folder):
            raise CheckpointNotFound(f"there is no checkpoint {path}")
        if not (path / MANIFEST).exists() and (found := checkpoints(path)):
            raise CheckpointNotFound(f"{path} is a run's folder; name a checkpoint in it, such as {found[0].name}")
        return path

    def _lease_on(self, path: Path) -> AbstractContextManager[object]:
        """A lease on a checkpoint of another run, so that its run, if alive, does not delete it in the meantime."""
        own = path.resolve().parent == self.folder.resolve()
        return nullcontext() if own or self._group.rank != 0 else reading(path, "restore")

    def latest(self) -> Path | None:
        """Finds the newest complete checkpoint, without reading tensors; collective. An address is claimed.

        Returns:
            Its path; None where there is none.
        """
        with self._one_call():
            if self._address is not None:
                self._join()
            found: Path | None = self._timed_group.ask_first(self._newest, "looking for checkpoints")
            return found and self.folder / found.name

    def _newest(self) -> Path | None:
        for path in checkpoints(self.folder):
            self.complete(step_of(path) or 0)
            reason = what_is_wrong(path)
            if reason is None:
                return path
            logger.warning("%s is corrupted: %s", path, reason)
        return None

    def manifest(self, checkpoint: str | Path | int) -> Manifest:
        """Reads the manifest of a checkpoint.

        Args:
            checkpoint: A step, a path or an address.

        Returns:
            The manifest, which lists tensors and files.

        Raises:
            CheckpointNotFound: The checkpoint does not exist.
            CheckpointDamaged: Its manifest is missing or corrupted.
        """
        own = Path(checkpoint if isinstance(checkpoint, (str, Path)) else self.folder / f"checkpoint-{checkpoint}")
        if self.divided_for and own.parent == self.folder and not own.is_dir() and (step := step_of(own)) is not None:
            with explained(str(self._place)):
                return manifest_of(BucketPlace(Bucket(str(self._place))), step)[1]
        return read_manifest(self._resolve(checkpoint))

    def metadata(self, checkpoint: str | Path | int) -> dict[str, Any]:
        """Returns the plain values that were saved as `metadata` with a checkpoint, a step or a path."""
        return dict(decode_plain(self.manifest(checkpoint).metadata))

    # Claiming and releasing the folder

    def claim(self) -> None:
        """Claims the folder for this run, as `save` and `restore` do; collective.

        A claim of a run on another machine is watched for up to a minute, to see whether that run is alive.

        Raises:
            CheckpointBusy: Another live run owns the folder.
            CheckpointError: The folder cannot be written to.
        """
        with self._one_call():
            self._join()

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the one that may call, and so lacks its threads."""
        return self._process not in (0, os.getpid())

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """One call, of one thread, outside of torch's inference mode, so that new tensors can be trained.

        Raises UsageError in a forked process.
        """
        if self._is_forked:
            raise UsageError(
                f"this Checkpointer belongs to process {self._process}, from which process {os.getpid()} was forked: "
                "save and restore there, or create another Checkpointer for another folder"
            )
        with in_phase(SAVE), self._lock, torch.inference_mode(False):
            yield

    def _join(self) -> RunOwnership:
        if self._ownership is None:
            patience = None if self._place is None else self._patience
            own = RunOwnership.join(self.folder, self._timed_group, self._timeout, patience)
            self._patience = 0.0 if own.divided else SOON
            try:
                if self._address is not None:
                    run, seconds = own.identity if own.divided else None, max(self._timeout, CLAIMING)
                    self._timed_group.ask_first(partial(self._open_place, run), f"opening {self._address}", seconds)
            except BaseException:
                own.release()
                raise
            self._ownership = own
            self._planner = SavePlanner(self._timed_group, self._ownership.nodes, self._max_file_size)
            self._process = os.getpid()
            atexit.register(self._close_at_exit)
            # Processes that multiprocessing has forked call this, and nothing that is registered with atexit.
            self._finalizer = Finalize(None, self._close_at_exit, exitpriority=0)
        return self._ownership

    def keep_at(self, place: str, mirror: Mirror | None = None) -> None:
        """Before the folder is claimed: ranks that see different folders keep their parts of a checkpoint at this place
        in a bucket. With `mirror`, on rank 0, which follows the folder, a checkpoint counts once it is all there."""
        self._place, self._mirror = place, mirror

    @property
    def divided_for(self) -> str | None:
        """The name of the claim where ranks see different folders, else None."""
        return self._ownership.identity if self._ownership is not None and self._ownership.divided else None

    def _open_place(self, divided_for: str | None) -> None:
        """On rank 0, at an address: claims the place, downloads the newest checkpoint, and begins to follow."""
        if self._mirror is None:
            self._mirror = Mirror(self.folder, Bucket(str(self._address)), self._policies, freed=self.delete_old)
        if not self._mirror.started:
            self._mirror.divided_for = divided_for
            self._mirror.open()
            self._mirror.fetch()
            self._mirror.start()

    def _upload(self, step: int) -> None:
        """On rank 0, at an address: returns once what is committed in the folder is there too."""
        assert self._mirror is not None
        if (behind := self._mirror.finish(saved=step)) is not None:
            self._mirror.check()
            raise CheckpointError(behind)

    def close(self) -> None:
        """Waits for the save in progress and releases the folder.

        Raises:
            CheckpointError: A save has failed whose error was not raised yet.
        """
        atexit.unregister(self._close_at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if self._is_forked:  # the folder is its parent's
            return
        with self._one_call():
            self._close()

    def _close(self) -> None:
        try:
            self.wait()
        finally:
            ended = self._background.join()
            if self._mirror is not None and self._address is not None:
                self._mirror.close()
                self._mirror = None
            ownership, self._ownership = self._ownership, None
            self._memory.release()
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            if ownership is not None and ended:
                ownership.release()
            elif ownership is not None:  # the file system is stuck, and releasing would hang too
                threading.Thread(target=self._release_later, args=(ownership,), daemon=True).start()

    def _release_later(self, ownership: RunOwnership) -> None:
        while not self._background.join():
            pass
        ownership.release()

    def _close_at_exit(self) -> None:
        """Ends with an error where the last save has failed and the program has not asked for its result."""
        try:
            self.close()
        except Exception as error:
            end_process(error, self._group.rank)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Closes it. Raises PeerFailed, which names the rank, for torch's error about one that the block has lost."""
        lost = self._group.explain(error)  # now: closing may take longer than the others take to end
        try:
            self.close()
        except Exception as trouble:
            if error is None:
                raise
            logger.error("%s", trouble)  # the error that is being raised comes first
        if lost is not None:
            raise lost from error


def share_memory(first: Checkpointer, second: Checkpointer) -> None:
    """Two of the same ranks copy saves to the same memory, and need more only while both are writing."""
    second._memory = first._memory


def _checked_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh in the manifest's form. Raises UsageError for invalid sizes."""
    try:
        checked = {str(axis): operator.index(size) for axis, size in mesh.items()}
    except TypeError:
        checked = {"": 0}
    if min(checked.values(), default=1) < 1:
        raise UsageError(f"mesh: {dict(mesh)!r} must give each axis a positive integer number of ranks")
    return checked
