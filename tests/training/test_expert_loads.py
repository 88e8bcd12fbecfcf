"""The tokens that experts get in a step are those their routers chose, each counted once; biases follow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.training.compiled_layers import layers_of
from stepmark.training.model_options import enable_gradient_checkpointing
from stepmark.training.optimizer import build_optimizer
from stepmark.training.step import StepStatistics, TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.models import build

RATE = 0.125
LENGTH, EXPERTS = 6, 4


def make_step(model: Any, rate: float = RATE) -> TrainStep:
    mesh = Mesh.create(device="cpu")
    optimizer = build_optimizer("sgd", list(model.named_parameters()), mesh.runtime, learning_rate=0.0)
    model.train()
    return TrainStep(model, optimizer, MicroBatchLoss(model), mesh, accumulation=2, router_bias_update_rate=rate)


def micro_batch(seed: int, *, mask: Tensor | None = None, rows: int = 2, filled: bool = False) -> MicroBatch:
    tokens = torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if mask is not None:
        inputs["attention_mask"] = mask
    return MicroBatch(inputs, rows, rows * (LENGTH - 1), filled=filled)


@contextmanager
def chosen(model: Any) -> Iterator[list[Tensor]]:
    """The choices of the only router in the micro-batches' first passes, [tokens, k]."""
    found: list[Tensor] = []
    (experts,) = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hook = experts.register_forward_pre_hook(lambda module, args: found.append(args[1]))
    yield found
    hook.remove()


def step_with(model: Any, *batches: MicroBatch, rate: float = RATE) -> tuple[StepStatistics, list[Tensor]]:
    with chosen(model) as found:
        statistics = make_step(model, rate)(0, StepBatch(list(batches), 4, 1.0, {}))
    return statistics, found[:: len(found) // len(batches)]


LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_each_token_counts_once_for_each_expert_that_it_goes_to(reentrant: bool | None) -> None:
    model = build("deepseek_v3")
    if reentrant is not None:
        enable_gradient_checkpointing(model, Mesh.create(device="cpu").runtime, {"use_reentrant": reentrant})
    batches = micro_batch(1, mask=LEFT_PADDED), micro_batch(2, rows=1, filled=True)
    statistics, (first, second) = step_with(model, *batches)
    kept = torch.cat([first[LEFT_PADDED.flatten() == 1], second[:LENGTH]])
    expected = kept.flatten().bincount(minlength=EXPERTS)
    assert statistics.expert_loads is not None
    assert statistics.expert_loads.tolist() == expected.tolist()
    assert expected.sum() == 2 * (10 + LENGTH)

    (bias,) = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    mean = float(expected.double().mean())
    assert bias.tolist() == [RATE * ((mean > each) - (mean < each)) for each in expected.tolist()]
    assert len(set(bias.tolist())) > 1


def test_evaluations_and_other_steps_do_not_count() -> None:
    model = build("deepseek_v3")
    step = make_step(model, 0.0)
    batch = StepBatch([micro_batch(1), micro_batch(2)], 4, 1.0, {})
    once = step(0, batch).expert_loads
    model(**micro_batch(3).inputs)
    again = step(1, batch).expert_loads
    assert once is not None
    assert again is not None
    assert once.tolist() == again.tolist()
    step.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_other_mixtures(kind: str) -> None:
    model = build(kind)
    step = make_step(model, 0.0)
    loads = step(0, StepBatch([micro_batch(1), micro_batch(2)], 4, 1.0, {})).expert_loads
    assert loads is not None
    assert step.experts == {f"model.layers.{layer}.mlp.experts": EXPERTS for layer in range(2)}
    assert [float(each.sum()) for each in loads.split(EXPERTS)] == [2 * 4 * LENGTH] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo, as it traces
def test_compiled_layers_count() -> None:
    plain, compiled = build("deepseek_v3"), build("deepseek_v3")
    for layer in layers_of(compiled):
        layer.compile(backend="eager")
    batches = micro_batch(1), micro_batch(2, mask=LEFT_PADDED)
    for model in (plain, compiled):
        statistics = make_step(model)(0, StepBatch(list(batches), 4, 1.0, {}))
        assert statistics.expert_loads is not None
        model.found = statistics.expert_loads.tolist()
    assert plain.found == compiled.found


def test_a_dense_model_has_none() -> None:
    model = build("llama")
    assert make_step(model, 0.0)(0, StepBatch([micro_batch(1), micro_batch(2)], 4, 1.0, {})).expert_loads is None


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_rate_without_a_bias_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="router_bias_update_rate: no router"):
        make_step(build(kind))
