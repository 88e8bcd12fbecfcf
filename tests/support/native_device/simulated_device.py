"""Registers the simulated device (simulated_device.cpp) with torch, whose autoloading calls `registered` wherever this
folder is on the path (simulated_device-0.dist-info), as it does for a vendor's backend.

Environment variables: SIMULATED_DEVICE_BUILD, the compiled module; SIMULATED_DEVICE_NAME, how the device is called
(`simulated`); SIMULATED_DEVICE_LAG_US, what each operation takes on the device, in microseconds;
SIMULATED_DEVICE_LOST_AFTER, operations after which each fails, on rank SIMULATED_DEVICE_LOST_RANK if that is given, and
with SIMULATED_DEVICE_DIES ends the process; SIMULATED_DEVICE_COUNT_FILE, a file with how many devices there are (else
four), of which one less is left where one is lost; SIMULATED_DEVICE_GROUP=0, no process group.
"""

from __future__ import annotations

import importlib.util
import os
import types

import torch
import torch.distributed

NAME = os.environ.get("SIMULATED_DEVICE_NAME", "simulated")
MODULE = "simulated_device_c"


def _loaded(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


c = _loaded(os.environ["SIMULATED_DEVICE_BUILD"])


def _generator(device):
    index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
    return c.generator(c.current_device() if index is None else index)


def _set_device(device):
    c.set_device(torch.device(device).index if isinstance(device, str) else getattr(device, "index", device))


def _manual_seed_all(seed):
    for index in range(c.device_count()):
        c.generator(index).manual_seed(seed)


def registered():
    """Importing this module has done it."""


module = types.ModuleType(f"torch.{NAME}")
module.is_available = lambda: True
module.is_initialized = lambda: True
module.init = module._lazy_init = lambda: None
module._is_in_bad_fork = lambda: False
module.device_count = c.device_count
module.current_device = c.current_device
module.set_device = _set_device
module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
module.get_rng_state = lambda device=NAME: _generator(device).get_state()
module.set_rng_state = lambda state, device=NAME: _generator(device).set_state(state)
module.manual_seed = lambda seed: c.generator(c.current_device()).manual_seed(seed)
module.manual_seed_all = _manual_seed_all
module.Event = torch.Event
module.Stream = lambda priority=0: torch.Stream(device=torch.device(NAME, c.current_device()), priority=priority)
module.current_stream = torch.accelerator.current_stream
module.stream = lambda stream: stream  # which is a context
module.initial_seed = lambda: c.generator(c.current_device()).initial_seed()

torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
if torch.distributed.is_available() and os.environ.get("SIMULATED_DEVICE_GROUP") != "0":
    import simulated_group

    simulated_group.register(NAME)
