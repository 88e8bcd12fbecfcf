"""What ranks run in the tests of loading: real meshes, told by plain values."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from stepmark.parallel.loading.load import load_for_parallelism
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of
from stepmark.sharding.views import copy_slices
from tests.support.counted_reads import counted_reads


def compare(folder: str, how: str, options: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Makes the model of a folder in parts, and whole; which parameters differ from their parts of the whole."""
    mesh = Mesh.create(tensor_parallel_size=options.pop("tp"), device=device)
    whole = _make(folder, how)
    state = torch.get_rng_state()
    torch.manual_seed(99)
    with load_for_parallelism(mesh, **options):
        model = _make(folder, how)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    different = sorted(found.keys() ^ expected.keys())
    different += [name for name, each in found.items() if not _equal(mesh, each, expected[name])]
    parameters = list(model.parameters())
    return {
        "different": different,
        "devices": sorted({str(each.device.type) for each in [*parameters, *model.buffers()]}),
        "cut": sum(layout_of(each) is not None for each in parameters),
        "same_draws": torch.equal(torch.get_rng_state(), state),
        "loss": _loss(model, mesh, device),
        "whole_loss": _loss(whole, mesh, "cpu"),
    }


def _make(folder: str, how: str) -> Any:
    if how == "new":
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(99)
    return AutoModelForCausalLM.from_pretrained(folder)


def _equal(mesh: Mesh, local: nn.Parameter, whole: Tensor) -> bool:
    (values,) = mesh.runtime.to_host([local])
    layout = layout_of(local)
    if layout is None:
        return torch.equal(values, whole)
    wanted = torch.zeros_like(values)
    copy_slices(whole.detach(), wanted, layout)
    return torch.equal(values, wanted)


def _loss(model: nn.Module, mesh: Mesh, device: str) -> float:
    tokens = torch.arange(24).view(2, 12) % 61
    model.eval()
    if device != "cpu":
        tokens = mesh.runtime.place(tokens)
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens.clone()).loss
    return float(mesh.runtime.to_host([loss.view(1)])[0])


def measure(folder: str, how: str, tp: int, pp: int = 1) -> dict[str, int]:
    """Bytes of: memory at its peak over that before, what was asked of the files, the shard, the whole, the largest."""
    mesh = Mesh.create(tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    sizes = [each.nbytes for each in whole.parameters()]
    del whole
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    with counted_reads() as reads, load_for_parallelism(mesh):
        model = (AutoModelForCausalLM.from_pretrained if how == "folder" else _new)(config if how == "new" else folder)
    peak = _status("VmHWM") - before
    held = list(model.parameters())
    return {
        "peak": peak,
        "asked": reads.count,
        "shard": sum(each.nbytes for each in held),
        "replicated": sum(each.nbytes for each in held if layout_of(each) is None),
        "whole": sum(sizes),
        "largest": max(sizes),
    }


def _new(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
