"""Real meshes make models in parts: the bits of the whole one, from their own bytes, in little memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from stepmark.parallel.loading.load import load_for_parallelism
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of
from stepmark.sharding.views import copy_slices
from tests.parallel.loading.test_load import CONFIGS
from tests.support.counted_reads import counted_reads
from tests.support.ranks import Ranks


@pytest.mark.parametrize(
    ("family", "how", "embedding"),
    [("gpt2", "new", True), ("gpt2", "folder", False), ("llama", "new", False), ("llama", "folder", True)],
)
def test_a_mesh_starts_from_the_unsharded_models_bits(
    ranks: Ranks, tmp_path: Path, family: str, how: str, embedding: bool
) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family](tie_word_embeddings=family == "gpt2"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    options: dict[str, Any] = {"tp": 2, "parallelize_embedding": embedding}
    for found in ranks.run(compare, str(tmp_path), how, options, nproc=2).check():
        assert found["different"] == []
        assert found["devices"] == ["cpu"]
        assert found["cut"] > 0
        assert found["same_draws"]
        assert found["loss"] == pytest.approx(found["whole_loss"], rel=1e-5)


@pytest.mark.xla
def test_parameters_end_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).save_pretrained(tmp_path)
    for found in ranks.run(compare, str(tmp_path), "folder", {"tp": 2}, "xla", nproc=2).check():
        assert found["different"] == []
        assert found["devices"] == ["xla"]
        assert found["loss"] == pytest.approx(found["whole_loss"], rel=1e-4)


def large_folder(folder: Path, layers: int) -> None:
    """A model of zeros with a big vocabulary, in files of one layer or so."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16000,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = {name: torch.zeros(each.shape) for name, each in model.state_dict().items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


@pytest.mark.parametrize(
    ("layers", "how"),
    [
        (3, "folder"),
        *(pytest.param(*case, marks=pytest.mark.prove) for case in ((3, "new"), (15, "folder"), (15, "new"))),
    ],
)
def test_bytes_read_and_memory_held(ranks: Ranks, tmp_path: Path, how: str, layers: int) -> None:
    large_folder(tmp_path, layers)
    for found in ranks.run(measure, str(tmp_path), how, 2, nproc=2).check():
        assert found["peak"] <= found["shard"] + found["largest"] + (256 << 20 if layers > 3 else 64 << 20)
        if how == "folder":
            assert found["asked"] - found["replicated"] <= (found["whole"] - found["replicated"]) * (0.5 + 0.05)


@pytest.mark.prove
@pytest.mark.parametrize("how", ["folder", "new"])
def test_a_pipeline_stage_reads_its_bytes_and_holds_little_more(ranks: Ranks, tmp_path: Path, how: str) -> None:
    large_folder(tmp_path, 15)
    held = []
    for found in ranks.run(measure, str(tmp_path), how, 1, 2, nproc=2).check():
        print(f"{how}: {found}")
        assert found["peak"] <= found["shard"] + 100 * 10**6
        assert how == "new" or found["asked"] == found["shard"]
        held.append(found["shard"])
    assert sum(held) == found["whole"]
    assert max(held) < 0.7 * found["whole"]


# What ranks run


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
