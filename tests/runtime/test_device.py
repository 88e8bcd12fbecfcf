"""Which device a run chooses, on simulated machines."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from stepmark.errors import DeviceError, UsageError
from stepmark.runtime import device as select
from stepmark.runtime import hardware
from stepmark.runtime.device import choose_device, create_runtime, runtime_for
from stepmark.training.model_options import check_bf16
from tests.support.ranks import Ranks

HERE = "tests.runtime.test_device"


class Machine:
    """Simulates a machine: torch_xla, a Neuron device, a TPU, torch's accelerator and how many of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def has(
        self, *, xla: bool = False, neuron: bool = False, tpu: bool = False, accelerator: str | None = None
    ) -> None:
        found = None if accelerator is None else SimpleNamespace(type=accelerator)
        self._patch.setattr(select, "torch_xla_installed", lambda: xla)
        self._patch.setattr(select, "neuron_device_present", lambda: neuron)
        self._patch.setattr(select, "tpu_present", lambda: tpu)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        self._patch.setattr(torch.accelerator, "device_count", lambda: 0 if found is None else 1)
        self._patch.setattr(torch.cuda, "is_available", lambda: accelerator == "cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("pjrt", [None, "CPU"])
@pytest.mark.parametrize(
    ("hardware_here", "device"),
    [
        ({}, "cpu"),
        ({"xla": True}, "cpu"),  # neither torch_xla alone nor PJRT_DEVICE=CPU is a choice of the user
        ({"xla": True, "neuron": True}, "xla"),
        ({"xla": True, "tpu": True}, "xla"),
        ({"xla": True, "neuron": True, "accelerator": "cuda"}, "xla"),
        ({"neuron": True}, "cpu"),
        ({"neuron": True, "accelerator": "neuron"}, "neuron"),
        ({"accelerator": "cuda"}, "cuda"),
        ({"accelerator": "cuda", "xla": True}, "cuda"),
        ({"accelerator": "mps"}, "mps"),
    ],
)
def test_auto(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    hardware_here: dict[str, bool | str],
    device: str,
    pjrt: str | None,
) -> None:
    if pjrt is None:
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
    else:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    machine.has(**hardware_here)  # type: ignore[arg-type]
    assert choose_device() == choose_device("auto") == device


@pytest.mark.parametrize(
    ("wish", "hardware_here", "words"),
    [
        ("xla", {}, r"device: xla needs torch_xla.*pip install 'stepmark\[xla\]'"),
        ("cuda", {"xla": True}, "device: cuda is not available.*choose device: cpu or auto"),
        ("neuron", {"xla": True, "neuron": True}, "device: neuron is not available.*choose device: xla"),
        ("neuron", {"accelerator": "cuda"}, "device: neuron is not available"),
    ],
)
def test_an_unavailable_device(machine: Machine, wish: str, hardware_here: dict[str, bool], words: str) -> None:
    machine.has(**hardware_here)
    with pytest.raises(DeviceError, match=words):
        choose_device(wish)


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG"])
def test_variables_that_narrow_types_are_refused_on_lazy_devices(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine.has(xla=True, neuron=True)
    for value in ("0", "", "false"):
        monkeypatch.setenv(name, value)
        assert choose_device("xla") == "xla"
    monkeypatch.setenv(name, "1")
    for wish in ("xla", "auto"):
        with pytest.raises(DeviceError, match=f"device: xla: the environment variable {name}=1 .*unset it"):
            choose_device(wish)
    assert choose_device("cpu") == "cpu"


def opened_after_an_override() -> str:
    """The error of opening the device where a variable was set for torch_xla's first tensor, and unset since."""
    from stepmark.runtime.context import start

    os.environ["XLA_USE_BF16"] = "1"
    torch.ones(2).to("xla").cpu()
    del os.environ["XLA_USE_BF16"]
    try:
        start("xla")
    except DeviceError as error:
        return str(error)
    return ""


def rounded_after_a_late_override() -> list[float]:
    """A value that bfloat16 cannot hold, placed after a variable was set too late to be checked."""
    from stepmark.runtime.context import start

    runtime = start("xla").runtime
    os.environ["XLA_USE_BF16"] = "1"
    (value,) = runtime.to_host(runtime.place([torch.tensor([1 + 2**-12])]))
    return value.tolist()


@pytest.mark.xla
def test_float32_is_float32_whenever_a_variable_was_set(ranks: Ranks) -> None:
    (message,) = ranks.run(f"{HERE}:opened_after_an_override").check()
    assert "torch_xla stores float32 tensors as bfloat16, since XLA_USE_BF16 or XLA_DOWNCAST_BF16 was set" in message
    assert ranks.run(f"{HERE}:rounded_after_a_late_override").check() == [[1 + 2**-12]]


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="device: 'gpu' is unknown; choose one of auto, xla, cuda, neuron, tpu"):
        choose_device("gpu")


def test_more_ranks_than_devices(machine: Machine) -> None:
    machine.has(accelerator="cuda")
    with pytest.raises(DeviceError, match=r"local rank 1 has no cuda device.*has 1"):
        create_runtime("cuda", local_rank=1)


def test_the_cpu_takes_any_number_of_ranks() -> None:
    runtime = create_runtime("cpu", local_rank=7)
    assert (runtime.name, runtime.lazy, runtime.host_memory) == ("cpu", False, True)
    assert runtime_for(torch.device("cpu")) is runtime_for(torch.device("cpu"))


@pytest.mark.parametrize(
    ("files", "environment", "neuron", "tpu"),
    [
        ([], {}, False, False),
        (["/dev/neuron0", "/dev/neuron1"], {}, True, False),
        (["/dev/accel0"], {}, False, True),
        ([], {"TPU_WORKER_ID": "0"}, False, True),
    ],
)
def test_devices_are_detected_by_their_drivers(
    monkeypatch: pytest.MonkeyPatch, files: list[str], environment: dict[str, str], neuron: bool, tpu: bool
) -> None:
    from fnmatch import fnmatch

    monkeypatch.setattr(hardware.glob, "glob", lambda pattern: [file for file in files if fnmatch(file, pattern)])
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (hardware.neuron_device_present(), hardware.tpu_present()) == (neuron, tpu)


def test_bf16_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, s=supported: s)
        if supported:
            check_bf16(torch.device("cuda"))
        else:
            with pytest.raises(DeviceError, match="bf16: Tesla T4 does not support bfloat16"):
                check_bf16(torch.device("cuda"))
    for name in ("cpu", "xla"):
        check_bf16(torch.device(name))
