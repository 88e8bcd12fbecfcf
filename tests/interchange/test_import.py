"""Checkpoints of other tools, written from their formats' descriptions: every value comes along, bit for bit."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stepmark.checkpoint import Checkpointer, dcp
from stepmark.checkpoint.format.verify import verify
from stepmark.cli.main import run
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, UsageError
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from stepmark.interchange.sources.name_map import read_map
from stepmark.model_folder.new_folder import WritingListener
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import WRITERS, Truth, save_dcp, truth
from tests.support.ranks import Ranks

SILENT = WritingListener(lambda size: None, lambda size: None)


def take(source: Path, out: Path, **options: Any) -> Path:
    write_checkpoint(open_foreign(source, ImportOptions(**options)), out, SILENT)
    return out


def check(folder: Path, expected: Truth) -> None:
    model = load_file(folder / "model.safetensors")
    assert model.keys() == expected.model.keys()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    states = load_file(folder / "optimizer" / "optimizer.safetensors")
    assert {name for name, key in (full.rsplit("/", 1) for full in states)} == expected.moments.keys()
    for name, moments in expected.moments.items():
        assert all(torch.equal(states[f"{name}/{key}"], value) for key, value in moments.items()), name
    assert not verify(folder).faults


@pytest.mark.parametrize("tool", list(WRITERS))
def test_every_value_comes_along(tool: str, tmp_path: Path) -> None:
    expected = truth()
    source = WRITERS[tool](tmp_path / "source", expected)
    found = open_foreign(source, ImportOptions())
    assert tool.split()[0] in found.kind or tool == "dcp"
    assert found.step == foreign_checkpoints.STEP
    check(take(source, tmp_path / "out"), expected)


@pytest.mark.parametrize(("tp", "dp", "xser"), [(1, 1, False), (2, 3, True), (4, 1, True), (8, 2, False)])
def test_any_mesh_of_neuronx_distributed(tp: int, dp: int, xser: bool, tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", expected, tp=tp, dp=dp, xser=xser)
    check(take(source, tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("mesh", "keys", "form"),
    [
        ((2,), 2, "nested"),
        ((3,), 1, "numbered"),  # the last rank has no rows of the keys and values
        *(
            pytest.param(mesh, keys, form, marks=pytest.mark.prove)
            for mesh, keys in (((2,), 2), ((3,), 1), ((2, 2), 2))
            for form in ("nested", "flattened", "numbered")
            if (mesh, form) not in (((2,), "nested"), ((3,), "numbered"))
        ),
    ],
)
def test_store_of_sharded_ranks(
    mesh: tuple[int, ...], keys: int, form: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks under FSDP2 save with torch's own code; with two dims, tensor parallel as well."""
    program = "tests.support.exported_programs:sharded_save"
    ranks.run(program, str(tmp_path / "source"), form, keys, mesh, nproc=math.prod(mesh)).check()
    monkeypatch.setattr(foreign_checkpoints, "KEYS", keys)
    monkeypatch.setattr(foreign_checkpoints, "CONFIG", {**foreign_checkpoints.CONFIG, "num_key_value_heads": keys})
    foreign_checkpoints.write_config(tmp_path / "source")
    found = open_foreign(tmp_path / "source", ImportOptions())
    assert found.step == foreign_checkpoints.STEP
    check(take(tmp_path / "source", tmp_path / "out"), truth())


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_of_optimum_neuron(tp: int, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms decay there, but for those with layernorm in their names, so that parameters have other numbers."""
    config = {**foreign_checkpoints.CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    monkeypatch.setattr(foreign_checkpoints, "CONFIG", config)
    plain = foreign_checkpoints.rank_tensors

    def cut(*arguments: Any) -> dict[str, torch.Tensor]:
        return foreign_checkpoints.with_fused_heads(plain(*arguments)) if fused else plain(*arguments)

    def grouped(names: list[str]) -> list[list[str]]:
        return [[n for n in names if "layernorm" not in n], [n for n in names if "layernorm" in n]]

    monkeypatch.setattr(foreign_checkpoints, "rank_tensors", cut)
    monkeypatch.setattr(foreign_checkpoints, "grouped", grouped)
    expected = truth(head_norms=True)
    source = foreign_checkpoints.optimum_folder(tmp_path / "source", expected, tp=tp, xser=False)
    check(take(source, tmp_path / "out"), expected)
    members = json.loads((tmp_path / "out" / "state.json").read_text())["sections"]["optimizer"]["members"]
    assert members == {name: int("layernorm" in name) for name in expected.model}


def test_a_model_of_optimum_neuron_is_consolidated_in_either_format(tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.optimum_folder(tmp_path / "source", expected, tp=2, xser=False)
    assert run(["consolidate", str(source), str(tmp_path / "out"), "-f", "pytorch"]) == 0
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert written.keys() == expected.model.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.model.items())
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert run(["consolidate", str(source), str(tmp_path / "other"), "--merge-adapters"]) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_replicas_of_optimum_neuron_that_differ(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On trn2 each replica is trained apart: the model has as many key/value heads, which a config has to say."""
    expected, other = truth(), truth(1)
    wide, keys = 2 * foreign_checkpoints.KEYS, foreign_checkpoints.KEYS
    original, drifted = foreign_checkpoints.rank_tensors, other.model

    def rank_tensors(tensors: dict[str, Any], rank: int, ranks: int, copies: int) -> dict[str, Any]:
        found = original(tensors, rank, ranks, copies)
        if rank >= keys:  # the second replicas
            later = original({n: drifted[n] for n in tensors}, rank, ranks, copies)
            found |= {n: t for n, t in later.items() if n.endswith(("weight_k", "weight_v"))}
        return foreign_checkpoints.with_fused_heads(found) if fused else found

    monkeypatch.setattr(foreign_checkpoints, "rank_tensors", rank_tensors)
    source = foreign_checkpoints.optimum_folder(tmp_path / "source", expected, tp=4)
    monkeypatch.undo()
    heads, size = foreign_checkpoints.HEADS, foreign_checkpoints.SIZE
    spec = {"num_attention_heads": heads, "num_key_value_heads": keys, "q_output_size_per_partition": heads * size // 4}
    body = json.loads((source / "shards" / "mp_metadata_pp_rank_0.json").read_text())
    body["model_weight_transformation_specs"] = [
        {"specs": [["GQAQKVColumnParallelLinearSpec", {**spec, "tp_size": 4}]]}
    ]
    (source / "shards" / "mp_metadata_pp_rank_0.json").write_text(json.dumps(body))
    refused(source, tmp_path, CheckpointMismatch, "replicas", "--config")
    config = tmp_path / "wide.json"
    config.write_text(json.dumps({**foreign_checkpoints.CONFIG, "num_key_value_heads": wide}))
    out = take(source, tmp_path / "out", config=config)
    model, prefix = load_file(out / "model.safetensors"), "model.layers.1.self_attn"
    for letter in "kv":
        name = f"{prefix}.{letter}_proj.weight"
        assert torch.equal(model[name], torch.cat([expected.model[name], drifted[name]]))
    parts = [original(expected.model, rank, 4, 2) for rank in range(4)]
    assert torch.equal(
        model[f"{prefix}.q_proj.weight"], torch.cat([part[f"{prefix}.qkv_proj.weight_q"] for part in parts])
    )
    assert torch.equal(
        model[f"{prefix}.o_proj.weight"], torch.cat([part[f"{prefix}.o_proj.weight"] for part in parts], 1)
    )
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == wide


def test_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "checkpoint-3", truth())
    assert run(["import", str(source), str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["step"], said["optimizer_parameters"]) == ("transformers Trainer", 3, 21)
    assert said["assumed"]
    assert run(["import", str(source), str(tmp_path / "told")]) == 0
    told = capsys.readouterr().out
    assert "  to be given again, as arguments or with an optimizer: lr " in told
    assert "betas" in told
    assert "amsgrad" not in told
    assert run(["inspect", str(source)]) == 0
    assert "transformers Trainer, step 3" in capsys.readouterr().out
    assert run(["verify", str(source)]) == 0
    assert "complete" in capsys.readouterr().out
    assert run(["import", str(tmp_path / "out"), str(tmp_path / "again")]) == UsageError.exit_code


def test_model_only_is_a_model_folder(tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", expected)
    assert run(["import", str(source), str(tmp_path / "out"), "--model-only"]) == 0
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / "optimizer").exists()


@pytest.mark.parametrize("given", ["checkpoint", "inner", "old", "old inner"])
def test_consolidate_takes_what_the_old_command_took(given: str, tmp_path: Path) -> None:
    expected = truth()
    if "old" in given:
        source = tmp_path / "source"
        foreign_checkpoints.write_config(source)
        path = source / "tensor_parallel_shards" / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
        foreign_checkpoints.save_rank(path, {"model": expected.model, "sharded_metadata": {}}, xser=False)
    else:
        source = foreign_checkpoints.optimum_folder(tmp_path / "source", expected)
    (source / "tokenizer.json").write_text("{}")
    inner = source / ("tensor_parallel_shards" if "old" in given else "shards")
    command = ["consolidate", str(inner if "inner" in given else source), str(tmp_path / "out")]
    assert run([*command, "--merge-adapters"]) == 2
    assert not (tmp_path / "out").exists()
    assert run([*command, "--max-shard-size", "20KB"]) == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1
    model = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert model.keys() == expected.model.keys()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_a_checkpoint_of_ours_without_its_manifest_is_no_other_tool_s(tmp_path: Path) -> None:
    """Although its files have the names of transformers'."""
    own = take(foreign_checkpoints.trainer_folder(tmp_path / "source", truth()), tmp_path / "run" / "checkpoint-3")
    (own / "manifest.json").unlink()
    for folder in (own, own.parent):
        assert run(["consolidate", str(folder), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_consolidate_names_the_command_that_has_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth())
    (source / "config.json").unlink()
    assert run(["consolidate", str(source), str(tmp_path / "out")]) == 1
    assert "stepmark import" in capsys.readouterr().err


def test_low_precision_gets_master_weights_and_fp32_states(tmp_path: Path) -> None:
    drawn = truth()
    low = Truth(
        {name: tensor.bfloat16() for name, tensor in drawn.model.items()},
        {
            name: {key: v if key == "step" else v.bfloat16() for key, v in moments.items()}
            for name, moments in drawn.moments.items()
        },
    )
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", low)
    states = load_file(take(source, tmp_path / "out") / "optimizer" / "optimizer.safetensors")
    for name, tensor in low.model.items():
        assert torch.equal(states[f"{name}/master"], tensor.float())
        assert torch.equal(states[f"{name}/exp_avg"], low.moments[name]["exp_avg"].float())


def test_learning_rates_are_those_of_the_schedule(tmp_path: Path) -> None:
    """The groups of optimum-neuron's ZeRO-1 have the schedule's first rates."""
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth())

    def rates(out: Path) -> object:
        return json.loads((take(source, out) / "state.json").read_text())["sections"]["run"]["value"]["rates"]

    torch.save({"last_epoch": 3, "lr_lambdas": [{}, {}], "_last_lr": [0.004, 0.002]}, source / "scheduler.pt")
    assert rates(tmp_path / "scheduled") == [0.004, 0.002]
    (source / "scheduler.pt").unlink()
    assert rates(tmp_path / "constant") == [0.01, 0.01]


# Bad input: one error that names file and tensor, and nothing is written


def refused(source: Path, tmp_path: Path, kind: type[CheckpointError], *words: str) -> None:
    with pytest.raises(kind) as error:
        take(source, tmp_path / "out")
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))) == []


def test_missing_file_of_a_rank(tmp_path: Path) -> None:
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth())
    (source / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt").unlink()
    refused(source, tmp_path, CheckpointDamaged, "tensor rank 2", "missing")


@pytest.mark.parametrize("rank", [1_000_000_000, 10**15])
def test_a_rank_of_a_huge_number(rank: int, tmp_path: Path) -> None:
    """The mesh that it stands for is not laid out."""
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth())
    (source / "model" / f"dp_rank_00_tp_rank_{rank}_pp_rank_00.pt").touch()
    refused(source, tmp_path, CheckpointDamaged, "missing")


def test_missing_last_data_parallel_rank(tmp_path: Path) -> None:
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth())
    for path in (source / "optim").glob("dp_rank_01*"):
        path.unlink()
    refused(source, tmp_path, CheckpointDamaged, "data parallel rank's file is missing", "exp_avg")


def test_missing_tensor_file(tmp_path: Path) -> None:
    source = foreign_checkpoints.optimum_folder(tmp_path / "source", truth())
    (source / "shards" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors" / "tensor_3.pt").unlink()
    refused(source, tmp_path, CheckpointDamaged, "tensor_3.pt", "weight_v")


@pytest.mark.parametrize("tool", list(WRITERS))
def test_truncated_file(tool: str, tmp_path: Path) -> None:
    source = WRITERS[tool](tmp_path / "source", truth())
    path = max((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size - 100)
    refused(source, tmp_path, CheckpointDamaged, path.name)


def test_files_of_two_saves(tmp_path: Path) -> None:
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth())
    other = foreign_checkpoints.nxd_folder(tmp_path / "other", truth(1))
    name = "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    shutil.copy(other / "model" / name, source / "model" / name)
    refused(source, tmp_path, CheckpointMismatch, "replicas", "weight_k")


def test_optimizer_beside_a_step_of_the_users_own(tmp_path: Path) -> None:
    """Which may be another one."""
    other = foreign_checkpoints.nxd_folder(tmp_path / "other", truth())
    torch.save({"total_steps": 2}, other / "user_content.pt")
    found = open_foreign(other, ImportOptions())
    assert found.step == 2
    assert "the step is 2, as the checkpoint says; its optimizer has taken 3" in found.assumed


def test_norms_of_two_saves(tmp_path: Path) -> None:
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth(), tp=2)
    other = foreign_checkpoints.nxd_folder(tmp_path / "other", truth(1), tp=2)
    name = "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    shutil.copy(other / "model" / name, source / "model" / name)
    refused(source, tmp_path, CheckpointDamaged, "differs from its replica", name, "norm")


def test_config_of_another_model(tmp_path: Path) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth())
    (source / "config.json").write_text(json.dumps({**foreign_checkpoints.CONFIG, "intermediate_size": 25}))
    refused(source, tmp_path, CheckpointMismatch, "model.safetensors", "gate_proj", "[25, 32]")


def test_optimizer_of_another_model(tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", expected)
    names = list(expected.moments)
    swapped = {names[1]: expected.moments[names[2]], names[2]: expected.moments[names[1]]}
    torch.save(foreign_checkpoints.numbered({**expected.moments, **swapped}), source / "optimizer.pt")
    refused(source, tmp_path, CheckpointMismatch, "optimizer.pt", "q_proj")


def test_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth())
    (source / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path, CheckpointError, "outside", "elsewhere")


def in_hub_cache(source: Path, cache: Path, inner: str = "") -> Path:
    """The folder as the hub's cache has it: links to files whose names are digests."""
    snapshot = cache / "models--they--theirs" / "snapshots" / "0a1b" / inner
    blobs = cache / "models--they--theirs" / "blobs"
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        blobs.mkdir(exist_ok=True)
        shutil.copy(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


@pytest.mark.parametrize(
    ("tool", "inner"), [("transformers Trainer", ""), ("dcp", "checkpoint-3"), ("optimum-neuron", "")]
)
def test_snapshot_of_the_hub_cache(tool: str, inner: str, tmp_path: Path) -> None:
    expected = truth()
    source = WRITERS[tool](tmp_path / "source", expected)
    (source / "tokenizer.json").write_text("{}")
    out = take(in_hub_cache(source, tmp_path / "hub", inner), tmp_path / "out")
    check(out, expected)
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in ("config.json", "tokenizer.json"))


def test_snapshot_of_several_files(tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", expected)
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(expected.model, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    check(take(in_hub_cache(source, tmp_path / "hub"), tmp_path / "out"), expected)


@pytest.mark.parametrize("where", ["elsewhere", "hub/models--they--theirs/elsewhere", "nowhere"])
def test_links_out_of_a_snapshot_are_said(where: str, tmp_path: Path) -> None:
    source = in_hub_cache(foreign_checkpoints.trainer_folder(tmp_path / "source", truth()), tmp_path / "hub")
    if where != "nowhere":
        (tmp_path / where).write_text("a secret")
    (source / "tokenizer.json").symlink_to(tmp_path / where)
    found = open_foreign(source, ImportOptions())
    assert "tokenizer.json" not in found.files
    assert any(line.startswith("tokenizer.json: a link") for line in found.lost)


@pytest.mark.parametrize(
    ("tool", "pattern"), [("dcp", "*.distcp"), ("transformers Trainer", "part"), ("optimum-neuron", "shards/*.json")]
)
def test_a_pipe_is_not_waited_for(tool: str, pattern: str, tmp_path: Path) -> None:
    source = WRITERS[tool](tmp_path / "source", truth())
    if pattern == "part":
        (source / "model.safetensors").rename(source / "part")
        index = {"weight_map": dict.fromkeys(truth().model, "part")}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path,) = source.glob(pattern)
    path.unlink()
    os.mkfifo(path)
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    try:
        refused(source, tmp_path, CheckpointError, path.name, "pipe")
        with pytest.raises(UsageError, match="--map"):
            read_map(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def test_name_of_another_step(tmp_path: Path) -> None:
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth())
    with pytest.raises(UsageError, match="checkpoint-3"):
        take(source, tmp_path / "checkpoint-4")


def test_tensor_in_two_files_of_an_index(tmp_path: Path) -> None:
    expected = truth()
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", expected)
    (source / "model.safetensors").unlink()
    for number in (1, 2):
        save_file(expected.model, source / f"model-0000{number}-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(expected.model)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(source, tmp_path, CheckpointDamaged, "as well")


# Adapters of neuronx-distributed


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], ["v_proj"], ["q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]]
)
def test_adapter_that_was_gathered(targets: list[str], gathered: bool, tmp_path: Path) -> None:
    """With merge_sharded_lora every rank's file has all of it; otherwise its own part."""
    source, rank, ranks = tmp_path / "source", 4, 2
    foreign_checkpoints.write_config(source)
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, torch.Tensor] = {}
    whole: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    outputs = {"q_proj": 32, "v_proj": 8, "o_proj": 32, "gate_up_proj": 24, "down_proj": 32}
    inputs = {"down_proj": 24}
    for layer in range(foreign_checkpoints.LAYERS):
        for target in targets:
            parent = "mlp" if target in ("gate_up_proj", "down_proj") else "self_attn"
            prefix = f"model.layers.{layer}.{parent}."
            members = ["gate_proj", "up_proj"] if target == "gate_up_proj" else [target]
            low = torch.randn(rank, inputs.get(target, 32), generator=generator)
            high = [torch.randn(outputs[target], rank, generator=generator) for _ in members]
            for member, matrix in zip(members, high, strict=True):
                expected[f"base_model.model.{prefix}{member}.lora_A.weight"] = low
                expected[f"base_model.model.{prefix}{member}.lora_B.weight"] = matrix
            row = target in ("o_proj", "down_proj")
            parts_a = low.chunk(ranks, 1) if row else [low] * ranks
            parts_b = [torch.cat([m.chunk(ranks)[r] for m in high]) for r in range(ranks)] if not row else high * ranks
            for number in range(ranks):
                own_a = low if gathered or not row else parts_a[number]
                own_b = torch.cat(parts_b) if gathered and not row else parts_b[number]
                whole[number] |= {
                    f"{prefix}{target}.lora_A.weight": own_a.contiguous(),
                    f"{prefix}{target}.lora_B.weight": own_b.contiguous(),
                }
    for number, state in enumerate(whole):
        path = source / "model" / f"dp_rank_00_tp_rank_{number:02d}_pp_rank_00.pt"
        foreign_checkpoints.save_rank(path, state, xser=False)
    (source / "adapter_config.json").write_text(
        json.dumps({"lora_rank": 4, "lora_alpha": 8, "target_modules": targets})
    )
    config = (source / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(CheckpointMismatch, match=r"tp_rank_00.*lora_[AB].*merge_sharded_lora.*--config"):
        open_foreign(source, ImportOptions())
    assert run(["import", str(source), str(tmp_path / "out"), "--config", str(config)]) == 0
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class App:
    """A training state as in torch's own tutorial."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        for _ in range(seed):
            self.model(torch.randn(5, 4)).sum().backward()
            self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def test_a_nested_state_is_read_by_the_loop_that_wrote_it(tmp_path: Path) -> None:
    saved, other = App(2), App(1)
    save_dcp({"app": saved}, tmp_path / "theirs")
    assert run(["import", str(tmp_path / "theirs"), str(tmp_path / "ours" / "step-1")]) == 0
    dcp.load({"app": other}, checkpoint_id=tmp_path / "ours" / "step-1")
    assert all(map(torch.equal, other.model.parameters(), saved.model.parameters()))
    ours, theirs = (each.optimizer.state_dict() for each in (other, saved))
    assert ours["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"] == 0.2
    for number, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][number][key], value) for key, value in state.items())
    plain = App(1)
    Checkpointer(tmp_path / "run").restore(
        {"model": plain.model, "optimizer": plain.optimizer}, tmp_path / "ours" / "step-1"
    )
    assert all(map(torch.equal, plain.model.parameters(), saved.model.parameters()))


def test_files_of_each_rank_are_refused_by_name(tmp_path: Path) -> None:
    """As accelerate writes them of FSDP2 without DCP."""
    for rank in range(2):
        torch.save({"weight": torch.ones(2)}, tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save({}, tmp_path / "optimizer_0_rank0.bin")
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    with pytest.raises(CheckpointMismatch, match=r"rank0.bin: it is one rank's part of the model.*use_dcp=True$"):
        open_foreign(tmp_path, ImportOptions())
