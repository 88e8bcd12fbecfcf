"""Resuming a run from one of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerState

from stepmark.checkpoint import Checkpointer, Manifest
from stepmark.checkpoint.coordination.shared_memory import is_in_memory
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, resolve_link
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.checkpoint.restore.restore import Restored
from stepmark.data.data_description import data_difference
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, StepmarkError, UsageError
from stepmark.launch.threads import THREADS, given_threads
from stepmark.liveness.host_group import HostGroup
from stepmark.model_folder.consolidate import EVALUATION
from stepmark.runtime.mesh import DATA, Mesh
from stepmark.sharding.logical_ranks import FIELD
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.components import TrainingComponents
from stepmark.trainer.run_folder.log_history import read_state
from stepmark.trainer.run_folder.output_folder import check_named_checkpoint, on_rank_0
from stepmark.trainer.run_folder.run_identity import check_same_run
from stepmark.trainer.run_folder.run_log import TRAINER_STATE

ATTENTION = "attn_implementation"
ARITHMETIC, KERNELS = "arithmetic", "the processor's kernels"

logger = logging.getLogger("stepmark")


def restore_run(
    sections: Mapping[str, Any],
    parts: TrainingComponents,
    callbacks: RunCallbacks,
    checkpointer: Checkpointer,
    checkpoint: Path | None,
    changes: dict[str, str],
) -> Restored | None:
    """Restores `sections` and the Trainer's state from `checkpoint`, or from the newest complete one (None where the
    run has no checkpoint). Returns which checkpoint was restored. Collective.

    `changes` gets what has changed and is accepted, in words, by its name, before the sections are restored.

    Raises CheckpointError, before anything is trained, where this run cannot continue from any.
    """
    folder, host = checkpointer.folder, parts.context.host
    if checkpoint is None and not host.broadcast(bool(checkpoints(folder))):
        return None
    if checkpoint is not None:
        checkpoint = resolve_link(checkpoint)
        look = partial(check_named_checkpoint, checkpoint)  # one machine alone may have it, or the link
        checkpoint = checkpoint.with_name(on_rank_0(host, look, lambda error: error, CheckpointNotFound))
    parts.optimizer.ensure_state()

    def accept(path: Path, manifest: Manifest) -> None:
        if manifest.model_only:
            raise CheckpointMismatch(
                f"resume_from_checkpoint: {path} holds only the model (save_only_model); start a new run with "
                "model_name_or_path set to it"
            )
        saved = checkpointer.metadata(path)
        if "imported" in saved:  # another tool says no more of a run's identity than what an adapter is
            known = {key: parts.identity.get(key) for key in manifest.identity}
            check_same_run(manifest.identity, known, str(path))
            return
        if not manifest.identity:
            raise CheckpointMismatch(
                f"resume_from_checkpoint: {path} was not saved by a Stepmark training run; name one that was"
            )
        data = saved.get("data")  # older checkpoints do not describe it
        words = data_difference(data, parts.data) if isinstance(data, Mapping) and parts.data else None
        accepted = parts.args.accepted_changes
        changes.update(check_same_run(manifest.identity, parts.identity, str(path), words, accepted))

    try:
        try:
            restored = checkpointer.restore_from(sections, checkpoint, accept=accept)
        except CheckpointMismatch as error:
            if "optim" not in parts.args.accepted_changes:
                remedy = _remedy(error.section, parts.args.accepted_changes)
                if remedy is None:
                    raise
                raise CheckpointMismatch(f"{error}; {remedy}") from error
            others = {name: section for name, section in sections.items() if name != "optimizer"}
            restored = checkpointer.restore_from(others, checkpoint, accept=accept)
            changes["optim"] = f"optimizer begins without states: {error}"
    except CheckpointDamaged as error:
        remedy = "" if checkpoint is None else "; name another checkpoint, or true for the newest complete one"
        raise CheckpointDamaged(f"resume_from_checkpoint: {error}{remedy}") from error
    assert restored is not None
    path, step = restored.path, restored.step
    callbacks.restore_state(read_state(path / TRAINER_STATE))
    if parts.args.load_best_model_at_end:
        beside = folder if is_in_memory(path) else path.absolute().parent
        locate_best(callbacks.state, beside, host, "the best model will be chosen from later evaluations")
    saved = checkpointer.metadata(path)
    _keep_arithmetic(saved.get(ARITHMETIC) or {}, parts.mesh)
    if host.rank == 0:
        _warn_of_another_batch(saved.get("samples_per_step"), parts)
        _tell_of_another_attention(saved.get(EVALUATION) or {}, parts, callbacks, step)
    return restored


def keep_logical_ranks(
    mesh: Mesh, checkpointer: Checkpointer, resume: bool | str | None, snapshot: Path | None, *, hosts: bool
) -> None:
    """Lets the processes host the data parallel ranks of the run that they go on with, so that its batches stay; more
    processes than these are as many ranks, as in a new run. `hosts`: whether the training lets them. Collective."""
    host = mesh.context.host
    ranks = host.broadcast(_saved_ranks(checkpointer, resume, snapshot) if resume and host.rank == 0 else None)
    hosts = hosts and mesh.hosts_ranks
    mesh.host_ranks(ranks if ranks is not None and hosts and ranks > mesh.data_parallel.size else None)
    if not hosts and mesh.ranks.total > mesh.ranks.processes:
        raise UsageError(
            f"{FIELD}: this trainer's losses and metrics join what the ranks have computed, so each needs a process: "
            f"start {mesh.ranks.total} data parallel processes, or set it to {mesh.ranks.processes}"
        )


def arithmetic_of(mesh: Mesh) -> dict[str, Any]:
    """What decides how this process rounds, besides the software: for the metadata of a checkpoint."""
    if not mesh.runtime.host_memory:
        return {}
    return {THREADS: torch.get_num_threads(), KERNELS: torch.backends.cpu.get_cpu_capability()}


def _keep_arithmetic(saved: Mapping[str, Any], mesh: Mesh) -> None:
    """Computes with as many threads as the run did before, unless their number is given. Says what is not as it was."""
    own = arithmetic_of(mesh)
    threads = saved.get(THREADS)
    if own and isinstance(threads, int) and threads != own[THREADS] and not given_threads():
        torch.set_num_threads(threads)
        if mesh.context.host.rank == 0:
            logger.info("computing with %d threads, as before; %s sets another number", threads, THREADS)
        own[THREADS] = threads
    changed = [
        f"{name} was {saved[name]} and is {value}" for name, value in own.items() if saved.get(name, value) != value
    ]
    if changed and mesh.context.host.rank == 0:
        logger.warning("%s: losses differ by rounding from here on", ", ".join(changed))


def _saved_ranks(checkpointer: Checkpointer, resume: bool | str, snapshot: Path | None) -> int | None:
    """The logical ranks of what is gone on from; None where each needs a process, or it cannot be read."""
    path = Path(resume) if isinstance(resume, str) else snapshot or next(iter(checkpoints(checkpointer.folder)), None)
    if path is None:
        return None
    try:
        path = resolve_link(path)
        return checkpointer.metadata(path).get(FIELD, checkpointer.manifest(path).mesh.get(DATA))
    except StepmarkError:
        return None


def _remedy(section: str | None, accepted: Collection[str]) -> str | None:
    """What to do about a checkpoint whose section does not fit."""
    if section == "optimizer":
        return "resume with the run's optim and optim_args, or pass --accept-changes optim to begin without its states"
    if section == "model" and "model" in accepted:
        return "an accepted model has the same tensors: start a new run, with model_name_or_path for these weights"
    return None


def locate_best(state: TrainerState, folder: Path, host: HostGroup, otherwise: str) -> None:
    """Finds the best checkpoint: in `folder`, since the run's may have been moved, or where it was saved. One that is
    in neither place is forgotten, with a warning."""
    saved = state.best_model_checkpoint
    if saved is None:
        return
    candidates = [folder / Path(saved).name, Path(saved)]
    found = host.broadcast(next((place for place in (0, 1) if (candidates[place] / MANIFEST).is_file()), None))
    state.best_model_checkpoint = None if found is None else str(candidates[found])
    if found is None:
        state.best_metric = state.best_global_step = None
        if host.rank == 0:
            logger.warning("load_best_model_at_end: %s no longer exists; %s", saved, otherwise)


def _tell_of_another_attention(
    before: Mapping[str, Any], parts: TrainingComponents, callbacks: RunCallbacks, step: int
) -> None:
    """Records that attention is computed otherwise than before; losses then differ by rounding."""
    was, now = before.get(ATTENTION), None if parts.evaluation is None else parts.evaluation.attn_implementation
    if was is None or now is None or was == now:
        return
    callbacks.run_log.event("attention", step, before=was, now=now)
    logger.warning("%s was %s and is now %s: losses differ by rounding from here on", ATTENTION, was, now)


def _warn_of_another_batch(before: int | None, parts: TrainingComponents) -> None:
    """Warns of steps of another size, which a change of the number of ranks causes silently."""
    layout = parts.loader.layout
    if before is None or before == layout.global_batch:
        return
    steps, rest = divmod(before, layout.batch_size * layout.world_size)
    message = (
        f"the global batch was {before} samples and is now {layout.global_batch} ({layout.batch_size} per device x "
        f"{layout.world_size} data parallel x {layout.accumulation} accumulated); to keep it, set "
        f"{'per_device_train_batch_size' if rest else f'gradient_accumulation_steps: {steps}'}"
    )
    logger.warning("%s", message)
