"""Environment variables that matter, and those that are known to do harm."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.runtime.xla_environment import TYPE_OVERRIDES, is_on

TOPIC = "environment"
SHOWN = (
    "PJRT_DEVICE",
    "XLA_FLAGS",
    "NEURON_CC_FLAGS",
    "NEURON_COMPILE_CACHE_URL",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_RT_ROOT_COMM_ID",
    "FI_PROVIDER",
    "FI_EFA_USE_DEVICE_RDMA",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "STEPMARK_CACHE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TMPDIR",
)
# What slows a run down, or changes what it leaves, without a sign of it.
HARMFUL = {
    "NEURON_EXTRACT_GRAPHS_ONLY": "graphs are extracted and values are made up, so nothing is saved",
    "XLA_IR_DEBUG": "every operation records where it comes from, which slows each step",
    "XLA_HLO_DEBUG": "every operation records where it comes from, which slows each step",
    "PT_XLA_DEBUG": "every graph is analysed, which slows each step",
    "PT_XLA_DEBUG_LEVEL": "every graph is analysed, which slows each step",
    "CUDA_LAUNCH_BLOCKING": "every operation waits for the device",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are hidden among frames of C++",
}


def look_at_variables(device: str, environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """`device`: the device type of the run."""
    found = os.environ if environment is None else environment
    for name in SHOWN:
        if name in found:
            yield Finding(TOPIC, name, found[name], values={"value": found[name]})
    for name, remedy in TYPE_OVERRIDES.items():
        if is_on(name, found):
            text = f"{found[name]}: torch_xla stores tensors in a narrower type than their dtype; {remedy}"
            yield Finding(TOPIC, name, text, Status.FAILURE if device == "xla" else Status.WARNING)
    for name, effect in HARMFUL.items():
        if is_on(name, found):
            yield Finding(TOPIC, name, f"{found[name]}: {effect}; unset it", Status.WARNING)
    if found.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        text = "DETAIL: every collective is checked with another one; unset it"
        yield Finding(TOPIC, "TORCH_DISTRIBUTED_DEBUG", text, Status.WARNING)
