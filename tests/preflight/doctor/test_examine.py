"""What the doctor finds on a machine, and whether a run would fail there."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run
from stepmark.config.recipe import read_recipe
from stepmark.filesystem import files
from stepmark.preflight.doctor import machine, shared_folder
from stepmark.preflight.doctor.examine import look_at_graphs, look_at_recipe
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.preflight.doctor.machine import (
    look_at_compile_cache,
    look_at_devices,
    look_at_launcher,
    look_at_machine,
    look_at_variables,
)
from stepmark.preflight.doctor.shared_folder import file_system, look_at_folder
from tests.support.commands import LAUNCHERS
from tests.support.recipes import write_recipe

REJECTED = "that a compiler for accelerators rejects"


def statuses(findings: list[Finding]) -> dict[str, Status]:
    return {finding.name: finding.status for finding in findings}


def test_a_machine_without_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, output_dir=str(tmp_path / "runs" / "old"))
    assert run(["doctor", "--recipe", str(recipe), "--output_dir", str(tmp_path / "runs" / "new"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["will_fail"] is False
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert by_name["torch"]["version"]
    assert by_name["fsync"]["median_seconds"] > 0
    assert by_name["throughput"]["bytes_per_second"] > 0
    assert by_name["device: cpu"]["device"] == "cpu"
    assert by_name[str(tmp_path / "runs" / "new")]["free"] > 0
    assert {"rename", "exchange", "locks", "memory", "ports", "launcher"} <= by_name.keys()
    assert [path.name for path in tmp_path.iterdir() if "doctor" in path.name] == []
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_missing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, device="neuron")
    assert run(["doctor", "--recipe", str(recipe)]) == 1
    page = capsys.readouterr().out
    assert any(line.startswith("!") and "device: neuron is not available" in line for line in page.splitlines())


def test_a_wrong_recipe_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--recipe", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_variables_that_narrow_tensors_fail_on_xla_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"XLA_USE_BF16": "1", "PJRT_DEVICE": "CPU", "CUDA_LAUNCH_BLOCKING": "1", "XLA_DOWNCAST_BF16": "0"}
    monkeypatch.setattr(os, "environ", found)
    on_xla = statuses(list(look_at_variables("xla")))
    assert on_xla == {"PJRT_DEVICE": Status.OK, "XLA_USE_BF16": Status.FAILURE, "CUDA_LAUNCH_BLOCKING": Status.WARNING}
    assert statuses(list(look_at_variables("cpu")))["XLA_USE_BF16"] == Status.WARNING


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    (finding,) = [each for each in look_at_folder(tmp_path / "run") if each.status == Status.FAILURE]
    assert "Read-only file system" in finding.text


def test_a_file_system_without_locks_and_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "try_lock", lambda descriptor: None)
    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    found = {finding.name: finding for finding in look_at_folder(tmp_path)}
    assert found["locks"].status == Status.WARNING
    assert found["exchange"].text.startswith("not supported")


def test_locks_that_exclude_nobody_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "try_lock", lambda descriptor: True)
    assert statuses(list(look_at_folder(tmp_path)))["locks"] == Status.WARNING


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_at", full)
    failures = [each for each in look_at_folder(tmp_path) if each.status == Status.FAILURE]
    assert "No space left on device" in failures[0].text
    assert list(tmp_path.iterdir()) == []


def test_a_slow_or_small_folder_is_a_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, always = ("ext4", 1e9, 0.0, 0), ("tmpfs", 0.0, 1e18, 1 << 62)
    for (kind, slow_sync, slow_write, little), expected in ((never, Status.OK), (always, Status.WARNING)):
        monkeypatch.setattr(shared_folder, "file_system", lambda path, kind=kind: kind)
        monkeypatch.setattr(shared_folder, "SLOW_SYNC", slow_sync)
        monkeypatch.setattr(shared_folder, "SLOW_WRITE", slow_write)
        monkeypatch.setattr(shared_folder, "LITTLE_ROOM", little)
        found = statuses(list(look_at_folder(tmp_path)))
        assert {found[name] for name in ("fsync", "throughput", str(tmp_path))} == {expected}
        assert ("durability" in found) == (kind == "tmpfs")


def on_neuron_host(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """A host with one Neuron device, which this user can open, and with these packages installed."""
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/neuron0"] if "neuron" in pattern else [])
    monkeypatch.setattr(machine.os, "access", lambda *_: True)
    monkeypatch.setattr(machine, "installed_version", lambda name: "2.9.1" if name in packages else None)


@pytest.mark.parametrize(
    ("packages", "wish", "expected"),
    [
        ([], "auto", Status.FAILURE),
        ([], "cpu", Status.WARNING),
        (["torch_xla"], "auto", Status.FAILURE),
        (["torch_xla", "neuronx-cc"], "auto", Status.FAILURE),
        (["torch-neuronx", "neuronx-cc"], "auto", None),
        (["torch_xla", "libneuronxla", "neuronx-cc"], "auto", None),
    ],
)
def test_a_neuron_host_without_its_packages_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, packages: list[str], wish: str, expected: Status | None
) -> None:
    on_neuron_host(monkeypatch, *packages)
    found = [each for each in look_at_devices(wish) if each.name == "Neuron" and each.status != Status.OK]
    assert [each.status for each in found] == ([] if expected is None else [expected])
    assert all("neuronx-cc" in each.text or "libneuronxla" in each.text for each in found)


def test_neuron_devices_that_cannot_be_opened_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    on_neuron_host(monkeypatch, "torch-neuronx", "neuronx-cc")
    for opens, expected in ((True, [Status.OK]), (False, [Status.OK, Status.FAILURE])):
        monkeypatch.setattr(machine.os, "access", lambda *_, opens=opens: opens)
        assert [each.status for each in look_at_devices("cpu") if each.name == "Neuron"] == expected


def test_the_file_system_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path}/with\\040space nfs4 rw 0 0\n")
    monkeypatch.setattr(shared_folder, "MOUNTS", table)
    assert file_system(tmp_path) == "ext4"
    assert file_system(tmp_path / "with space" / "run") == "nfs4"


def test_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    launcher, ports = look_at_launcher()
    assert "rank 1 of 4" in launcher.text
    assert ports.status == Status.OK
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert list(look_at_launcher())[1].status == Status.FAILURE
    monkeypatch.setenv("RANK", "four")
    assert [finding.status for finding in look_at_launcher()] == [Status.FAILURE]


def test_a_port_that_is_in_use_fails_where_this_rank_would_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        ports = list(look_at_launcher())[1]
        assert ports.status == Status.FAILURE
        assert port in ports.text
        monkeypatch.setenv("RANK", "1")
        assert list(look_at_launcher())[1].status == Status.OK
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert list(look_at_launcher())[1].status == Status.OK
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert list(look_at_launcher())[1].status == Status.OK


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("GLOO_SOCKET_IFNAME", "eno17", Status.FAILURE),
        ("GLOO_SOCKET_IFNAME", "lo,eno17", Status.FAILURE),
        ("GLOO_SOCKET_IFNAME", "l", Status.FAILURE),
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("NCCL_SOCKET_IFNAME", "eno", Status.FAILURE),
        ("NCCL_SOCKET_IFNAME", "eno,l", None),
        ("NCCL_SOCKET_IFNAME", "=l", Status.FAILURE),
        ("NCCL_SOCKET_IFNAME", "^docker", None),
    ],
)
def test_network_interfaces_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: Status | None
) -> None:
    monkeypatch.setenv(variable, text)
    assert statuses(list(look_at_launcher(ranks=2))).get(variable) == expected
    alone = statuses(list(look_at_launcher(ranks=1))).get(variable)
    assert alone == (None if expected is None else Status.WARNING)


@pytest.mark.parametrize(
    ("listed", "local_ranks", "expected"),
    [("0-3", 2, Status.FAILURE), ("0-3", 4, None), ("2", 4, None), ("0-x", 4, Status.FAILURE), ("", 4, None)],
)
def test_visible_cores_that_contradict_the_ranks(
    monkeypatch: pytest.MonkeyPatch, listed: str, local_ranks: int, expected: Status | None
) -> None:
    for name in LAUNCHERS:  # joining under Slurm sets them for the process
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": str(local_ranks), "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", listed)
    assert statuses(list(look_at_launcher())).get("NEURON_RT_VISIBLE_CORES") == expected


def test_visible_cores_that_are_fewer_than_the_mesh_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    assert statuses(list(look_at_launcher(ranks=4)))["NEURON_RT_VISIBLE_CORES"] == Status.WARNING
    assert "NEURON_RT_VISIBLE_CORES" not in statuses(list(look_at_launcher(ranks=2)))


def test_a_cache_of_compiled_graphs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert statuses(list(look_at_compile_cache("xla", str(tmp_path / "new" / "cache")))) == {"compile_cache": Status.OK}
    assert statuses(list(look_at_compile_cache("xla", str(tmp_path / "file" / "cache")))) == {
        "compile_cache": Status.FAILURE
    }
    assert list(look_at_compile_cache("cpu", str(tmp_path / "file"))) == []
    assert list(look_at_compile_cache("xla", False)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_cache_of_compiled_graphs_that_is_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "neuron_device_present", lambda: True)
    monkeypatch.setenv("NEURON_CC_FLAGS", f"-O1 --cache_dir={tmp_path}/one")
    assert Status.FAILURE in statuses(list(look_at_compile_cache("xla", f"{tmp_path}/two"))).values()
    assert Status.FAILURE not in statuses(list(look_at_compile_cache("xla", None))).values()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/two")
    found = [each for each in look_at_compile_cache("xla", None) if each.status == Status.WARNING]
    assert "s3://bucket/two" in found[0].text
    monkeypatch.delenv("NEURON_CC_FLAGS")
    assert list(look_at_compile_cache("xla", None)) == []


def test_a_folder_where_renaming_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "atomicity" not in statuses(list(look_at_folder(tmp_path)))
    monkeypatch.setattr(shared_folder, "file_system", lambda path: "fuse.s3fs")
    assert statuses(list(look_at_folder(tmp_path)))["atomicity"] == Status.WARNING
    monkeypatch.setattr(shared_folder, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(shared_folder, "NOTICEABLE", 0.0)
    monkeypatch.setattr(shared_folder, "COPYING", 0.0)  # any rename takes longer
    assert statuses(list(look_at_folder(tmp_path)))["atomicity"] == Status.WARNING


def test_data_workers_need_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepmark.preflight.doctor.machine.LITTLE_SHARED_MEMORY", 1 << 62)
    assert statuses(list(look_at_machine(4)))["/dev/shm"] == Status.WARNING
    assert statuses(list(look_at_machine(0)))["/dev/shm"] == Status.OK


def test_a_folder_for_temporary_files_that_is_missing_or_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder, expected in ((tmp_path, Status.OK), (tmp_path / "file", Status.FAILURE), ("/proc", Status.FAILURE)):
        monkeypatch.setenv("TMPDIR", str(folder))
        assert statuses(list(look_at_machine(0)))["TMPDIR"] == expected
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (machine.TRIED_BYTES // 2, before[1]))  # a write stops half way
    try:
        assert statuses(list(look_at_machine(0)))["TMPDIR"] == Status.FAILURE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_few_descriptors_are_a_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 4096))
    assert statuses(list(look_at_machine(0)))["open files"] == Status.WARNING
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (65536, 65536))
    assert statuses(list(look_at_machine(0)))["open files"] == Status.OK


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((0, "2 graphs in 1.0 seconds\n", ""), [Finding("graphs", "4 ranks", f"nothing in them {REJECTED}")]),
        (
            (0, "warning: step: has 64-bit floats\n", ""),
            [Finding("graphs", "4 ranks", "step: has 64-bit floats", Status.WARNING)],
        ),
        ((1, "", "noise\nerror: no\n"), [Finding("graphs", "4 ranks", "no", Status.FAILURE)]),
        ((-9, "", ""), [Finding("graphs", "4 ranks", "could not be made (exit code -9)", Status.FAILURE)]),
    ],
)
def test_what_is_said_of_a_recipes_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: tuple[int, str, str], expected: list[Finding]
) -> None:
    called: dict[str, Any] = {}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        called.update(command=command, env=env)
        return subprocess.CompletedProcess(command, *output)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1 --cache_dir=/shared")
    recipe = write_recipe(tmp_path, device="xla", tensor_parallel_size=2, zero_1=True)
    assert list(look_at_graphs(str(recipe), read_recipe(str(recipe), {}), ["--seed", "1"])) == expected
    assert called["command"][4:10] == ["precompile", str(recipe), "--seed", "1", "--nproc", "4"]
    assert called["env"]["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
    assert called["env"]["NEURON_CC_FLAGS"] == "-O1"  # what is not compiled is not put where compiled graphs are


@pytest.mark.prove
@pytest.mark.xla
def test_the_graphs_of_a_recipe_are_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, device="xla")
    assert run(["doctor", "--recipe", str(recipe)]) == 0
    assert f"nothing in them {REJECTED}" in capsys.readouterr().out
    recipe = write_recipe(tmp_path, device="xla", tensor_parallel_size=3)
    assert run(["doctor", "--recipe", str(recipe)]) == 1
    assert "tensor_parallel_size" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config_name": "gpt7"}, "config_name: 'gpt7' is neither a folder"),
    ({"config_overrides": {"n_layers": 2}}, "config_overrides: GPT2Config has no n_layers"),
    ({"config_overrides": {"n_embd": 30, "n_head": 4}}, "they do not describe a valid model"),
    ({"train_file": "absent.txt"}, "train_file: file absent.txt does not exist"),
    ({"block_size": 64}, "block_size: 64 tokens are more than the model's 32 positions"),
    ({"tokenizer_name": "./absent"}, "tokenizer_name: no tokenizer could be loaded"),
    ({"lr_scheduler_type": "sawtooth"}, "lr_scheduler_type"),
    ({"lr_scheduler_kwargs": {"cycles": 2}}, "lr_scheduler_kwargs: the schedule linear does not accept {'cycles': 2}"),
    ({"metrics": "absent_module:metrics", "eval_strategy": "epoch"}, "metrics: no module 'absent_module'"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[next(iter(fields)) for fields, _ in REFUSED])
def test_a_recipe_that_train_refuses_will_fail(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    path = str(write_recipe(tmp_path, **fields))
    (finding,) = look_at_recipe(path, read_recipe(path, {}), "cpu")
    assert finding.status == Status.FAILURE
    assert named in finding.text
