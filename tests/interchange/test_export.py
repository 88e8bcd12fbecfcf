"""Checkpoints written for other tools: their own code reads them, and every value comes back, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from stepmark import Checkpointer, Trainer, TrainingArguments
from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.verify import verify
from stepmark.cli.main import run
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, UsageError
from stepmark.interchange.export_checkpoint import export_checkpoint
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from stepmark.model_folder.new_folder import WritingListener
from stepmark.model_folder.output_files import torch_file, write_files
from stepmark.tensor_files import streaming
from stepmark.tensor_files.array_reader import ArrayReader
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.torch_file import read_torch_file
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import STEP, Truth, truth
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

SILENT = WritingListener(lambda size: None, lambda size: None)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
ADAMW = {
    "weight_decay": 0.1,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of ours with the values of the truth."""
    monkeypatch.setattr(foreign_checkpoints, "GROUP", {**foreign_checkpoints.GROUP, **ADAMW})
    return imported(foreign_checkpoints.trainer_folder(tmp_path / "source", truth()), tmp_path / "own")


def imported(source: Path, out: Path) -> Path:
    write_checkpoint(open_foreign(source, ImportOptions()), out, SILENT)
    return out


def values(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of ours that is in one piece."""
    found = load_file(folder / "model.safetensors")
    return found | {f"optimizer/{k}": v for k, v in load_file(folder / "optimizer" / "optimizer.safetensors").items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize(("form", "options"), [("dcp", {}), ("dcp", {"titan": True}), ("hf-trainer", {})])
def test_what_goes_out_comes_back(own: Path, form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Out, and in again through the importer."""
    export_checkpoint(own, tmp_path / "out", form, **options)
    back = imported(tmp_path / "out", tmp_path / "back")
    assert same(values(back), values(own))
    mine, again = (json.loads((folder / "state.json").read_text())["sections"] for folder in (own, back))
    assert again["run"]["value"]["step"] == STEP
    assert again["run"]["value"]["schedule"] == {"step": STEP}
    if "titan" not in options:  # which has no groups: two with the same settings are one
        assert again["optimizer"]["members"] == mine["optimizer"]["members"]
        assert again["optimizer"]["groups"]["0"] == mine["optimizer"]["groups"]["0"]


@pytest.mark.parametrize(("form", "options"), [("dcp", {}), ("hf-trainer", {})])
def test_one_group_comes_back_by_its_names(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Where the tools themselves make two, numbers alone would be those of an unknown order."""
    source = tmp_path / "model.pt"
    moments = dict(enumerate(truth().moments.values()))
    group = {**foreign_checkpoints.GROUP, **ADAMW, "params": list(moments)}
    torch.save({"model": truth().model, "optimizer": {"state": moments, "param_groups": [group]}, "step": 3}, source)
    foreign_checkpoints.write_config(tmp_path)
    own = imported(source, tmp_path / "own")
    export_checkpoint(own, tmp_path / "out", form, **options)
    assert same(values(imported(tmp_path / "out", tmp_path / "back")), values(own))


def test_groups_of_a_program_s_own_keep_their_order(tmp_path: Path) -> None:
    """Torch loads them by position: layers from the top down, and then the rest."""

    def optimizer(model: Any) -> torch.optim.Optimizer:
        layers = [each for layer in reversed(model.transformer.h) for each in layer.parameters()]
        rest = [each for each in model.parameters() if all(each is not one for one in layers)]
        return torch.optim.AdamW([{"params": layers, "weight_decay": 0.1}, {"params": rest}], lr=0.01)

    model = tiny_model(layers=2)
    given = optimizer(model)
    arguments = TrainingArguments(str(tmp_path / "run"), device="cpu", max_steps=2, save_steps=2)
    Trainer(model, arguments, train_dataset=Blocks(16), optimizers=(given, None)).train()
    export_checkpoint(tmp_path / "run" / "checkpoint-2", tmp_path / "out", "hf-trainer")
    again = tiny_model(layers=2)
    loaded = optimizer(again)
    loaded.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(given.state[mine]["exp_avg"], loaded.state[theirs]["exp_avg"])


def test_a_schedule_of_a_rate_that_is_a_tensor_goes_out(tmp_path: Path) -> None:
    model = tiny_model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(2, {"model": model, "optimizer": optimizer, "scheduler": schedule})
    export_checkpoint(tmp_path / "run" / "checkpoint-2", tmp_path / "out", "dcp")
    state = {"scheduler": {"base_lrs": [0.0], "last_epoch": 7}}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=tmp_path / "out")
    assert state == {"scheduler": {"base_lrs": [0.5], "last_epoch": 0}}


def earlier(kind: str, tmp_path: Path) -> Path:
    """A copy of a checkpoint that a run of ours has saved: reading leaves a note beside it."""
    return Path(shutil.copytree(FIXTURES / kind / "checkpoint-3", tmp_path / kind / "checkpoint-3"))


@pytest.mark.parametrize("source", ["one_rank", "tensor_parallel", "zero_1", "bf16"])
@pytest.mark.parametrize("form", ["dcp", "hf-trainer"])
def test_any_mesh_goes_out(source: str, form: str, tmp_path: Path) -> None:
    """Shards, also those that ZeRO-1 cut out of flattened states, in the order that the model has them."""
    expected = load_file(FIXTURES / source / "truth.safetensors")
    done = export_checkpoint(earlier(source, tmp_path), tmp_path / "out", form)
    found = values(imported(tmp_path / "out", tmp_path / "back"))
    masters = source == "bf16" and form == "hf-trainer"
    names = {name for name in expected if not (masters and name.endswith("/master"))}
    for name in names:
        part, rest = name.split("/", 1)
        own = found.pop(rest)
        truth_of = f"optimizer/optimizer/{rest}/master" if masters and part == "model" else name
        assert torch.equal(own, expected[truth_of]), name
    assert not found
    assert bool(done.notes) == (source == "bf16")
    if masters:  # which go into the model
        state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
        assert all(set(values) == {"step", "exp_avg", "exp_avg_sq"} for values in state.values())
        assert "bfloat16" not in (tmp_path / "out" / "config.json").read_text()


# torch.distributed.checkpoint


@pytest.mark.parametrize(("nproc", "flat"), [(2, True), (3, False)], ids=["flattened", "nested"])
def test_sharded_state_loads_the_store(own: Path, nproc: int, flat: bool, ranks: Ranks, tmp_path: Path) -> None:
    export_checkpoint(own, tmp_path / "out", "dcp")
    program = "tests.support.exported_programs:sharded_load"
    assert ranks.run(program, str(tmp_path / "out"), flat, nproc=nproc).check() == [[]] * nproc


def test_titan_state_loads_the_store(own: Path, tmp_path: Path) -> None:
    """The same names and bytes as torchtitan's own for this model, written from its description."""
    import torch.distributed.checkpoint as dcp

    export_checkpoint(own, tmp_path / "out", "dcp", titan=True)
    theirs = foreign_checkpoints.titan_folder(tmp_path / "theirs", truth())
    weights = {
        name: torch.zeros(described.size)
        for name, described in dcp.FileSystemReader(theirs).read_metadata().state_dict_metadata.items()
        if hasattr(described, "size")
    }
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    for folder, state in ((theirs, expected), (tmp_path / "out", weights)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert same(weights, expected)
    assert len(weights) == 4 * len(truth().model)


def test_chunks_of_rows(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are cut, and stores have several files."""
    from stepmark.interchange.sinks import dcp

    monkeypatch.setattr(dcp, "CHUNK", 600)
    monkeypatch.setattr(dcp, "FILE", 50_000)
    export_checkpoint(own, tmp_path / "out", "dcp")
    assert len(list((tmp_path / "out").glob("__0_*.distcp"))) > 3
    assert same(values(imported(tmp_path / "out", tmp_path / "back")), values(own))


# transformers' Trainer


def test_torch_loads_what_trainer_does(own: Path, tmp_path: Path) -> None:
    """What Trainer calls on its files: load_state_dict of AdamW and LambdaLR, and the generators."""
    import random

    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerState, get_scheduler
    from transformers.trainer_pt_utils import safe_globals

    out = tmp_path / "checkpoint-3"
    export_checkpoint(own, out, "hf-trainer")
    expected = truth()
    config: Any = LlamaConfig.from_pretrained(out)
    with torch.device("meta"):
        order = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    parameters = {name: torch.nn.Parameter(expected.model[name].clone()) for name in order}
    groups = [[parameters[name] for name in names] for names in foreign_checkpoints.grouped(order)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.5)
    optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    for name, moments in expected.moments.items():
        assert all(torch.equal(optimizer.state[parameters[name]][key], value) for key, value in moments.items())
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=9)
    schedule.load_state_dict(torch.load(out / "scheduler.pt", weights_only=True))
    assert schedule.last_epoch == STEP
    assert TrainerState.load_from_json(str(out / "trainer_state.json")).global_step == STEP
    with safe_globals():
        states = torch.load(out / "rng_state.pth", weights_only=True)
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["cpu"])
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert same(load_file(out / "model.safetensors"), expected.model)


# Files of torch.save


def test_archives_of_more_than_four_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields for large sizes and positions, where small ones count as large."""
    data = torch.arange(3000, dtype=torch.bfloat16)
    (tmp_path / "data").write_bytes(data.view(torch.uint8).numpy().tobytes())
    tensor = GlobalTensor.whole("x", StoredArray.contiguous(tmp_path / "data", 0, "BF16", (30, 100)))
    value = {"a": tensor, "b": [1, (2.5, None)], "c": tensor}
    for large in (zipfile.ZIP64_LIMIT, 1000):
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", large)
        path = tmp_path / f"{large}.pt"
        write_files(tmp_path, [torch_file(path.name, value)], (), WritingListener())
        found = torch.load(path, weights_only=True)
        assert torch.equal(found["a"], data.view(30, 100))
        assert found["b"] == [1, (2.5, None)]
        assert found["a"].data_ptr() == found["c"].data_ptr()
        assert (
            ArrayReader().array(read_torch_file(path, [])["a"]).view("i2") == found["a"].view(torch.int16).numpy()
        ).all()
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_parts_of_an_array_wherever_it_begins(tmp_path: Path) -> None:
    """Rows and columns, also of an array that begins at no element's and no page's place."""
    data = torch.arange(5 * 40 * 50, dtype=torch.int32).view(5, 40, 50)
    for begin in (0, 3, 9001):
        (tmp_path / "data").write_bytes(bytes(begin) + data.numpy().tobytes())
        whole = StoredArray.contiguous(tmp_path / "data", begin, "I32", data.shape)
        for dim, start, length in ((2, 7, 3), (1, 39, 1), (2, 0, 49), (0, 1, 3), (1, 0, 40)):
            found = ArrayReader().array(whole.narrow(dim, start, length))
            assert (found == data.narrow(dim, start, length).numpy().view("u4")).all()


def test_a_part_beyond_the_end_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(5000))
    whole = StoredArray.contiguous(tmp_path / "data", 0, "I32", (50, 26))
    for array in (whole, whole.narrow(1, 3, 9)):
        with pytest.raises(CheckpointDamaged, match="truncated"):
            ArrayReader().array(array)


def test_small_tensors_go_in_runs_and_large_ones_in_windows(tmp_path: Path) -> None:
    """A model with both, out and in: every byte is where it was, and a run is one job."""
    sizes = [3, 700, 3_000_000, 1, 0, 250_000, 64, 12, 12, 2_500_000]
    state = {f"t{number}": torch.randn(size) for number, size in enumerate(sizes)}
    torch.save(state, tmp_path / "model.pt")
    own = imported(tmp_path / "model.pt", tmp_path / "own")
    found = load_file(own / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert not verify(own).faults
    places = [
        streaming.WrittenTensor(GlobalTensor.whole("x", scalar), 4 * n) for n, scalar in enumerate(_scalars(tmp_path))
    ]
    with FileOutput(tmp_path / "out", 4000) as output:
        (job,) = streaming.write_jobs(places, ArrayReader(), output)
        assert job() == 4000
    assert (tmp_path / "out").read_bytes() == (tmp_path / "scalars").read_bytes()[::-1]


def test_a_large_tensor_may_begin_at_any_byte(tmp_path: Path) -> None:
    """As an archive does that follows another in a file of torch.distributed.checkpoint."""
    data = torch.arange(5_000_000, dtype=torch.int32).numpy().tobytes()
    (tmp_path / "data").write_bytes(data)
    tensor = GlobalTensor.whole("x", StoredArray.contiguous(tmp_path / "data", 0, "I32", (5_000_000,)))
    with FileOutput(tmp_path / "out", len(data) + 4099) as output:
        jobs = list(streaming.write_jobs([streaming.WrittenTensor(tensor, 4099)], ArrayReader(), output))
        assert len(jobs) > 2
        assert sum(job() for job in jobs) == len(data)
    assert (tmp_path / "out").read_bytes() == bytes(4099) + data


def _scalars(folder: Path) -> list[StoredArray]:
    """A thousand numbers of one byte repeated, the last of the file first."""
    (folder / "scalars").write_bytes(b"".join(bytes([n % 251]) * 4 for n in range(1000)))
    return [StoredArray.contiguous(folder / "scalars", 4 * n, "F32", ()) for n in reversed(range(1000))]


# Bad input: one error, and nothing is written


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".stepmark")  # where leases are


def refused(source: Path, out: Path, kind: type[Exception], match: str, form: str = "dcp", **options: Any) -> None:
    before = entries(out.parent)
    with pytest.raises(kind, match=match) as error:
        export_checkpoint(source, out, form, **options)
    assert "\n" not in str(error.value)
    assert entries(out.parent) == before


@pytest.mark.parametrize("form", ["dcp", "hf-trainer"])
def test_model_alone_is_not_exported(form: str, tmp_path: Path) -> None:
    refused(earlier("model_only", tmp_path), tmp_path / "out", CheckpointMismatch, "no optimizer", form)


def test_corrupted_value(own: Path, tmp_path: Path) -> None:
    path = own / "optimizer" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    refused(own, tmp_path / "out", CheckpointDamaged, "optimizer.safetensors: tensor .* does not match its checksum")


def test_out_that_exists(own: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    refused(own, tmp_path / "out", UsageError, "exists and is not an empty folder")
    refused(own, tmp_path / "checkpoint-4", UsageError, "of another step")


def test_models_that_torchtitan_does_not_have(tmp_path: Path) -> None:
    folder = earlier("one_rank", tmp_path)
    refused(folder, tmp_path / "out", CheckpointMismatch, "in no Llama of torchtitan|heads", titan=True)


def test_optimizer_that_is_no_adam(tmp_path: Path) -> None:
    drawn = truth()
    moments = {name: {"momentum_buffer": m["exp_avg"]} for name, m in drawn.moments.items()}
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", Truth(drawn.model, moments))
    own = imported(source, tmp_path / "own")
    export_checkpoint(own, tmp_path / "out", "hf-trainer")
    assert same(values(imported(tmp_path / "out", tmp_path / "back")), values(own))


def test_disk_that_fails_midway(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepmark.model_folder import output_files

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files.TorchArchive, "finish", fail)
    refused(own, tmp_path / "out", CheckpointError, "cannot be written: No space left", "hf-trainer")


def test_command(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(own, tmp_path / "run" / "checkpoint-3")
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp", "--titan", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["to"]) == (3, "dcp")
    assert said["notes"]
    for more in (["--to", "dcp", "--tp", "2"], ["--to", "dcp", "--dp", "2"], ["--to", "hf-trainer", "--titan"]):
        assert run(["export", str(own), str(tmp_path / "more"), *more]) == UsageError.exit_code
    source = str(tmp_path / "source")
    assert run(["export", source, str(tmp_path / "more"), "--to", "dcp"]) == UsageError.exit_code
    assert "stepmark import" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("kind", ["tensor_parallel", "model_only"])
def test_a_model_folder_is_that_of_consolidate(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = earlier(kind, tmp_path)
    assert run(["export", str(source), str(tmp_path / "out"), "--to", "hf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["to"], said["lost"]) == (3, "hf", [])
    assert run(["consolidate", str(source), str(tmp_path / "other")]) == 0
    folders = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "other")]
    assert folders[0] == folders[1]
    assert "model.safetensors" in folders[0]


@pytest.mark.parametrize("form", ["optimum-neuron", "nxd"])
def test_removed_formats_name_the_way_out(
    form: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(own), str(tmp_path / "out"), "--to", form, "--tp", "2", "--pp", "2"]
    assert run(command) == UsageError.exit_code
    said = capsys.readouterr().err
    assert all(word in said for word in (f"--to {form}", "--to hf", "hf-trainer"))
    assert not (tmp_path / "out").exists()


WITHOUT_TORCH = """
import sys
from stepmark.cli.main import run
source, folder = sys.argv[1:]
assert run(["import", source, f"{folder}/checkpoint-3"]) == 0
for form in ("dcp", "hf-trainer"):
    assert run(["export", f"{folder}/checkpoint-3", f"{folder}/{form}", "--to", form]) == 0
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sorted({"torch", "transformers"} & sys.modules.keys()), int(peak) >> 10)
"""


def test_commands_read_tensors_without_torch(tmp_path: Path) -> None:
    """It takes several hundred MB: the process that asks transformers for the model has ended before."""
    source = foreign_checkpoints.trainer_folder(tmp_path / "source", truth())
    command = [sys.executable, "-c", WITHOUT_TORCH, str(source), str(tmp_path)]
    *_, own = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    imported, megabytes = own.rsplit(" ", 1)
    assert imported == "[]"
    assert int(megabytes) < 120
