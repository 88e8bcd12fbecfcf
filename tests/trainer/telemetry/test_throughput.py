"""Rates, FLOPs of a token, peaks of devices, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.parallel.pipeline.staged_model import complete_size
from stepmark.runtime.base import DeviceMemory
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.hardware import host_memory
from stepmark.sharding.layout import Layout, annotate
from stepmark.trainer.telemetry import throughput as peaks
from stepmark.trainer.telemetry import throughput as speed_module
from stepmark.trainer.telemetry.throughput import Throughput, TotalFlos, flops_per_token, memory_fields, peak_flops

CPU = EagerRuntime(torch.device("cpu"))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=6, bos_token_id=0, eos_token_id=0)
    )


def llama(**fields: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=11, bos_token_id=0, eos_token_id=0, **fields))


def test_embeddings_that_are_only_looked_up_are_not_multiplied() -> None:
    tied, untied = gpt2(), llama()
    assert complete_size(tied).multiplied == sum(p.numel() for p in tied.parameters()) - 6 * 8
    assert complete_size(untied).multiplied == sum(p.numel() for p in untied.parameters()) - 11 * 8


def test_a_parameter_that_is_cut_counts_whole() -> None:
    model = gpt2()
    whole = complete_size(model).multiplied
    weight = model.transformer.h[0].mlp.c_fc.weight
    weight.data = weight.data[:, :16].clone()
    assert complete_size(model).multiplied == whole - 8 * 16
    annotate(weight, Layout.box((8, 32), (0, 0), (8, 16)))
    assert complete_size(model).multiplied == whole


def test_flops_of_a_token_are_those_of_the_palm_paper() -> None:
    model = llama(head_dim=6)
    assert flops_per_token(model, 32) == 6 * complete_size(model).multiplied + 12 * 3 * 2 * 6 * 32
    model = gpt2()
    assert flops_per_token(model, 32) == 6 * complete_size(model).multiplied + 12 * 2 * 2 * 4 * 32


def test_nothing_is_said_of_a_model_that_does_not_tell() -> None:
    assert flops_per_token(nn.Linear(3, 3), 8) is None
    experts = gpt2()
    experts.config.num_experts = 8
    assert flops_per_token(experts, 8) is None
    both = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=11)
    assert flops_per_token(T5ForConditionalGeneration(both), 8) is None


def test_of_frozen_parameters_no_gradient_counts() -> None:
    model = gpt2()
    whole, size = flops_per_token(model, 8), complete_size(model).multiplied
    model.requires_grad_(False)
    trained = model.transformer.h[0].mlp.c_fc.weight.requires_grad_()
    assert flops_per_token(model, 8) == whole - 2 * (size - trained.numel())  # type: ignore[operator]


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    more = {"vocab_size": 11, "num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **more, bos_token_id=0, eos_token_id=0))
    dense = 3 * (4 * 8 * 8 + 4 * 8 + 2 * 8) + 8 + 11 * 8  # attention, router, norms; the last norm, the head
    expert = 3 * 8 * 16
    assert complete_size(model).multiplied == dense + 3 * expert
    assert complete_size(model).elements == dense + 3 * 4 * expert + 11 * 8
    assert complete_size(model).active == dense + 3 * expert + 11 * 8
    assert flops_per_token(model, 32) == 6 * (dense + 3 * expert) + 12 * 3 * 2 * 4 * 32
    batch = StepBatch([MicroBatch({"input_ids": torch.zeros(2, 5)}, 2, 2)], 2, 0.1, {"samples": 2})
    assert (TotalFlos(model).per_token, TotalFlos(model).tokens(batch)) == (6 * (dense + 3 * expert), 10)


@pytest.mark.parametrize(
    ("model", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67.0),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312.0),
        ("NVIDIA L40S", torch.bfloat16, 362.0),
        ("NVIDIA L4", torch.bfloat16, 121.0),
        ("Tesla V100-SXM2-16GB", torch.float32, 15.7),
        ("trn1.32xlarge", torch.bfloat16, 95.0),
        ("trn1n.32xlarge", torch.float32, 23.75),
        ("trn2.48xlarge", torch.bfloat16, 667.0 / 4),
    ],
)
def test_peaks(model: str, dtype: torch.dtype, teraflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    found = peak_flops(model, dtype)
    assert found == pytest.approx(teraflops * 1e12)


def test_logical_cores_tf32_and_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert peak_flops("trn2.48xlarge", torch.bfloat16) == pytest.approx(667e12 / 8)
    monkeypatch.setattr(peaks.torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 156e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float32) == 15.7e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert peak_flops("Some new device", torch.bfloat16) is None
    assert peak_flops(None, torch.bfloat16) is None
    assert peaks.device_model(CPU) is None


def step(samples: int, length: int | None) -> StepBatch:
    inputs = {"x": torch.zeros(2)} if length is None else {"input_ids": torch.zeros(2, length, dtype=torch.long)}
    return StepBatch([MicroBatch(inputs, 2, 2)] * 2, samples, 0.1, {"samples": samples})


def test_rates_count_all_ranks_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_module, "device_model", lambda runtime: "NVIDIA A100")
    model = gpt2()
    speed = Throughput(model, CPU, 2, torch.bfloat16)
    speed.add(step(8, 6))
    speed.add(step(4, 6))
    flops = 12 * 6 * flops_per_token(model, 6)  # type: ignore[operator]
    fields = speed.fields(2.0)
    assert fields["samples_per_second"] == 6.0
    assert fields["model_flops_per_second"] == flops / 2
    assert fields["model_flops_utilization"] == pytest.approx(flops / 2 / (2 * 312e12))
    speed.restart()
    assert speed.fields(1.0)["samples_per_second"] == 0.0


def test_what_is_not_known_is_left_out() -> None:
    speed = Throughput(gpt2(), CPU, 1, torch.float32)
    speed.add(step(4, 6))
    assert set(speed.fields(1.0)) == {"samples_per_second", "model_flops_per_second"}
    speed.add(step(4, None))
    assert speed.fields(1.0) == {"samples_per_second": 8.0}


def test_micro_batches_count_with_their_own_lengths_and_samples_of_one_row_once() -> None:
    model = gpt2()
    speed = Throughput(model, CPU, 1, torch.float32)
    rows = [torch.zeros(2, 4, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)]  # the second of two samples
    speed.add(StepBatch([MicroBatch({"input_ids": each}, 2, 2) for each in rows], 4, 0.1, {"samples": 4}))
    expected = 8 * flops_per_token(model, 4) + 6 * flops_per_token(model, 6)  # type: ignore[operator]
    assert speed.fields(1.0)["model_flops_per_second"] == expected


def test_memory_of_the_host_and_of_a_device() -> None:
    told = host_memory()
    assert told is not None
    assert 0 < told[0] <= told[1]
    assert CPU.memory() is None
    assert set(memory_fields(CPU)) == {"host_memory", "host_memory_peak"}

    class Device(EagerRuntime):
        def memory(self) -> DeviceMemory | None:
            return DeviceMemory(10, 20, None)

    fields = memory_fields(Device(torch.device("cpu")))
    assert (fields["device_memory"], fields["device_memory_peak"]) == (10, 20)
    assert "device_memory_limit" not in fields


def test_memory_of_an_accelerator_is_what_its_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EagerRuntime(torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    assert device.memory() == DeviceMemory(30, 40, 100)

    def refuse(device: torch.device) -> int:
        raise RuntimeError("this allocator keeps no counts")

    monkeypatch.setattr(torch.accelerator, "memory_allocated", refuse)
    assert device.memory() is None
