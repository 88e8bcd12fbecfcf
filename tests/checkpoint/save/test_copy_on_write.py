"""What is copied while training goes on has the values that it had when `save` was called, whoever writes meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stepmark.checkpoint import Checkpointer, dcp
from stepmark.checkpoint.save import snapshot as module
from stepmark.errors import CheckpointError
from tests.support.gate import CopyGate
from tests.system.distributed.checkpoint_world import run_ranks


class Model(nn.Module):
    """A forward pass writes to parameters and buffers, and an LSTM asks for memory to write to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50_001, 6, max_norm=0.1)
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 3, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(3, 40).t())  # not in row-major order
        self.brief = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.clamped = nn.Parameter(torch.randn(3))
        self.clamped.data = torch.randn(9)[4:7]  # what is left of a larger tensor
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Any:
        self.clamped.data.clamp_(-0.01, 0.01)  # which torch counts nowhere
        hidden, _ = self.lstm(self.norm(self.embedding(tokens))[:, None])
        return (hidden[:, 0] @ self.matrix.t() * (self.brief.float() + self.clamped).sum()).sum()


class State:
    """A model and its optimizer after two steps."""

    def __init__(self, **options: Any) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        for _ in range(2):
            self.earlier = deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
            self.passes()
            self.optimizer.step()

    def passes(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([1, 2, 3])).backward()

    @property
    def sections(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        found = [*self.model.state_dict().values(), *(value for state in states for value in state.values())]
        return [tensor.detach().clone() for tensor in found]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    gate = CopyGate(monkeypatch)
    yield gate
    gate.open()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def check_restored(checkpointer: Checkpointer, expected: list[Tensor]) -> None:
    other = State()
    checkpointer.restore(other.sections)
    assert same(other.tensors(), expected)


@torch.no_grad()
def write_in_place(state: State) -> None:
    for tensor in [*state.model.parameters(), *state.model.buffers()]:
        tensor.mul_(3)


def write_to_data(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.data[:1] = 7


def write_through_numpy(state: State) -> None:
    for parameter in (state.model.clamped, state.model.lstm.bias_hh_l0):
        parameter.detach().numpy()[:] = 7


def load_earlier_values(state: State) -> None:
    model, optimizer = state.earlier
    state.model.load_state_dict(model)
    state.optimizer.load_state_dict(optimizer)


def replace_states(state: State) -> None:
    for values in state.optimizer.state.values():
        values["exp_avg"].zero_()
        values["exp_avg_sq"] = torch.ones_like(values["exp_avg_sq"])


def average(state: State) -> None:
    state.model.average.lerp_(state.model.clamped.detach(), 0.5)


@torch.inference_mode()
def scatter(state: State) -> None:
    state.model.embedding.weight.index_fill_(0, torch.tensor([0]), 9.0)


@torch.no_grad()
def free_and_fill(state: State) -> None:
    """As sharding of a user's own frees a parameter between layers."""
    for parameter in state.model.parameters():
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        parameter.fill_(7)


WRITERS = [
    State.passes,
    write_in_place,
    write_to_data,
    write_through_numpy,
    load_earlier_values,
    replace_states,
    average,
    scatter,
    free_and_fill,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_values_are_those_of_the_call(tmp_path: Path, gate: CopyGate, write: Callable[[State], None]) -> None:
    state = State()
    before = state.tensors()
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state.sections)
        write(state)
        assert not same(state.tensors(), before)
        gate.open()
        handle.result()
        check_restored(checkpointer, before)
    assert gate.pending == [10 * 4]  # each trained parameter with its step and two moments


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_update_waits_and_takes_no_more_memory(tmp_path: Path, gate: CopyGate, options: dict[str, bool]) -> None:
    state, hooks = State(**options), [*_global_optimizer_pre_hooks]  # of dcp, for one
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state.sections)
        state.passes()
        before = state.tensors()
        trained = [state.model.matrix, *state.optimizer.state[state.model.matrix].values()]
        places = [torch._C._data_address(tensor) for tensor in trained]  # type: ignore[attr-defined]
        updating = threading.Thread(target=state.optimizer.step)
        updating.start()
        updating.join(0.3)
        assert updating.is_alive()
        assert same(state.tensors(), before)
        gate.open()
        updating.join(30)
        assert not same(state.tensors(), before)
        assert [tensor.data_ptr() for tensor in trained] == places
    assert [*_global_optimizer_pre_hooks] == hooks


def test_training_with_saves_is_training_without_them(tmp_path: Path) -> None:
    quiet, busy = State(), State()
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in range(6):
            checkpointer.save(step, busy.sections)
            saved = busy.tensors()
            for state in (quiet, busy):
                state.passes()
                state.optimizer.step()
            checkpointer.wait()
            check_restored(checkpointer, saved)
    assert same(quiet.tensors(), busy.tensors())


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread that has freed each frozen tensor."""
    found: list[threading.Thread] = []
    freeze = torch._lazy_clone

    def watched(tensor: Tensor) -> Tensor:
        frozen = freeze(tensor)
        weakref.finalize(frozen, lambda: found.append(threading.current_thread()))
        return frozen

    monkeypatch.setattr(torch, "_lazy_clone", watched)
    return found


def test_only_threads_that_train_free_what_was_frozen(tmp_path: Path, freed: list[threading.Thread]) -> None:
    """In torch, a write while another thread frees what was frozen reads memory that is gone: an LSTM, an optimizer
    that changes its mode, or a callback writes at any time."""
    state = State()
    with Checkpointer(tmp_path) as checkpointer:
        for step, free in enumerate((state.optimizer.step, checkpointer.wait, lambda: checkpointer.save(3, {}))):
            freed.clear()
            handle = checkpointer.save(step, state.sections)
            handle.wait()
            for thread in threading.enumerate():
                if thread.name.startswith("stepmark-save"):
                    thread.join()
            assert freed == []
            state.passes()
            free()
            assert freed == [threading.current_thread()] * 10 * 4


def test_a_thread_that_trains_frees_what_dcp_has_frozen(tmp_path: Path, freed: list[threading.Thread]) -> None:
    state = State()
    saved = dict(zip(("model", "optimizer"), get_state_dict(state.model, state.optimizer), strict=True))
    loads, saves = (partial(call, checkpoint_id=tmp_path / "c") for call in (dcp.load, dcp.async_save))
    for call in (state.optimizer.step, partial(loads, {}), partial(saves, saved)):
        freed.clear()
        saves(saved).result()
        assert freed == []
        call()
        assert freed == [threading.current_thread()] * 10 * 3
    freed.clear()
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    assert {*freed} == {threading.current_thread()}


def save_held(rank: int, folder: Path) -> list[Tensor]:
    """Saves, and writes before anything is copied; returns what was saved."""
    with pytest.MonkeyPatch.context() as patch:
        gate, state = CopyGate(patch), State()
        before = state.tensors()
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state.sections)
            write_in_place(state)
            gate.open()
        assert gate.pending[0] > 10
    return before


def test_each_rank_keeps_its_share(tmp_path: Path) -> None:
    """Ranks write parts of tensors, which begin anywhere in their memory."""
    before, other = run_ranks(2, save_held, tmp_path)
    assert same(before, other)
    with Checkpointer(tmp_path) as checkpointer:
        check_restored(checkpointer, before)


def test_memory_that_torch_does_not_guard_is_copied_at_once(tmp_path: Path, gate: CopyGate) -> None:
    """Numpy arrays of before the save, of a state too, memory that processes share, a view of a larger tensor. What had
    an array once can wait."""
    state = State()
    array = state.model.clamped.detach().numpy()
    moment = state.optimizer.state[state.model.clamped]["exp_avg"].numpy()
    state.model.norm.weight.detach().numpy()[:] = 3
    state.model.brief.data = state.model.brief.data.clone().share_memory_()
    large = torch.zeros(10)
    state.model.matrix.data = torch.cat([large, state.model.matrix.detach().flatten()])[10:].view(40, 3)
    held = state.model.matrix.data
    before = state.tensors()
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state.sections)
        array[:] = moment[:] = 7
        state.model.brief.data.zero_()
        held.zero_()
        assert state.model.clamped.detach().eq(7).all()
        gate.open()
        handle.result()
        check_restored(checkpointer, before)
    assert gate.pending == [10 * 4 - 4]


def test_what_was_given_away_by_dlpack_is_copied_at_once(tmp_path: Path, gate: CopyGate) -> None:
    state = State()
    moments = state.optimizer.state[state.model.clamped]
    array, other = np.from_dlpack(moments["exp_avg"]), torch.from_dlpack(moments["exp_avg_sq"])
    before = state.tensors()
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state.sections)
        array[:] = 7
        other.fill_(7)
        assert moments["exp_avg"].eq(7).all()
        gate.open()
        handle.result()
        check_restored(checkpointer, before)
    assert gate.pending == [10 * 4 - 2]


def test_only_what_an_optimizer_writes_waits(tmp_path: Path, gate: CopyGate) -> None:
    """What others write, such as averages of parameters, would take memory twice."""
    model = nn.Linear(4, 4)
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"model": model, "nest": {"a": torch.ones(3)}})
        gate.open()
        handle.result()
    assert gate.pending == [0]


def test_an_error_in_a_copy_fails_the_save_and_lets_the_update_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for a thread")

    state = State()
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(module, "_copy_all", lambda found, *rest: None if not found else fails())
        monkeypatch.setattr("stepmark.checkpoint.save.snapshot.copy_to_host", lambda *arguments, **options: None)
        handle = checkpointer.save(1, state.sections)
        state.passes()
        state.optimizer.step()
        with pytest.raises((CheckpointError, MemoryError), match="no memory for a thread"):
            handle.result()
