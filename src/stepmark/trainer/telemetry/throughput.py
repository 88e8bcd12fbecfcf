"""Throughput and memory of a run: the fields of metrics.jsonl that describe the machine, not the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import StepBatch
from stepmark.runtime.base import Runtime
from stepmark.runtime.hardware import host_memory
from stepmark.trainer.telemetry.peak_flops import device_model, peak_flops
from stepmark.training.flops import flops_per_token


class Throughput:
    """Counts samples and floating-point operations since the last log, over all ranks.

    Each of the `ranks` has one device; `dtype` is that of matrix products. The sequence length is that of this rank's
    `input_ids`; without such an input, or where the model's operations are unknown, operations are not counted.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, ranks: int, dtype: torch.dtype) -> None:
        self._model = model
        self._peak = peak_flops(device_model(runtime), dtype)
        self._ranks = ranks
        self._by_length: dict[int, float | None] = {}
        self.restart()

    def restart(self) -> None:
        self._samples = 0
        self._flops: float | None = 0.0

    def add(self, batch: StepBatch) -> None:
        """Adds a step that was trained with this batch."""
        self._samples += batch.samples
        length = sequence_length(batch)
        each = None if length is None else self._flops_per_token(length)
        if each is None or length is None or self._flops is None:
            self._flops = None
        else:
            self._flops += each * length * batch.samples

    def fields(self, seconds: float) -> dict[str, float]:
        """Rates over the `seconds` of training since the last log."""
        found = {"samples_per_second": self._samples / seconds}
        if self._flops is not None:
            found["model_flops_per_second"] = self._flops / seconds
            if self._peak is not None:
                found["model_flops_utilization"] = self._flops / seconds / (self._peak * self._ranks)
        return found

    def _flops_per_token(self, length: int) -> float | None:
        if length not in self._by_length:
            self._by_length[length] = flops_per_token(self._model, length)
        return self._by_length[length]


def sequence_length(batch: StepBatch) -> int | None:
    """Tokens in a row of the step's longest micro-batch, padding included; None where there are no `input_ids`."""
    inputs: list[Any] = [micro_batch.inputs for micro_batch in batch]
    ids = [each.get("input_ids") for each in inputs if isinstance(each, dict)]
    lengths = [each.shape[-1] for each in ids if isinstance(each, Tensor) and each.ndim == 2]
    return max(lengths) if lengths and len(lengths) == len(inputs) else None


def memory_fields(runtime: Runtime) -> dict[str, int]:
    """Bytes of this process on the host and on its device, current and peak; unknown ones are left out."""
    host, device = host_memory(), runtime.memory()
    found: dict[str, int | None] = {}
    if host is not None:
        found |= {"host_memory": host[0], "host_memory_peak": host[1]}
    if device is not None:
        found |= {"device_memory": device.used, "device_memory_peak": device.peak, "device_memory_limit": device.limit}
    return {name: value for name, value in found.items() if value is not None}
