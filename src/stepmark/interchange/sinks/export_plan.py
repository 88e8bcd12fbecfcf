"""What a format needs to write a checkpoint, and what all formats share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointMismatch
from stepmark.interchange.models.model_class import outline_of
from stepmark.interchange.models.model_outline import CONFIG, ModelOutline
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer
from stepmark.interchange.sources.peft_adapter import adapter_outline
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.model_folder.output_files import OutputFile
from stepmark.tensor_files.global_tensor import GlobalTensor


@dataclass(frozen=True)
class ExportOptions:
    """What the user asks for.

    Args:
        titan: Whether torch.distributed.checkpoint gets torchtitan's names.
        config: The model's config.json, where the checkpoint has none.
    """

    titan: bool = False
    config: Path | None = None


@dataclass
class ExportPlan:
    """The files to write, what the other tool's user should know, and what does not go along, in sentences."""

    files: list[OutputFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def optimizer_of(source: ForeignCheckpoint) -> ForeignOptimizer:
    """The optimizer. Raises CheckpointMismatch where the checkpoint has none."""
    if source.optimizer is None:
        raise CheckpointMismatch(
            f"{source.folder} has no optimizer (save_only_model), and training cannot go on from it; for the model "
            "alone use `stepmark consolidate`"
        )
    return source.optimizer


def outline_for(source: ForeignCheckpoint, options: ExportOptions) -> ModelOutline:
    """The model of the checkpoint's config, compared with its tensors.

    Raises CheckpointMismatch where there is no config, or it is of another model.
    """
    if source.adapter:
        return _adapter_outline(source, options)
    path = options.config or source.files.get(CONFIG)
    if path is None:
        raise CheckpointMismatch(
            f"{source.folder} has no {CONFIG}, from which the order of the parameters follows, which this format "
            "numbers; give the model's with --config"
        )
    outline = outline_of(path, len(source.model))
    _compare(source, outline, path)
    source.files[CONFIG] = path
    return outline


def _adapter_outline(source: ForeignCheckpoint, options: ExportOptions) -> ModelOutline:
    """That of an adapter; its optimizer gets the names of the tensors."""
    outline = adapter_outline(source.folder, options.config, len(source.model))
    _compare(source, outline, source.folder / ADAPTER_CONFIG)
    optimizer_of(source).rename({live: name for name, live in outline.live.items()})
    return outline


def _compare(source: ForeignCheckpoint, outline: ModelOutline, path: Path) -> None:
    for name, shape in outline.parameters.items():
        tensor = source.model.get(name)
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else list(tensor.shape)
            raise CheckpointMismatch(
                f"{source.folder}: tensor {name!r} is {found}, and {list(shape)} in the {outline.architecture} of "
                f"{path}"
            )


def in_order(names: Sequence[str], order: dict[str, Any], source: ForeignCheckpoint) -> list[str]:
    """Parameters in the model's order. Raises CheckpointMismatch for one that the model does not have."""
    other = next((name for name in names if name not in order), None)
    if other is not None:
        raise CheckpointMismatch(f"{source.folder}: the optimizer has {other!r}, which is no parameter of the model")
    positions = {name: number for number, name in enumerate(order)}
    return sorted(names, key=lambda name: positions[name])


def weights_in_full_precision(source: ForeignCheckpoint) -> tuple[dict[str, GlobalTensor], bool]:
    """The model, with fp32 master weights in place of what they were rounded to; and whether there are any."""
    states = source.optimizer.states if source.optimizer is not None else {}
    found = {name: states.get(name, {}).get(MASTER, tensor) for name, tensor in source.model.items()}
    replaced = any(found[name] is not tensor for name, tensor in source.model.items())
    return {name: replace(tensor, name=name) for name, tensor in found.items()}, replaced
