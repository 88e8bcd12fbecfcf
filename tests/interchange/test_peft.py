"""LoRA runs of transformers' Trainer: they go on with ours, and ours with it, as if nothing had changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

peft = pytest.importorskip("peft")

import transformers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import stepmark  # noqa: E402
from stepmark.errors import CheckpointMismatch  # noqa: E402
from stepmark.interchange.export_checkpoint import export_checkpoint  # noqa: E402
from stepmark.interchange.recognition import open_foreign  # noqa: E402
from stepmark.interchange.sources.foreign import ImportOptions  # noqa: E402
from tests.interchange.test_import import take  # noqa: E402
from tests.support.models import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
STEP, LAST = 3, 8
PLAIN: dict[str, Any] = {"modules_to_save": ["norm"]}  # one parameter that does not decay: two groups
KINDS = [
    PLAIN,
    pytest.param({"use_dora": True}, marks=pytest.mark.prove),
    pytest.param({"use_rslora": True, "modules_to_save": ["lm_head"]}, marks=pytest.mark.prove),
    pytest.param({"rank_pattern": {"v_proj": 2}, "layers_to_transform": [1]}, marks=pytest.mark.prove),
]


@pytest.mark.parametrize("bare", [False, True])
def test_an_adapter_alone_is_no_model(tmp_path: Path, bare: bool) -> None:
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    other = file.rename(tmp_path / "renamed.safetensors") if bare else tmp_path / "adapter"
    with pytest.raises(CheckpointMismatch, match="is an adapter of PEFT and no model: import the checkpoint-N folder"):
        open_foreign(other, ImportOptions())


class OneSample(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same sample again and again, in any order; the first label, which no loss has, is left out."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(3))
        labels = tokens.clone()
        labels[0] = -100
        return {"input_ids": tokens, "labels": labels}


def base(folder: Path) -> Path:
    torch.manual_seed(0)
    build("llama").save_pretrained(folder)
    return folder


def adapted(folder: Path, lora: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    modules = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": modules, **lora})
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


def losses(program: Any, folder: Path, lora: dict[str, Any], resume: Path | None = None, **others: Any) -> list[float]:
    """Of each step; `program` is transformers or stepmark."""
    fields = {"max_steps": LAST, "learning_rate": 1e-2, "weight_decay": 0.1, "save_steps": STEP, "logging_steps": 1}
    fields |= {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, **others}
    fields |= {"use_cpu": True} if program is transformers else {"device": "cpu"}
    args = program.TrainingArguments(output_dir=str(folder), **fields)
    trainer = program.Trainer(adapted(folder.parent / "base", lora), args, train_dataset=OneSample())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def moments(folder: Path) -> list[torch.Tensor]:
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return [state[number][key] for number in sorted(state) for key in sorted(state[number])]


@pytest.mark.parametrize("lora", KINDS)
def test_a_run_goes_on_here_and_there(lora: dict[str, Any], tmp_path: Path) -> None:
    base(tmp_path / "base")
    whole = losses(transformers, tmp_path / "peer", lora)
    theirs = tmp_path / "peer" / f"checkpoint-{STEP}"
    own = take(theirs, tmp_path / "own" / theirs.name)
    assert losses(stepmark, tmp_path / "own", lora, own) == pytest.approx(whole, abs=1e-6)
    back = tmp_path / "back" / theirs.name
    export_checkpoint(own, back, "hf-trainer")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(one, other) for one, other in zip(moments(theirs), moments(back), strict=True))
    assert losses(transformers, tmp_path / "back", lora, back) == pytest.approx(whole, abs=1e-6)


def test_a_run_of_ours_goes_on_there(tmp_path: Path) -> None:
    base(tmp_path / "base")
    whole = losses(stepmark, tmp_path / "own", PLAIN)
    out = tmp_path / "peer" / f"checkpoint-{STEP}"
    export_checkpoint(tmp_path / "own" / out.name, out, "hf-trainer")
    assert losses(transformers, tmp_path / "peer", PLAIN, out)[-(LAST - STEP) :] == pytest.approx(
        whole[STEP:], abs=1e-6
    )
    with pytest.raises(CheckpointMismatch, match="is of an adapter, which --to dcp does not write"):
        export_checkpoint(tmp_path / "own" / out.name, tmp_path / "dcp", "dcp")


def test_what_does_not_fit(tmp_path: Path) -> None:
    """Another scale, of which no tensor tells, and a base model that is not here."""
    base(tmp_path / "base")
    losses(transformers, tmp_path / "peer", PLAIN, max_steps=STEP)
    theirs = tmp_path / "peer" / f"checkpoint-{STEP}"
    own = take(theirs, tmp_path / "own" / theirs.name)
    with pytest.raises(CheckpointMismatch, match="its adapter, lora_alpha was 8 and is now 16"):
        losses(stepmark, tmp_path / "own", {**PLAIN, "lora_alpha": 16}, own)
    said = json.loads((theirs / "adapter_config.json").read_text())
    (theirs / "adapter_config.json").write_text(json.dumps({**said, "r": 2}))
    with pytest.raises(CheckpointMismatch, match=r"lora_A.weight' is \[4, .*\], and \[2, "):
        open_foreign(theirs, ImportOptions())
    (theirs / "adapter_config.json").write_text(json.dumps({**said, "use_new_kind": True}))
    with pytest.raises(CheckpointMismatch, match="does not know use_new_kind of the adapter"):
        open_foreign(theirs, ImportOptions())
    (theirs / "adapter_config.json").write_text(json.dumps({**said, "base_model_name_or_path": "no/such-model"}))
    with pytest.raises(CheckpointMismatch, match="adapter of no/such-model, which is not on this machine.*--config"):
        open_foreign(theirs, ImportOptions())
    assert open_foreign(theirs, ImportOptions(config=tmp_path / "base" / "config.json")).optimizer is not None
    assert open_foreign(theirs, ImportOptions(model_only=True)).adapter
