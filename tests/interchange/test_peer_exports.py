"""Checkpoints that the peers' own code wrote go in and out again: every value comes back.

STEPMARK_PEER_CHECKPOINTS names the folder with them, as for test_peer_checkpoints.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepmark.interchange.export_checkpoint import export_checkpoint
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from tests.interchange.test_peer_checkpoints import FOLDERS, ROOT, SILENT, VARIABLE, described, loaded

NEURON = [
    "on_tp1_dp2",
    "on_tp2_plain",
    "on_tp2_xser",
    "on_tp2_trained_xser",
    "on_tp2_pp2_plain",
    "on_tp4_gqa_kv_replicated_xser",
    "on_tp4_gqa_trained_plain",
    "on_tp2_zero1_trained_bf16_master_plain",
    "nxd_tp2_dp2_no_zero_plain",
    "nxd_tp2_pp2_dp2_zero1_bf16_master_plain",
    "nxd_tp4_dp2_gqa_kv_replicated_xser",
]
OTHERS = ["dcp_fsdp2_state_dict_api", "dcp_ddp_raw", "titan_fsdp2", "hf5_trainer", "hf5_trainer_tied", "hf4_trainer"]

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not FOLDERS, reason=f"{VARIABLE} names no folder of other tools' checkpoints"),
]


def taken(name: str, out: Path) -> Path:
    """The peer's checkpoint as ours."""
    source, _ = described(ROOT / name)
    config = None if (source / "config.json").exists() else ROOT / name / "truth" / "config.json"
    write_checkpoint(open_foreign(source, ImportOptions(config=config)), out, SILENT)
    return out


@pytest.mark.parametrize("name", [*OTHERS, *NEURON])
@pytest.mark.parametrize("form", ["dcp", "hf-trainer"])
def test_any_format_has_the_truth(form: str, name: str, tmp_path: Path) -> None:
    """Out in another format, and in again."""
    own = taken(name, tmp_path / "own")
    export_checkpoint(own, tmp_path / "out", form)
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
