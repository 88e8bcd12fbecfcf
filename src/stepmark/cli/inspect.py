"""`stepmark inspect CHECKPOINT_OR_RUN [--json]`"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, find_checkpoints, step_of
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import MANIFEST, MODEL, WRITTEN, Manifest, TensorEntry, read_manifest
from stepmark.errors import CheckpointDamaged, CheckpointNotFound
from stepmark.filesystem.local_paths import RECORDS
from stepmark.trainer.telemetry.progress import aligned

if TYPE_CHECKING:
    from stepmark.report.history import History

TAKES = {"checkpoint": RECORDS}
HELP = "show what a checkpoint holds (step, mesh, tensors, files), or how a run is doing"
SHOWN = "step save time software world_size mesh model_only sections metrics metadata"  # fields of a manifest, as JSON
RUN_FILES = ("status.json", "failures")  # a run that fails before it trains may have no status
CONFIG_HELP = "config.json of the model, for checkpoints of other tools that have none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="PATH", type=Path, help="a checkpoint-N folder, or a run's output_dir")
    parser.add_argument("--config", metavar="FILE", type=Path, help=CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Prints the checkpoint or the run; returns 0. Raises CheckpointNotFound or CheckpointDamaged. Of
    another tool's checkpoint it shows what can be told without its model's config."""
    from stepmark.cli.foreign_checkpoints import is_foreign, show_foreign

    if is_foreign(parsed.checkpoint):
        return show_foreign(parsed.checkpoint, parsed.config, parsed.json)
    if not parsed.checkpoint.is_dir():
        raise CheckpointNotFound(f"there is no checkpoint {parsed.checkpoint}; name a checkpoint-N folder, or a run's")
    is_run = any((parsed.checkpoint / each).exists() for each in RUN_FILES) or checkpoints(parsed.checkpoint)
    if is_run and not (parsed.checkpoint / MANIFEST).exists():
        from stepmark.report.history import read_history

        run_summary = summarize(read_history(parsed.checkpoint, recent=True))
        print(json.dumps(run_summary, indent=2) if parsed.json else "\n".join(_lines_of_run(run_summary)))
        return 0
    manifest = read_manifest(find_checkpoints(parsed.checkpoint)[0])
    written = _written(parsed.checkpoint, manifest)
    if parsed.json:
        print(json.dumps(_to_json(manifest) | {"written": written}, indent=2))
    else:
        print("\n".join(_lines(manifest, written)))
    return 0


def _written(checkpoint: Path, manifest: Manifest) -> list[str]:
    """The names under which `save_pretrained` writes what it changes; none where `stepmark verify` finds damage."""
    from stepmark.checkpoint.format.integrity import read_values

    with contextlib.suppress(CheckpointDamaged):
        form = read_values(checkpoint, manifest).get(MODEL, {}).get(WRITTEN, {})
        return [name for name, view in form.items() if view is not None]
    return []


def _bytes(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * item_size(tensor.dtype)


def _placement(tensor: TensorEntry) -> str:
    """How the tensor is sharded in the files, as text."""
    slices = [tensor_slice for _, tensor_slice in tensor.slices]
    if len(slices) == 1 and slices[0].is_full(tensor.shape):
        return "unsharded"
    if not all(tensor_slice.is_box for tensor_slice in slices):
        return f"{len(slices)} ranges"
    sharded = [
        dim
        for dim, size in enumerate(tensor.shape)
        if any(tensor_slice.box.lengths[dim] != size for tensor_slice in slices)
    ]
    dims = ", ".join(map(str, sharded))
    return f"{len(slices)} shards along dim{'s' if len(sharded) > 1 else ''} {dims}"


def _place(manifest: Manifest, tensor: TensorEntry) -> str:
    """How the tensor is sharded, and which pipeline stages wrote it: `unsharded, stages 0 and 1`."""
    stages = _stages_of(manifest, tensor)
    written = [f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"] if stages else []
    return ", ".join([_placement(tensor), *written])


def _lines(manifest: Manifest, written: list[str]) -> list[str]:
    size = sum(file.size for file in manifest.files)
    mesh = " x ".join(f"{axis} {count}" for axis, count in manifest.mesh.items())
    software = ", ".join(f"{name} {version}" for name, version in manifest.software.items())
    lines = [
        f"step      {manifest.step}" + ("  (model only)" if manifest.model_only else ""),
        f"saved     {datetime.fromtimestamp(manifest.time).astimezone():%Y-%m-%d %H:%M:%S %z} by {software}",
        f"mesh      {mesh}  ({manifest.world_size} rank{'s' if manifest.world_size > 1 else ''})",
        f"sections  {', '.join(f'{name} ({kind})' for name, kind in manifest.sections.items())}",
    ]
    if manifest.metrics:
        lines.append(f"metrics   {', '.join(f'{name} {value}' for name, value in manifest.metrics.items())}")
    if written:
        lines.append(
            f"names     those in memory; `stepmark consolidate` writes {len(written)} tensors as save_pretrained does "
            f"({written[0]}, …)"
        )
    by_stage: dict[int, list[str]] = defaultdict(list)
    for name, tensor in manifest.tensors.get("model", {}).items():
        for stage in _stages_of(manifest, tensor):
            by_stage[stage].append(name)
    if by_stage:
        stages = sorted(by_stage.items())
        lines += ["", "pipeline", *(f"  stage {at}: {len(each)} tensors: {_modules(each)}" for at, each in stages)]
    lines += ["", f"{len(manifest.files)} files, {size / 1e6:.1f} MB"]
    width = max((len(file.name) for file in manifest.files), default=0)
    lines += [f"  {file.name:{width}}  {file.size:>15,}" for file in manifest.files]
    for group, tensors in manifest.tensors.items():
        total = sum(_bytes(tensor) for tensor in tensors.values())
        lines += ["", f"{group}: {len(tensors)} tensor{'s' if len(tensors) > 1 else ''}, {total / 1e6:.1f} MB"]
        rows = [(name, t.dtype, str(list(t.shape)), _place(manifest, t)) for name, t in tensors.items()]
        lines += [f"  {line}" for line in aligned(rows)]
    return lines


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        **{name: getattr(manifest, name) for name in SHOWN.split()},
        "files": [{"name": file.name, "bytes": file.size, "digest": file.digest} for file in manifest.files],
        "tensors": [
            {
                "group": group,
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": _bytes(tensor),
                "placement": _placement(tensor),
                "stages": _stages_of(manifest, tensor),
                "pieces": [
                    {
                        "file": manifest.files[index].name,
                        "offsets": list(tensor_slice.box.offsets),
                        "lengths": list(tensor_slice.box.lengths),
                        "range": None if tensor_slice.is_box else [tensor_slice.start, tensor_slice.stop],
                    }
                    for index, tensor_slice in tensor.slices
                ],
            }
            for group, tensors in manifest.tensors.items()
            for name, tensor in tensors.items()
        ],
    }


def _stages_of(manifest: Manifest, tensor: TensorEntry) -> list[int]:
    """The pipeline ranks that wrote a tensor: one, or the first and the last of a tied table; none where the checkpoint
    is not that of a pipeline. All tensors of a file are held by the same ranks."""
    size = manifest.mesh.get("pp", 1)
    if size == 1:
        return []
    ranks = {rank for index, _ in tensor.slices for rank, _ in manifest.files[index].writers}
    return sorted({rank * size // manifest.world_size for rank in ranks})  # the outermost axis


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
    found = set(numbers)
    starts = sorted(number for number in found if number - 1 not in found)
    ends = sorted(number for number in found if number + 1 not in found)
    return "+".join(f"{first}-{last}" if last > first else str(first) for first, last in zip(starts, ends, strict=True))


def summarize(history: History) -> dict[str, Any]:
    """The state, progress, newest log, best evaluation and checkpoints; None where something is unknown."""
    from stepmark.report.summary import end_of_run, recent_median, unit_of

    status, started = history.status, history.started
    last, best = (history.logs or [{}])[-1], history.best()
    running = history.state == "running"
    return {
        "folder": str(history.folder),
        "state": history.state,
        "reason": status.get("reason"),
        "step": history.last_step,
        "total_steps": status.get("total_steps") or started.get("total_steps"),
        "eta_seconds": status.get("eta_seconds") if running else None,
        "updated": history.last_update,
        "host": status.get("host"),
        "process": status.get("process"),
        "ranks": started.get("ranks"),
        "device": started.get("device_model") or started.get("device"),
        "loss": last.get("loss"),
        "learning_rate": last.get("learning_rate"),
        "tokens_per_second": recent_median(history, "tokens_per_second"),
        "targets": unit_of(history),
        "best": None if best is None else {"metric": best.metric, "step": best.step, "value": best.value},
        "checkpoints": sorted(step for path in checkpoints(history.folder) if (step := step_of(path)) is not None),
        "resumed": len(history.resumptions()),
        "trouble": [told for kind, told in end_of_run(history) if kind != "failed"],
    }


def _lines_of_run(summary: dict[str, Any]) -> list[str]:
    from stepmark.report import text

    total, eta, best = summary["total_steps"], summary["eta_seconds"], summary["best"]
    speed = summary["tokens_per_second"]
    step = text.NOTHING if summary["step"] is None else f"{summary['step']:,}"
    step += f" of {total:,}" if total else ""
    step += f", {text.seconds(eta)} left" if eta is not None else ""
    rows = {
        "state": summary["state"] + (f": {summary['reason']}" if summary["reason"] else ""),
        "step": step + (f", resumed {text.plural(summary['resumed'], 'time')}" if summary["resumed"] else ""),
        "updated": None if summary["updated"] is None else text.moment(summary["updated"]),
        "process": None if summary["process"] is None else f"{summary['process']} on {summary['host']}",
        "devices": summary["device"] and f"{text.plural(summary['ranks'] or 1, 'rank')} on {summary['device']}",
        "loss": None if summary["loss"] is None else text.value(summary["loss"]),
        "speed": speed and f"{speed:,.0f} {summary['targets']}/s",
        "best": best and f"{best['metric']} {text.value(best['value'])} at step {best['step']:,}",
        "saved": ", ".join(f"checkpoint-{step}" for step in summary["checkpoints"]) or "no checkpoint",
    }
    return [*(f"{name:<9} {value}" for name, value in rows.items() if value), *summary["trouble"]]
