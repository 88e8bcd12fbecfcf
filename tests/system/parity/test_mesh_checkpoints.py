"""Checkpoints of any mesh restore on any other, bit for bit, and become one plain model folder.

All pairs of meshes are tried with GPT-2, whose fused and tied tensors are the hardest; with the other models, and in
bf16, the checkpoints of all meshes are restored on those of FEW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepmark.model_folder.consolidate import consolidate
from stepmark.model_folder.new_folder import WritingListener
from tests.support.mesh_checkpoints import STEPS, checksums
from tests.support.mesh_parity import MODELS
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.mesh_checkpoints:"

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp4": (4, {}),
    "dp4-zero": (4, {"zero_1": True}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4, "sequence": True}),
    "dp2-tp2": (4, {"tp": 2}),
    "dp2-tp2-zero": (4, {"tp": 2, "zero_1": True, "sequence": True}),
    "pp2": (2, {"pp": 2, "accumulation": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2, "sequence": True, "accumulation": 2}),
    "pp2-dp2-zero": (4, {"pp": 2, "zero_1": True, "accumulation": 2}),
}
DEEP = {"num_hidden_layers": 4}
DEEPER_PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, {"pp": 4, "accumulation": 4}),
    "pp2-interleaved": (2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "accumulation": 2}),
    "pp2-dp2-tp2-zero": (8, {"pp": 2, "tp": 2, "zero_1": True, "sequence": True, "accumulation": 2}),
}
MESHES |= DEEPER_PIPELINES
OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": MESHES["dp1"],
    "tp2": MESHES["tp2"],
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "dp2-ep2": (2, {"ep": 2}),
    "dp4-ep2-zero": (4, {"ep": 2, "zero_1": True}),
    "pp2-dp2-ep2": (4, {"pp": 2, "ep": 2, "accumulation": 2}),
}
ALL = MESHES | OF_EXPERTS | {"dp3-zero": (3, {"zero_1": True})}
FEW = ["dp1", "tp4", "dp2-tp2-zero", "pp2-dp2-zero", "pp2-interleaved", "pp2-dp2-tp2-zero"]


def save(ranks: Ranks, folder: Path, mesh: str, model: dict[str, Any], **more: Any) -> dict[str, int]:
    """Saves under the mesh's name."""
    nproc, options = ALL[mesh]
    found = ranks.run(PROGRAMS + "save", str(folder / mesh), {**options, "model": model, **more}, nproc=nproc)
    return found.check()[0]


def check_pairs(
    ranks: Ranks, folder: Path, sources: list[str], targets: list[str], tolerance: float = 1e-5, **options: Any
) -> None:
    """Every checkpoint restored on every mesh and saved there again is the same, and training goes on alike."""
    stored = {source: checksums(folder / source / "checkpoint-1") for source in sources}
    expected: list[Any] = []
    for target in targets:
        nproc, mesh = ALL[target]
        again = folder / "again" / target
        arguments = [[str(folder / source) for source in sources], str(again), {**mesh, **options}]
        found = ranks.run(PROGRAMS + "restore", *arguments, nproc=nproc, timeout=900).check()
        assert all(each == found[0] for each in found)
        for number, source in enumerate(sources):
            assert checksums(again / source / "checkpoint-1") == stored[source], (source, target)
            assert len(found[0][number]) == STEPS
            for ours, theirs in zip(found[0][number], (expected or found[0])[number], strict=True):
                assert ours == pytest.approx(theirs, rel=tolerance), (source, target)
        expected = expected or found[0]


def test_sample(ranks: Ranks, tmp_path: Path) -> None:
    """GPT-2's fused projections are cut one by one, and a part of them under ZeRO-1 stays a few slices."""
    model = MODELS["gpt2"]
    told = save(ranks, tmp_path, "dp2-tp2-zero", model)
    assert told["slices"] <= 4 * 3
    save(ranks, tmp_path, "pp2-tp2", model)
    check_pairs(ranks, tmp_path, ["dp2-tp2-zero", "pp2-tp2"], ["dp1", "dp2-tp2-zero", "pp2-dp2-zero"], model=model)


def test_sample_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """With the fp32 masters, in shares that are not equal, and complete."""
    options = {"model": MODELS["gpt2"], "bf16": True, "batch": 12}
    save(ranks, tmp_path, "dp3-zero", **options)
    check_pairs(ranks, tmp_path, ["dp3-zero"], ["dp1", "dp4-zero"], tolerance=2e-2, **options)


def test_experts_sample(ranks: Ranks, tmp_path: Path) -> None:
    """Their loss has no part that depends on how a batch is cut."""
    model = {"kind": "gpt_oss", "output_router_logits": False}
    save(ranks, tmp_path, "dp4-ep2-zero", model)
    check_pairs(ranks, tmp_path, ["dp4-ep2-zero"], ["dp1", "dp2-ep2"], model=model)


@pytest.mark.prove
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_experts_of_all_pairs(ranks: Ranks, tmp_path: Path, kind: str, bf16: bool) -> None:
    options = {"model": {"kind": kind, "output_router_logits": False}, "bf16": bf16}
    for mesh in OF_EXPERTS:
        save(ranks, tmp_path, mesh, **options)
    check_pairs(ranks, tmp_path, list(OF_EXPERTS), list(OF_EXPERTS), tolerance=2e-2 if bf16 else 1e-5, **options)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "targets"), [("gpt2", list(MESHES)), ("llama-one-kv-head", FEW), ("qwen3-tied", FEW)])
def test_all_pairs(ranks: Ranks, tmp_path: Path, name: str, targets: list[str]) -> None:
    model = {**MODELS[name], **DEEP}
    for mesh in MESHES:
        save(ranks, tmp_path, mesh, model)
    check_pairs(ranks, tmp_path, list(MESHES), targets, model=model)


@pytest.mark.prove
def test_pairs_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """With the fp32 masters, which are what is trained."""
    options = {"model": {**MODELS["gpt2"], **DEEP}, "bf16": True}
    for mesh in MESHES:
        save(ranks, tmp_path, mesh, **options)
    check_pairs(ranks, tmp_path, list(MESHES), FEW, tolerance=2e-2, **options)


@pytest.mark.prove
@pytest.mark.xla
def test_lazy_meshes(ranks: Ranks, tmp_path: Path) -> None:
    """Saved on lazy ranks, restored on eager ones, and the other way round."""
    meshes = ["tp2", "dp2-tp2-zero", "pp2"]
    for mesh in meshes:
        save(ranks, tmp_path, mesh, MODELS["gpt2"], device="xla")
    check_pairs(ranks, tmp_path, meshes, ["dp1", *meshes], model=MODELS["gpt2"])
    check_pairs(ranks, tmp_path, meshes, meshes, tolerance=1e-4, model=MODELS["gpt2"], device="xla")


SILENT = WritingListener(lambda size: None, lambda size: None, lambda problem: None)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", "dp2-tp2-zero"),
        ("llama-one-kv-head", "tp4"),
        pytest.param("gpt2", "pp2-tp2", marks=pytest.mark.prove),
        *(
            pytest.param(name, mesh, marks=pytest.mark.prove)
            for name in ("gpt2", "gpt2-untied", "llama", "llama-tied", "qwen3-tied")
            for mesh in ("tp2", "tp4")
        ),
    ],
)
def test_consolidated_it_is_the_complete_model(ranks: Ranks, tmp_path: Path, name: str, mesh: str) -> None:
    """The weights of one rank, restored and saved on the mesh, come back bit for bit."""
    model = MODELS[name]
    save(ranks, tmp_path, "dp1", model)
    nproc, options = ALL[mesh]
    arguments = [[str(tmp_path / "dp1")], str(tmp_path / mesh), {**options, "model": model}]
    ranks.run(PROGRAMS + "restore", *arguments, nproc=nproc).check()
    consolidate(tmp_path / mesh / "dp1", tmp_path / "out", "safetensors", 20_000, SILENT)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "dp1" / "checkpoint-1").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    tied = model.get("tie_word_embeddings", name == "gpt2")
    embeddings = ("transformer.wte.weight", "model.embed_tokens.weight")
    embedding = next(found[key] for key in embeddings if key in found)
    assert (embedding.data_ptr() == found["lm_head.weight"].data_ptr()) == tied
