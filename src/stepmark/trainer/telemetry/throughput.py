"""Throughput, time by part, FLOPs and memory: the fields of metrics.jsonl that describe the machine, not the model."""

from __future__ import annotations

import functools
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import StepBatch
from stepmark.liveness.progress import BETWEEN, DATA, METRICS, in_phase
from stepmark.parallel.pipeline.balance import active_experts
from stepmark.parallel.pipeline.staged_model import complete_size
from stepmark.runtime.base import Runtime
from stepmark.runtime.hardware import host_memory, neuron_device_present
from stepmark.runtime.mesh import Mesh
from stepmark.training.model_labels import unwrapped


class Throughput:
    """Counts samples and floating-point operations since the last log, over all ranks.

    Each of the `ranks` has one device; `dtype` is that of matrix products. Sequences are as long as in this rank's
    `input_ids`; without such an input, or where the model's operations are unknown, operations are not counted.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, ranks: int, dtype: torch.dtype) -> None:
        self._peak = peak_flops(device_model(runtime), dtype)
        self._ranks = ranks
        self._flops_per_token = functools.cache(functools.partial(flops_per_token, model))
        self.restart()

    def restart(self) -> None:
        self.samples = 0
        self._flops: float | None = 0.0

    def add(self, batch: StepBatch) -> None:
        self.samples += batch.samples
        made = step_tokens(batch, "input_ids")
        costs = [each * tokens for length, tokens in made if (each := self._flops_per_token(length)) is not None]
        if self._flops is not None:
            self._flops = self._flops + sum(costs) if len(costs) == len(batch) else None

    def fields(self, seconds: float) -> dict[str, float]:
        """Rates over the `seconds` of training since the last log."""
        found = {"samples_per_second": self.samples / seconds}
        if self._flops is not None:
            found["model_flops_per_second"] = self._flops / seconds
            if self._peak is not None:
                found["model_flops_utilization"] = self._flops / seconds / (self._peak * self._ranks)
        return found


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """Floating-point operations of forward and backward pass for one token of a sequence of `length` tokens. None where
    the config does not determine it: for models that are not from transformers, for example, and for encoder-decoders,
    of which each part has tokens of its own.

    After Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B: training takes 6 N + 12
    L H Q T operations per token, with N parameters, L layers, H heads of size Q, and T tokens in a sequence. What is
    computed a second time (activation checkpointing) does not count, and causal attention counts in full. N are the
    parameters that are multiplied: an embedding used only for lookup is excluded, one tied to the head is included, and
    of experts those that a token goes through. Frozen ones, as under LoRA, take 4 N: they need no gradients.
    """
    config: Any = getattr(model, "config", None)
    is_text = hasattr(config, "get_text_config") and config.get_text_config() is config
    if not is_text or active_experts(config) is None or getattr(config, "is_encoder_decoder", False):
        return None
    names = "num_hidden_layers", "num_attention_heads", "hidden_size"
    sizes: list[Any] = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, heads, hidden = sizes
    size = getattr(config, "head_dim", None) or hidden // heads
    parameters = complete_size(model)
    frozen = max(parameters.multiplied - parameters.trained, 0)
    return 6.0 * parameters.multiplied - 2.0 * frozen + 12.0 * layers * heads * size * length


def step_tokens(batch: StepBatch, name: str) -> list[tuple[int, float]]:
    """Of each micro-batch that has this input, the length of a row, and how many tokens a step has of such: those of
    all ranks, assuming that samples are on average as long as on this one. Padding counts, rows that only fill do not,
    where there are others."""
    given = [(each, each.inputs.get(name)) for each in batch if isinstance(each.inputs, Mapping)]
    made = [(each, tensor) for each, tensor in given if isinstance(tensor, Tensor) and tensor.dim() and len(tensor)]
    fills = not any(each.rows for each, _ in made)  # a rank may have filler alone
    samples = sum(len(tensor) if fills else each.rows for each, tensor in made)
    counted = [(len(tensor) if fills or not each.filled else each.rows, tensor) for each, tensor in made]
    return [
        (tensor.shape[-1], tensor.numel() // len(tensor) * count * batch.samples / samples) for count, tensor in counted
    ]


def memory_fields(runtime: Runtime) -> dict[str, int]:
    """Bytes of this process on the host and on its device, current and peak; unknown ones are left out."""
    host, device = host_memory(), runtime.memory()
    found: dict[str, int | None] = {}
    if host is not None:
        found |= {"host_memory": host[0], "host_memory_peak": host[1]}
    if device is not None:
        found |= {"device_memory": device.used, "device_memory_peak": device.peak, "device_memory_limit": device.limit}
    return {name: value for name, value in found.items() if value is not None}


Item = TypeVar("Item")
_PHASES = {"data": DATA, "save": BETWEEN, "evaluation": METRICS}  # batches and saves are phases of their own in these


class RunTimers:
    """Seconds since the last restart: waiting for data, in saves, in evaluations, and the rest in steps; and in how
    many of these they compiled, and waited for other ranks."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._parts = dict.fromkeys(_PHASES, 0.0)
        self.within_steps = {"compiling": 0.0, "waiting": 0.0}

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with in_phase(_PHASES[part]):
                yield
        finally:
            self._parts[part] += time.perf_counter() - began

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields the items; the time spent waiting for each belongs to data."""
        while True:
            with self.within("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def training(self) -> float:
        """Seconds excluding saves and evaluations; above 0."""
        paused = self._parts["save"] + self._parts["evaluation"]
        return max(time.perf_counter() - self._started - paused, 1e-9)

    def parts(self) -> dict[str, float]:
        """Seconds of each part, steps included; they add up to the time that has passed."""
        return {**self._parts, "step": max(self.training() - self._parts["data"], 0.0)}


class TotalFlos:
    """`total_flos`: operations as transformers counts them, 6 per parameter and token, 0 for other models.

    Embedding parameters do not count, padding tokens do; rows that only fill a batch's shape do not. Unlike there, of
    experts only those count that a token goes through. This rank may have a part of the model. With a `mesh`, tokens
    are those of all its ranks; otherwise samples of other ranks are taken to be on average as long as on this one.
    """

    def __init__(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        self._model: Any = unwrapped(model)
        self._mesh = mesh

    @functools.cached_property
    def per_token(self) -> int:
        return 6 * complete_size(self._model).outside_embeddings if hasattr(self._model, "num_parameters") else 0

    def tokens(self, batch: StepBatch, hosted: int = 1) -> float:
        """The tokens of a step on all ranks. Collective with a mesh; without, those of the first of the `hosted` ranks
        of this process count for all, since the number must not depend on how many it has."""
        if self._mesh is None:
            batch = replace(batch, micro_batches=batch.micro_batches[: len(batch) // hosted])
        else:
            batch = replace(batch, samples=sum(each.rows for each in batch))
        tokens = sum(each for _, each in step_tokens(batch, getattr(self._model, "main_input_name", "input_ids")))
        return tokens if self._mesh is None else sum(self._mesh.gather_reported(tokens))


INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2: the instance type


def device_model(runtime: Runtime) -> str | None:
    """The device's model name ("NVIDIA H100 80GB HBM3", "trn1.32xlarge"); None where it is unknown."""
    if runtime.device.type not in ("cpu", "xla", "neuron"):
        name = getattr(torch.get_device_module(runtime.device), "get_device_name", None)
        return None if name is None else name(runtime.device)
    if runtime.device.type in ("xla", "neuron") and not runtime.host_memory and neuron_device_present():
        return INSTANCE.read_text().strip() if INSTANCE.is_file() else None
    return None


def peak_flops(model: str | None, dtype: torch.dtype) -> float | None:
    """FLOP/s of one rank's device of this model for matrix products of this type; None where it is unknown."""
    known = tomllib.loads(Path(__file__).with_name("peak_rates.toml").read_text(encoding="utf-8"))
    rates: dict[str, float] = next((rates for name, rates in known.items() if name in (model or "")), {})
    kind = str(dtype).removeprefix("torch.")
    if kind == "float32" and "tf32" in rates and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    return None if kind not in rates else rates[kind] * 1e12 * _cores(model or "")


def _cores(model: str) -> int:
    """Physical cores of one rank: on Trainium2 NEURON_LOGICAL_NC_CONFIG (default 2) are a logical one."""
    configured = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    return (int(configured) if configured.isdigit() else 2) if model.startswith("trn2") else 1
