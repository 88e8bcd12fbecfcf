"""Options of `accelerate launch`, which reach the processes that it starts as environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stepmark.errors import UsageError

_SHARDING = "leave the option out, and set zero_1, tensor_parallel_size or pipeline_parallel_size"
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": _SHARDING,
    "ACCELERATE_USE_FSDP": "leave the option out, and set fsdp",
    "ACCELERATE_USE_MEGATRON_LM": _SHARDING,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _SHARDING,
}
_DYNAMO, _PRECISION, _CPU = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"
_TRUE = ("1", "on", "t", "true", "y", "yes")


@dataclass(frozen=True)
class Asked:
    """The options `--mixed_precision` (`bf16`, `fp16`) and `--cpu` of `accelerate launch`."""

    bf16: bool = False
    fp16: bool = False
    cpu: bool = False


def asked_by_accelerate() -> Asked:
    """Reads the variables that transformers' Trainer follows too.

    Raises:
        UsageError: A variable asks for something unsupported: another precision, torch.compile, or a sharding library.
    """
    on = {name for name, value in os.environ.items() if value.lower() in _TRUE}
    refused = {name: remedy for name, remedy in _SWITCHES.items() if name in on}
    if os.environ.get(_DYNAMO, "no").lower() not in ("", "no"):
        refused[_DYNAMO] = "leave the option out, and set torch_compile_backend"
    precision = os.environ.get(_PRECISION, "no").lower()
    if precision not in ("", "no", "bf16", "fp16"):
        refused[_PRECISION] = "use bf16 or fp16"
    for name, remedy in refused.items():
        raise UsageError(f"{name}={os.environ[name]}, as `accelerate launch` sets it, is not supported; {remedy}")
    return Asked(bf16=precision == "bf16", fp16=precision == "fp16", cpu=_CPU in on)
