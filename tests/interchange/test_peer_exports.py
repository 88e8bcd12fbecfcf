"""Checkpoints that the peers' own code wrote go in and out again: what comes out equals theirs file by file.

STEPMARK_PEER_CHECKPOINTS names the folder with them, as for test_peer_checkpoints.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.export_checkpoint import export_checkpoint
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.export_plan import ExportOptions
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from tests.interchange.test_peer_checkpoints import FOLDERS, ROOT, SILENT, VARIABLE, described, loaded

NEURON = {
    "on_tp1_dp2": {},
    "on_tp2_plain": {"tp": 2},
    "on_tp2_xser": {"tp": 2},
    "on_tp2_trained_xser": {"tp": 2},
    "on_tp2_pp2_plain": {"tp": 2, "pp": 2},
    "on_tp4_gqa_kv_replicated_xser": {"tp": 4},
    "on_tp4_gqa_trained_plain": {"tp": 4},
    "on_tp2_zero1_trained_bf16_master_plain": {"tp": 2},
    "nxd_tp2_dp2_no_zero_plain": {"tp": 2},
    "nxd_tp2_pp2_dp2_zero1_bf16_master_plain": {"tp": 2, "pp": 2, "dp": 2},
    "nxd_tp4_dp2_gqa_kv_replicated_xser": {"tp": 4, "dp": 2},
}
OTHERS = ["dcp_fsdp2_state_dict_api", "dcp_ddp_raw", "titan_fsdp2", "hf5_trainer", "hf5_trainer_tied", "hf4_trainer"]

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not FOLDERS, reason=f"{VARIABLE} names no folder of other tools' checkpoints"),
]


class Reference:
    """Stands for a tensor that is in a file of its own."""

    tid: int


class InternalReference(Reference):
    pass


REFERENCES = [
    (Reference, "torch_xla.utils.serialization.TensorReference"),
    (InternalReference, "neuronx_distributed.trainer.checkpoint._InternalTensorReference"),
]


def contents(path: Path) -> Any:
    """A file of torch.save, with the tensors that it refers to."""

    def resolved(value: Any) -> Any:
        if isinstance(value, Reference):
            return torch.load(f"{path}.tensors/tensor_{value.tid}.pt", weights_only=True)
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        return [resolved(item) for item in value] if isinstance(value, list | tuple) else value

    with torch.serialization.safe_globals(REFERENCES):  # type: ignore[arg-type]
        return resolved(torch.load(path, weights_only=True))


def check_same(theirs: Any, ours: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert list(theirs) == list(ours), where
        for key in theirs:
            check_same(theirs[key], ours[key], f"{where}/{key}")
    elif isinstance(theirs, torch.Tensor):
        assert theirs.dtype == ours.dtype, where
        assert torch.equal(theirs, ours), where
    elif isinstance(theirs, list):
        assert len(theirs) == len(ours), where
        for number, pair in enumerate(zip(theirs, ours, strict=True)):
            check_same(*pair, f"{where}/{number}")
    else:
        assert theirs == ours, where


def taken(name: str, out: Path) -> Path:
    """The peer's checkpoint as ours."""
    source, _ = described(ROOT / name)
    config = None if (source / "config.json").exists() else ROOT / name / "truth" / "config.json"
    write_checkpoint(open_foreign(source, ImportOptions(config=config)), out, SILENT)
    return out


@pytest.mark.parametrize("name", list(NEURON))
def test_files_of_ranks_equal_theirs(name: str, tmp_path: Path) -> None:
    form = "nxd" if name.startswith("nxd") else "optimum-neuron"
    theirs, _ = described(ROOT / name)
    export_checkpoint(taken(name, tmp_path / "own"), tmp_path / "out", form, ExportOptions(**NEURON[name]))
    ours = tmp_path / "out" / theirs.name if form == "nxd" else tmp_path / "out"
    files = [path.relative_to(theirs) for path in theirs.rglob("*.pt") if ".pt." not in str(path.relative_to(theirs))]
    assert len(files) > 2
    for file in files:
        if file.name == "user_content.pt":  # the user's own
            continue
        value = contents(theirs / file), contents(ours / file)
        for one in value if file.parent.name == "model" else ():
            drop_other_stages(one, theirs, file)
        # moments of norms differ from rank to rank there; ours are those of the first
        if not (name == "on_tp2_zero1_trained_bf16_master_plain" and "optim/dp_rank_00_tp_rank_01" in str(file)):
            check_same(*value, str(file))
    for path in theirs.rglob("mp_metadata*.json"):
        assert json.loads(path.read_bytes()) == json.loads((ours / path.relative_to(theirs)).read_bytes())


def drop_other_stages(state: dict[str, Any], theirs: Path, file: Path) -> None:
    """optimum-neuron's files have the other stages' tensors too, in memory that was never written to."""
    path = theirs / "shards" / f"mp_metadata_pp_rank_{int(file.stem[-2:])}.json"
    if path.exists():
        own = json.loads(path.read_bytes())["parameters"]
        for name in [name for name in state if name not in own]:
            del state[name]


@pytest.mark.parametrize("name", [*OTHERS, *NEURON])
@pytest.mark.parametrize("form", ["dcp", "hf-trainer", "nxd"])
def test_any_format_has_the_truth(form: str, name: str, tmp_path: Path) -> None:
    """Out in another format, and in again."""
    own = taken(name, tmp_path / "own")
    options = {"tp": 2, "pp": 2, "dp": 3} if form == "nxd" else {}
    if form == "nxd" and "tied" in name:
        with pytest.raises(CheckpointMismatch, match="the embeddings are tied"):
            export_checkpoint(own, tmp_path / "out", form, ExportOptions(**options))
        assert not (tmp_path / "out").exists()
        return
    export_checkpoint(own, tmp_path / "out", form, ExportOptions(**options))
    write_checkpoint(open_foreign(tmp_path / "out", ImportOptions()), tmp_path / "back", SILENT)
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        before, after = loaded(tmp_path / "own" / file), loaded(tmp_path / "back" / file)
        if form == "hf-trainer" and any(
            key.endswith("/master") for key in loaded(own / "optimizer/optimizer.safetensors")
        ):
            masters = loaded(own / "optimizer/optimizer.safetensors")
            before = {
                key: masters.get(f"{key}/master", tensor) for key, tensor in before.items() if "/master" not in key
            }
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), file
