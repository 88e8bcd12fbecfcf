"""`stepmark import SOURCE OUT [--tag N] [--model-only] [--config FILE] [--map names.yaml] [--frozen PATTERN …]
[--json]`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import OBJECTS
from stepmark.liveness.gc_pause import without_collection

if TYPE_CHECKING:
    from stepmark.interchange.sources.foreign import ForeignCheckpoint

_SETTINGS = "lr betas eps weight_decay momentum nesterov amsgrad maximize decoupled_weight_decay"
TAKES = {"source": OBJECTS}
HELP = "convert a checkpoint of another tool to a Stepmark checkpoint, or to a Hugging Face model folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="folder or file of the other tool")
    add("out", metavar="OUT", type=Path, help="output folder; must not exist, or be empty")
    add("--tag", metavar="N", help="tag or step, in a folder with several checkpoints")
    add("--model-only", action="store_true", help="write a Hugging Face folder: weights without training state")
    config = "config.json of the model, or its folder, if SOURCE has none"
    add("--config", metavar="FILE", type=Path, help=config)
    add("--map", metavar="NAMES.yaml", type=Path, help="new names for the tensors of a plain state dict")
    heads = "order of the query heads if key/value heads are replicated; natural: as neuronx-distributed's converter "
    heads += "writes them for trn2, which the values cannot tell from trn1's"
    add("--heads", choices=("auto", "natural"), default="auto", help=heads)
    frozen = "names of parameters that were frozen, which optimizers without names leave out: 'model.layers.0.*'"
    add("--frozen", metavar="PATTERN", nargs="+", default=(), help=frozen)
    add("--json", action="store_true", help="print JSON")


def config_file(config: Path | None) -> Path | None:
    """The file that --config names. Raises UsageError where there is none."""
    path = config / "config.json" if config is not None and config.is_dir() else config
    if path is not None and not path.is_file():
        raise UsageError(f"--config: there is no {path}; name a model's config.json, or its folder")
    return path


@without_collection()
def run(parsed: argparse.Namespace) -> int:
    """Imports and says what was found; returns 0. Raises StepmarkError; then nothing was written."""
    from stepmark.cli.progress import BytesProgress
    from stepmark.config.quiet_libraries import leave_out_torch_xla
    from stepmark.interchange.recognition import open_foreign
    from stepmark.interchange.sinks.hf_model import write_model_folder
    from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
    from stepmark.interchange.sources.foreign import ImportOptions
    from stepmark.interchange.sources.name_map import read_map

    leave_out_torch_xla()
    config, names = config_file(parsed.config), read_map(parsed.map) if parsed.map is not None else []
    given = {"tag": parsed.tag, "model_only": parsed.model_only, "heads": parsed.heads, "frozen": parsed.frozen}
    found = open_foreign(parsed.source, ImportOptions(config=config, names=names, **given))
    as_model = parsed.model_only or (found.adapter and found.optimizer is None)
    with BytesProgress("importing") as listener:
        write = write_model_folder if as_model else write_checkpoint
        size = write(found, parsed.out, listener)
    if parsed.json:
        print(json.dumps({**summary(found), "out": str(parsed.out), "bytes": size}, indent=2))
    else:
        print("\n".join([*lines(found), f"{_written(found, as_model)} {parsed.out}: {size / 1e6:,.1f} MB"]))
    return 0


def _written(found: ForeignCheckpoint, as_model: bool) -> str:
    if as_model and found.adapter:
        return "adapter written to"
    if as_model:
        return "model folder written to"
    return "checkpoint written to" if found.optimizer is not None else "checkpoint without training state written to"


def summary(found: ForeignCheckpoint) -> dict[str, Any]:
    """What was found, for machines."""
    optimizer = found.optimizer
    return {
        "source": str(found.folder),
        "kind": found.kind,
        "step": found.step,
        "mesh": found.mesh,
        "model_class": found.architecture,
        "model_tensors": len(found.model),
        "optimizer_parameters": None if optimizer is None else len(optimizer.states),
        "schedule": found.schedule is not None,
        "assumed": found.assumed,
        "lost": found.lost,
    }


def _settings(found: ForeignCheckpoint) -> Iterator[str]:
    """Of the optimizer, which a run has from its arguments, with the values of all groups."""
    groups = [] if found.optimizer is None else found.optimizer.groups
    for name in _SETTINGS.split():
        usual = None, name == "decoupled_weight_decay"  # of AdamW, and else False
        if values := dict.fromkeys(str(each[name]) for each in groups if each.get(name) not in usual):
            yield f"{name} {' and '.join(values)}"


def lines(found: ForeignCheckpoint) -> list[str]:
    """What was found, for people."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items() if size)
    what = [f"model ({len(found.model)} tensors)"]
    if found.optimizer is not None:
        what.append(f"optimizer (states of {len(found.optimizer.states)} parameters)")
    if found.schedule is not None:
        what.append("schedule")
    told = [*_settings(found)]
    step = "" if found.step is None else f", step {found.step}"
    return [
        f"{found.folder}: {found.kind}{step}{f' ({mesh})' if mesh else ''}",
        f"  found: {', '.join(what)}",
        *(["  to be given again, as arguments or with an optimizer: " + ", ".join(told)] if told else []),
        *(f"  assumed: {text}" for text in found.assumed),
        *(f"  not taken: {text}" for text in found.lost),
    ]
