"""DeepSpeed's ZeRO checkpoints: every stage, any number of ranks, and what is refused. `prove`: DeepSpeed writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.hf_model import write_model_folder
from stepmark.interchange.sources.foreign import ImportOptions
from tests.interchange.test_import import SILENT, check, refused, take
from tests.support.foreign_checkpoints import STEP, Truth, deepspeed_folder, truth

STEP_FOLDER = f"global_step{STEP}"


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_stage_and_number_of_ranks(stage: int, ranks: int, tmp_path: Path) -> None:
    expected = truth()
    source = deepspeed_folder(tmp_path / "source", expected, stage, ranks)
    check(take(source, tmp_path / "out"), expected)
    assert open_foreign(source, ImportOptions()).mesh == {"dp": ranks}


@pytest.mark.parametrize(("stage", "ranks"), [(2, 3), (3, 3), (3, 1)])
def test_frozen_parameters_of_a_model_in_bf16(stage: int, ranks: int, tmp_path: Path) -> None:
    drawn = truth()
    trained = {name: moments for name, moments in drawn.moments.items() if "layers.0" not in name}
    source = deepspeed_folder(tmp_path / "source", drawn, stage, ranks, frozen="layers.0", bf16=True)
    masters = {name: {**moments, "master": drawn.model[name]} for name, moments in trained.items()}
    low = {name: tensor.bfloat16() for name, tensor in drawn.model.items()}
    check(take(source, tmp_path / "out"), Truth(low, masters))
    write_model_folder(open_foreign(source, ImportOptions(model_only=True)), tmp_path / "model", SILENT)
    model = load_file(tmp_path / "model" / "model.safetensors")  # as zero_to_fp32.py has it
    assert all(torch.equal(model[name], drawn.model[name] if name in trained else low[name]) for name in model)


@pytest.mark.parametrize("name", [0, ("a",), b"a"])
def test_names_that_are_none(name: Any, tmp_path: Path) -> None:
    source = deepspeed_folder(tmp_path / "source", truth(), stage=3)
    for path in (source / STEP_FOLDER).glob("*_model_states.pt"):
        content = torch.load(path, weights_only=True)
        shapes, module = content["param_shapes"][0], content["module"]
        first = next(iter(shapes))
        content["param_shapes"][0] = {name: shapes.pop(first), **shapes}
        content["module"] = {name: module.pop(first), **module}
        torch.save(content, path)
    with pytest.raises((CheckpointDamaged, CheckpointMismatch)):
        open_foreign(source, ImportOptions())


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_rank_that_is_missing(kind: str, tmp_path: Path) -> None:
    source = deepspeed_folder(tmp_path / "source", truth())
    (source / STEP_FOLDER / f"zero_pp_rank_2_mp_rank_00_{kind}_states.pt").unlink()
    refused(source, tmp_path, CheckpointDamaged, "rank 2 is missing")


def change(path: Path, *keys: Any, value: Any) -> None:
    """Replaces a value in a file of torch.save; None removes it."""
    content = inner = torch.load(path, weights_only=True)
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    torch.save(content, path)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("zero_stage",), 4, "zero_stage"),
        (("fp32_flat_groups", 1), torch.zeros(9), "of several saves"),
        (("fp32_flat_groups",), [torch.zeros(9)], "not those of the optimizer"),
        (("optimizer_state_dict", "state", 0, "exp_avg"), torch.zeros(9), "not as long as its weights"),
        (("optimizer_state_dict", "state", 0, "exp_avg"), None, "not in one dim"),
        (("optimizer_state_dict",), [{"exp_avg": torch.zeros(9)}], "elastic_checkpoint"),
    ],
)
def test_files_that_do_not_fit(keys: tuple[Any, ...], value: Any, said: str, tmp_path: Path) -> None:
    source = deepspeed_folder(tmp_path / "source", truth())
    path = source / STEP_FOLDER / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    change(path, "optimizer_state_dict", *keys, value=value)
    with pytest.raises((CheckpointDamaged, CheckpointMismatch), match=said):
        open_foreign(source, ImportOptions())


def test_values_that_are_in_no_file(tmp_path: Path) -> None:
    """ZeRO-3 leaves empty tensors in the module, which stand for nothing without the frozen parameters' shapes."""
    source = deepspeed_folder(tmp_path / "source", truth(), frozen="layers.0")
    change(source / STEP_FOLDER / "zero_pp_rank_0_mp_rank_00_model_states.pt", "frozen_param_shapes", value=None)
    refused(source, tmp_path, CheckpointDamaged, "are not there", "layers.0")


def test_what_zero_does_not_divide_alone(tmp_path: Path) -> None:
    source = deepspeed_folder(tmp_path / "source", truth())
    (source / STEP_FOLDER / "layer_00-model_states.pt").write_bytes(b"")
    refused(source, tmp_path, CheckpointMismatch, "stages, experts or tensor parallel ranks")
    (source / "adapter_config.json").write_text("{}")
    refused(source, tmp_path, CheckpointMismatch, "adapter")


def test_without_zero(tmp_path: Path) -> None:
    step = deepspeed_folder(tmp_path / "source", truth(), 1, 1) / STEP_FOLDER
    (step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused(step.parent, tmp_path, CheckpointDamaged, "rank 0 is missing")
    change(step / "mp_rank_00_model_states.pt", "param_shapes", value=None)
    refused(step.parent, tmp_path, CheckpointMismatch, "saved without ZeRO")


WRITE = """
import sys
import torch, deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaConfig, LlamaForCausalLM
out, stage, dtype, tied = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "tied"
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
config = LlamaConfig(**sizes, vocab_size=67, tie_word_embeddings=tied)
model = LlamaForCausalLM(config)
model.model.layers[0].requires_grad_(False)
named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
groups = [{"params": [p for n, p in named if ("norm" in n) == norm], "weight_decay": 0.1 * norm} for norm in (0, 1)]
settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage, "sub_group_size": 3000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, dtype: {"enabled": True}}
engine = deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]
for _ in range(3):
    tokens = torch.randint(0, 67, (2, 8))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
engine.save_checkpoint(out)
config.save_pretrained(out)
"""


@pytest.mark.prove
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_checkpoints(stage: int, dtype: str, tied: str, tmp_path: Path) -> None:
    """The weights are those of zero_to_fp32.py, the moments those of ds_to_universal.py."""
    pytest.importorskip("deepspeed")
    (tmp_path / "write.py").write_text(WRITE)
    source, environment = tmp_path / "source", {**os.environ, "DS_ACCELERATOR": "cpu"}
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    written = [str(tmp_path / "write.py"), str(source), str(stage), dtype, tied]
    subprocess.run([*launched, *written], env=environment, check=True)
    given = ["--input_folder", str(source / STEP_FOLDER), "--output_folder", str(tmp_path / "universal")]
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *given, "--inject_missing_state"]
    subprocess.run(convert, env=environment, check=True)
    fp32 = [str(source / "zero_to_fp32.py"), str(source), str(tmp_path / "fp32")]
    subprocess.run([sys.executable, *fp32], env=environment, check=True)
    write_model_folder(open_foreign(source, ImportOptions(model_only=True)), tmp_path / "model", SILENT)
    found = load_file(tmp_path / "model" / "model.safetensors")
    expected = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    states = load_file(take(source, tmp_path / "out") / "optimizer" / "optimizer.safetensors")
    trained = {name.rsplit("/", 1)[0] for name in states}
    assert trained
    assert trained <= expected.keys()  # of frozen parameters, and of both names of tied ones, the converters differ
    for name, tensor in found.items():
        assert name not in expected or torch.equal(tensor.float(), expected[name].float()), name
    for name in trained:
        for key in ("exp_avg", "exp_avg_sq"):
            value = torch.load(tmp_path / "universal" / "zero" / name / f"{key}.pt", weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            assert torch.equal(states[f"{name}/{key}"].flatten(), value.flatten()), (name, key)
