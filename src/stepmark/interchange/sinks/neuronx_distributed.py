"""Folders that neuronx-distributed's `load_checkpoint(OUT)` reads: a tag with a file for each rank."""

from __future__ import annotations

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.sinks.export_plan import ExportOptions, ExportPlan, optimizer_of
from stepmark.interchange.sinks.neuron_cutting import HEAD, neuron_model
from stepmark.interchange.sinks.neuron_output import has_masters, optimizer_files, weight_files
from stepmark.interchange.sinks.output_files import DataFile, copied_files, torch_file
from stepmark.interchange.sources.foreign import ForeignCheckpoint


def plan(source: ForeignCheckpoint, options: ExportOptions) -> ExportPlan:
    """The files of a folder with one tag, and the model's config beside it."""
    optimizer = optimizer_of(source)
    if HEAD in source.tied:
        raise CheckpointMismatch(
            f"{source.folder}: the embeddings are tied, which neuronx-distributed's models are not; untie them, or use "
            "--to optimum-neuron"
        )
    model = neuron_model(source, options)
    dp = options.dp or (1 if has_masters(source) else None)
    step = source.step or 0
    tag = f"step_{step}"
    found = ExportPlan()
    found.files += weight_files(source, model, f"{tag}/model")
    found.files += optimizer_files(source, model, optimizer.groups, f"{tag}/optim", dp)
    if source.schedule is not None:
        found.files.append(torch_file(f"{tag}/scheduler.pt", dict(source.schedule)))
    epoch = int((source.trainer_state or {}).get("epoch") or 0)
    found.files.append(torch_file(f"{tag}/user_content.pt", {"total_steps": step, "epoch": epoch}))
    found.files += [DataFile(f"{tag}/checkpoint", b"1"), DataFile(f"{tag}/done", b"1"), *copied_files(source)]
    if dp is None:
        found.notes.append("the optimizer is whole; for a run with ZeRO-1, give its data parallel ranks with --dp")
    else:
        found.notes.append(
            f"the optimizer is that of ZeRO-1 over {dp} data parallel rank{'s' if dp > 1 else ''} (--dp)"
        )
    if model.heads.copies > 1:
        found.notes.append(f"key/value heads are replicated: kv_size_multiplier {model.heads.copies}, as on trn1")
    return found
