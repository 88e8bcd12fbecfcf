"""What a traced step sees beside the sizes of tensors. That plans are as large as real steps is tested in
test_memory.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config

from stepmark.config.training_fields import TrainingFields
from stepmark.parallel.buckets import HOST_BUCKET_ELEMENTS
from stepmark.preflight.plan.allocations import ACTIVATIONS, COMMUNICATION, AllocationTracker
from stepmark.preflight.plan.simulated_mesh import DEVICES
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import trace_step
from stepmark.runtime import collectives

MEGABYTE = 2**20


def highest(compute: Callable[[Tensor, Tensor], Tensor]) -> int:
    """The megabytes at the peak of a backward pass, of which two leaves of a megabyte are two."""
    tracker = AllocationTracker()
    with FakeTensorMode(), tracker:
        one, other = (torch.zeros(256, 1024, requires_grad=True) for _ in range(2))
        result = compute(one, other)
        tracker.enter("backward", ACTIVATIONS)
        result.sum().backward()
    return max(sum(usage.values()) for usage in tracker.peaks().values()) // MEGABYTE


def test_gradients_of_several_uses_are_added_in_place() -> None:
    assert highest(lambda one, other: (one * 2).sum() + (one * 3).sum()) == 4


def test_parts_of_a_gradient_are_added_in_place() -> None:
    assert highest(lambda one, other: one.gather(0, torch.zeros(1, 1024, dtype=torch.long))) == 3


def test_a_gradient_with_another_holder_is_not_added_in_place() -> None:
    def compute(one: Tensor, other: Tensor) -> Tensor:
        late, early = other.view_as(other), one.view_as(one)
        third = early * 3
        return ((early + late) * 2).sum() + third.sum()  # `late` waits with the gradient that `early` has got

    assert highest(compute) == 5


def test_sharded_gradients_are_sent_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step sends them at its end, and learns when they are complete."""
    monkeypatch.setattr(collectives, "SPARE_BYTES", 0)
    width = 1280
    assert 12 * width**2 > 2 * HOST_BUCKET_ELEMENTS
    config = GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=67, n_positions=32)
    args = TrainingFields(zero_1=True, gradient_accumulation_steps=2)
    peaks = trace_step(StepSetup(config, args, 2, 32, DEVICES["cpu"])).peaks
    assert peaks["backward pass 1, second half"][COMMUNICATION] > HOST_BUCKET_ELEMENTS
    assert peaks["backward pass 0, second half"][COMMUNICATION] < 1000
    assert "forward pass 2" not in peaks


def test_what_hosts_have_received_gradients_in_is_kept_up_to_a_size() -> None:
    config = GPT2Config(n_layer=2, n_embd=1024, n_head=4, vocab_size=67, n_positions=32)
    peaks = trace_step(StepSetup(config, TrainingFields(zero_1=True), 2, 32, DEVICES["cpu"])).peaks
    parts = 2 * 12 * 1024**2 * 4 // 2  # half of the layers' gradients, in float32
    assert parts / 2 < peaks["forward pass 0"][COMMUNICATION] < 1.1 * min(parts, collectives.SPARE_BYTES)
