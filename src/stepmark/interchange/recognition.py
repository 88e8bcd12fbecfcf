"""Recognizes which tool a checkpoint is of, and opens it."""

from __future__ import annotations

from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import resolve_link
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.interchange.neuron import neuronx_distributed, optimum_neuron, torch_xla_zero
from stepmark.interchange.sources import dcp, deepspeed, hf_sharded, plain, transformers_trainer
from stepmark.interchange.sources.foreign import CheckpointFormat, ForeignCheckpoint, ImportOptions

# In this order: the folders of some tools contain files of others.
FORMATS: tuple[CheckpointFormat, ...] = (
    optimum_neuron,
    neuronx_distributed,
    torch_xla_zero,
    deepspeed,
    transformers_trainer,
    dcp,
    hf_sharded,
    plain,
)
_RENAMED = (dcp, hf_sharded, plain)  # whose tensors may have names of another program
_REPLICATED = (optimum_neuron, neuronx_distributed)  # whose key/value heads may be
_INNER = ("checkpoint-*", "step-*", "step_*", "global_step*")


def format_of(source: Path) -> CheckpointFormat | None:
    """The format of a folder or file, None where it is none that is known, or one of ours."""
    if (source / MANIFEST).is_file():
        return None
    try:
        return next((found for found in FORMATS if found.recognize(source)), None)
    except OSError:
        return None


def open_foreign(source: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What a checkpoint of another tool holds; nothing of its tensors has been read. `source` is its folder or file, or
    a folder of several with `options.tag`.

    Raises CheckpointNotFound where there is nothing, CheckpointMismatch where it is of no known tool, or needs what the
    options do not have, and CheckpointDamaged where it is incomplete or malformed.
    """
    source = resolve_link(source)
    if not source.exists():
        raise CheckpointNotFound(f"there is no {source}; name the folder of a checkpoint")
    if (source / MANIFEST).is_file() or any(source.glob(f"checkpoint-*/{MANIFEST}")):
        raise UsageError(f"{source} is a Stepmark checkpoint or run; resume from it, or see `stepmark consolidate`")
    source = _tagged(source, options.tag)
    found = format_of(source)
    if found is None:
        inner = sorted(path.name for pattern in _INNER for path in source.glob(pattern) if format_of(path))
        hint = f"; it has {', '.join(inner[:3])}: name one of them" if inner else ""
        raise CheckpointMismatch(f"{source} is not a checkpoint of a known tool{hint}; see docs/interchange.md")
    _check_options(source, found, options)
    try:
        return found.open_checkpoint(source, options)
    except RecursionError as error:
        raise CheckpointMismatch(f"{source} is nested too deep to be a checkpoint") from error
    except MemoryError as error:
        raise CheckpointError(f"{source}: there is not enough memory for its metadata") from error


def _check_options(source: Path, found: CheckpointFormat, options: ImportOptions) -> None:
    """Raises UsageError for an option that has no meaning for a format."""
    if options.names and found not in _RENAMED:
        raise UsageError(
            f"--map: {source} has the names of its tool, which are known; --map is for plain state dicts, model "
            "folders and torch.distributed.checkpoint"
        )
    if options.heads != "auto" and found not in _REPLICATED:
        raise UsageError(f"--heads: {source} has no replicated heads; --heads is for neuronx-distributed's checkpoints")


def _tagged(source: Path, tag: str | None) -> Path:
    """The checkpoint of a tag or step, in a folder with several."""
    if tag is None:
        return source
    if Path(tag).name != tag:
        raise UsageError(f"--tag {tag}: give the name or the step of a checkpoint in {source}")
    names = (tag, *(pattern.replace("*", tag) for pattern in _INNER))
    found = next((source / name for name in names if (source / name).exists()), None)
    if found is None:
        there = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
        shown = ", ".join([*there[:5], *("…" for _ in there[5:6])]) or "nothing"
        raise CheckpointNotFound(f"{source} has no checkpoint {tag!r}; it has {shown}")
    return found
