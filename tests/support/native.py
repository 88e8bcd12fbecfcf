"""The simulated native device (native_device/): compiled once, and given to processes that import torch anew."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import HAS_XLA
from tests.support.ranks import ROOT

FOLDER = Path(__file__).parent / "native_device"
SOURCE = FOLDER / "simulated_device.cpp"
DEVICE = "simulated"


def unavailable() -> str | None:
    """Why the device cannot be there; None where it can."""
    if HAS_XLA:
        return "torch_xla is installed, which takes the place of a native device"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return f"the simulated device needs torch 2.13, and {torch.__version__} is installed"
    if shutil.which(_compiler()) is None:
        return "there is no C++ compiler to build the simulated device with"
    return None


def environment(**variables: Any) -> dict[str, str]:
    """Of a process in which torch finds the device, which is compiled if it is not; skips the test where it cannot be.
    `variables`: those of simulated_device.py, in lower case and without their first words."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    given = {f"SIMULATED_DEVICE_{name.upper()}": str(value) for name, value in variables.items()}
    path = os.pathsep.join([str(FOLDER), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "SIMULATED_DEVICE_BUILD": str(_built()), **given}


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _built() -> Path:
    """The compiled module, of this source and torch. About half a minute, the first time."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / "build" / "simulated-device" / version
    made = folder / "simulated_device_c.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def _compile(made: Path) -> None:
    from torch.utils import cpp_extension

    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={made.stem}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    part = made.with_suffix(".part")
    command = [_compiler(), *flags, abi, *includes, str(SOURCE), "-o", str(part), *libraries]
    subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"], check=True)
    os.replace(part, made)
