"""Which pipeline stages wrote a checkpoint's tensors, from the ranks that wrote its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.checkpoint.format.manifest import Manifest, TensorEntry

MODEL = "model"  # the group of a model's tensors


def stages_of(manifest: Manifest, tensor: TensorEntry) -> list[int]:
    """The pipeline ranks that wrote a tensor: one, or the first and the last of a tied table; none where the checkpoint
    is not that of a pipeline. All tensors of a file are held by the same ranks."""
    size = manifest.mesh.get("pp", 1)
    if size == 1:
        return []
    ranks = {rank for index, _ in tensor.slices for rank, _ in manifest.files[index].writers}
    return sorted({rank * size // manifest.world_size for rank in ranks})  # the outermost axis


def stages_text(stages: list[int]) -> str:
    """`stage 0`, `stages 0 and 1`; nothing where there are none."""
    if not stages:
        return ""
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


def stage_lines(manifest: Manifest) -> list[str]:
    """A line for each stage: how many of the model's tensors it wrote, and of which modules."""
    written: dict[int, list[str]] = defaultdict(list)
    for name, tensor in manifest.tensors.get(MODEL, {}).items():
        for stage in stages_of(manifest, tensor):
            written[stage].append(name)
    return [f"  stage {stage}: {len(names)} tensors: {_modules(names)}" for stage, names in sorted(written.items())]


def _modules(names: Iterable[str]) -> str:
    """The modules of tensors, layers with ranges of their numbers: `wte, h.0-5`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        numbers = layers.setdefault(".".join(parts[:at]) or name, [])
        if parts[at].isdigit():
            numbers.append(int(parts[at]))
    return ", ".join(f"{module}.{_ranges(numbers)}" if numbers else module for module, numbers in layers.items())


def _ranges(numbers: Iterable[int]) -> str:
    """`0-2+6-8` of 0, 1, 2, 6, 7, 8."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after > before + 1)]
    ends = [*(before for before, after in pairwise(ordered) if after > before + 1), ordered[-1]]
    return "+".join(f"{first}-{last}" if last > first else str(first) for first, last in zip(starts, ends, strict=True))
