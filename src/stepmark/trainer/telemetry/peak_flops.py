"""Peak rates of dense matrix products as manufacturers state them, for model FLOPs utilization.

Sources, in TFLOP/s without sparsity:
Trainium, Trainium2: AWS Neuron documentation, "Trainium Architecture" and "Trainium2 Architecture". Per chip 190 (BF16,
    TF32) and 47.5 (FP32), on 2 cores; 667 and 181, on 8 cores.
V100, T4, A100, A10G, L4, L40S, H100, H200, B200: NVIDIA's data sheets of these products (tensor cores; where a sheet
    states the rate with sparsity, half of it). RTX 3090, RTX 4090: NVIDIA's white papers on the GA102 and Ada
    architectures (FP32 accumulation).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stepmark.runtime.base import Runtime
from stepmark.runtime.hardware import neuron_device_present

INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2: the instance type
TERA = 1e12


@dataclass(frozen=True)
class Rates:
    """TFLOP/s by type; None: not supported, or not stated by the manufacturer."""

    bfloat16: float | None
    float32: float
    tf32: float | None = None  # float32 matrix products with inputs rounded to TF32, if enabled in PyTorch


# The first name that is contained in the device's own is used.
GPUS: dict[str, Rates] = {
    "B200": Rates(2250.0, 80.0, 1125.0),
    "H200": Rates(989.4, 67.0, 494.7),
    "H100 PCIe": Rates(756.5, 51.2, 378.0),
    "H100 NVL": Rates(835.5, 60.0, 417.5),
    "H100": Rates(989.4, 67.0, 494.7),
    "A100": Rates(312.0, 19.5, 156.0),
    "L40S": Rates(362.0, 91.6, 183.0),
    "L4": Rates(121.0, 30.3, 60.0),
    "A10G": Rates(70.0, 35.0, 35.0),
    "V100": Rates(None, 15.7),
    "T4": Rates(None, 8.1),
    "RTX 4090": Rates(165.2, 82.6, 82.6),
    "RTX 3090": Rates(71.0, 35.6, 35.6),
}
TRAINIUM = Rates(190.0 / 2, 47.5 / 2)  # a core of two
TRAINIUM2 = Rates(667.0 / 8, 181.0 / 8)  # a physical core of eight


def device_model(runtime: Runtime) -> str | None:
    """The device's model name ("NVIDIA H100 80GB HBM3", "trn1.32xlarge"); None where it is unknown."""
    if runtime.device.type == "cuda":
        return torch.cuda.get_device_name(runtime.device)
    if runtime.device.type in ("xla", "neuron") and not runtime.host_memory and neuron_device_present():
        return INSTANCE.read_text().strip() if INSTANCE.is_file() else None
    return None


def peak_flops(model: str | None, dtype: torch.dtype) -> float | None:
    """FLOP/s of one rank's device of this model for matrix products of this type; None where it is unknown."""
    if model is None:
        return None
    if model.startswith(("trn1", "trn2")):
        return _teraflops(_neuron_core(model), dtype, tf32=False)
    rates = next((rates for name, rates in GPUS.items() if name in model), None)
    return None if rates is None else _teraflops(rates, dtype, tf32=torch.get_float32_matmul_precision() != "highest")


def _teraflops(rates: Rates, dtype: torch.dtype, *, tf32: bool) -> float | None:
    found = {torch.bfloat16: rates.bfloat16, torch.float32: rates.tf32 if tf32 and rates.tf32 else rates.float32}
    rate = found.get(dtype)
    return None if rate is None else rate * TERA


def _neuron_core(instance: str) -> Rates:
    """The core of one rank. On Trainium2 a logical core is NEURON_LOGICAL_NC_CONFIG physical ones (default 2)."""
    if instance.startswith("trn1"):
        return TRAINIUM
    configured = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    cores = int(configured) if configured.isdigit() else 2
    assert TRAINIUM2.bfloat16 is not None
    return Rates(TRAINIUM2.bfloat16 * cores, TRAINIUM2.float32 * cores)
