"""Forward passes through stages, seen from one rank: the others are not there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.pipeline_comparison import pipeline_mesh, tokens_for
from stepmark.data.loader.batch import MicroBatch
from stepmark.errors import DataError, UsageError
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.pipeline.transfers import Activation, Transfers
from stepmark.runtime.stage_transfers import Exchange, Form
from stepmark.training.pipelined_forward import EvaluationPaused, PipelinedForward
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.models import build


class Sending:
    """Something on its way; it has left when somebody has waited for it."""

    waited = False

    def wait(self) -> None:
        self.waited = True


class SlowLinks:
    """What is sent arrives only when the sender waits."""

    def __init__(self) -> None:
        self.sending: list[Sending] = []

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        assert not incoming
        self.sending.append(Sending())
        return Exchange([self.sending[-1]], outgoing, (), [])  # type: ignore[list-item]

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        return self.exchange(other, outgoing, incoming)


def stopped_after(count: int) -> Iterator[MicroBatch]:
    for _ in range(count):
        yield MicroBatch({"input_ids": tokens_for(67)}, 2, None)
    raise EvaluationPaused


def test_what_was_sent_before_an_evaluation_stopped_still_arrives() -> None:
    """The other ranks stop before the same batch, and may be behind."""
    mesh: Any = pipeline_mesh(0, 2)
    mesh.links = links = SlowLinks()
    model = parallelize(build("llama", num_hidden_layers=2), mesh)
    forward = PipelinedForward(model, MicroBatchLoss(model), mesh)
    with pytest.raises(EvaluationPaused), torch.no_grad():
        list(forward(stopped_after(3), lambda batch: None))
    assert len(links.sending) == 4  # three batches' hidden states, and once their form
    assert all(each.waited for each in links.sending)


def test_hidden_states_that_the_next_stage_does_not_expect_are_an_error() -> None:
    """It would receive garbage, or wait for ever."""
    mesh: Any = pipeline_mesh(0, 2)
    mesh.links = SlowLinks()
    transfers = Transfers(mesh, draws=False)
    transfers.begin(1, [(0, "rows", Activation(torch.ones(2, 3)))], [], [], [])
    transfers.begin(1, [(0, "other rows", Activation(torch.ones(2, 4)))], [], [], [])
    with pytest.raises(UsageError, match=r"after stage 0 were \[2, 3\] torch.float32 and are \[2, 4\]"):
        transfers.begin(1, [(0, "rows", Activation(torch.ones(2, 4)))], [], [], [])


class FullLinks(SlowLinks):
    """What comes is here at once; remembers what it was."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.received: list[weakref.ref[Tensor]] = []

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        tensors = [torch.ones(form.shape, dtype=form.dtype) for form in incoming]
        self.received += [weakref.ref(tensor) for tensor in tensors]
        return Exchange((), outgoing, (), tensors)

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        return Exchange.done([self.form.encoded()] * len(incoming))


def test_the_last_stage_holds_the_hidden_states_of_one_batch_at_a_time() -> None:
    mesh: Any = pipeline_mesh(1, 2)
    model = parallelize(build("llama", num_hidden_layers=2), mesh)
    tokens = tokens_for(67)
    mesh.links = links = FullLinks(Form((*tokens.shape, model.config.hidden_size), torch.float32))
    forward = PipelinedForward(model, MicroBatchLoss(model), mesh)
    batches = [MicroBatch({"input_ids": tokens}, 2, None) for _ in range(6)]
    held = []
    for _ in forward(batches, lambda batch: model(**batch.inputs).logits.sum()):
        held.append(sum(reference() is not None for reference in links.received))
    assert len(links.received) == 6
    assert max(held) <= 1


def test_a_batch_that_names_no_arguments_is_named() -> None:
    mesh: Any = pipeline_mesh(0, 2)
    mesh.links = SlowLinks()
    model = parallelize(build("llama", num_hidden_layers=2), mesh)
    forward = PipelinedForward(model, MicroBatchLoss(model), mesh)
    with pytest.raises(DataError, match=r"a batch is a list; let the dataset"), torch.no_grad():
        list(forward([MicroBatch([tokens_for(67)], 2, None)], lambda batch: None))
