"""Kinds of state that real programs have: each comes back as torch would give it back, or is refused by the save."""

from __future__ import annotations

import collections
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core import _rational_tests  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from stepmark.checkpoint import Checkpointer, read_manifest
from stepmark.checkpoint.format.integrity import read_values
from stepmark.checkpoint.restore.compare import compare
from stepmark.checkpoint.restore.read_plan import ReadPlan
from stepmark.checkpoint.restore.tensor_reader import TensorReader
from stepmark.checkpoint.sections import describe
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.runtime.eager import EagerRuntime
from stepmark.sharding.layout import Box, Layout, Shard, annotate, layout_of
from stepmark.training.optimizer import build_optimizer
from tests.support.checkpoint_states import range_layout
from tests.support.independent_reader import read_checkpoint

schedulers = torch.optim.lr_scheduler


def through(folder: Path, saved: Any, restored: Any) -> None:
    """Saves one state, and restores it into the other."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, saved)
        checkpointer.wait()
        assert checkpointer.restore(restored) == 1


def refused(folder: Path, state: Any, match: str, **options: Any) -> None:
    with Checkpointer(folder) as checkpointer, pytest.raises(UsageError, match=match):
        checkpointer.save(options.pop("step", 1), state, **options)
    assert not list(folder.glob("checkpoint-*"))


# Optimizers


class Partly(nn.Module):
    """A model one of whose layers never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.pooler = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def trained(name: str, steps: int) -> tuple[Partly, Any]:
    torch.manual_seed(0)
    module = Partly()
    optimizer = build_optimizer(
        name, list(module.named_parameters()), EagerRuntime(torch.device("cpu")), options={"lr": 0.1}
    )
    train(module, optimizer, steps)
    return module, optimizer


def train(module: Partly, optimizer: Any, steps: int, *, all_of_it: bool = False) -> None:
    for _ in range(steps):
        module.zero_grad()
        x = torch.ones(1, 2)
        (module.pooler(module(x)) if all_of_it else module(x)).square().sum().backward()
        optimizer.set_gradients([parameter.grad for parameter in optimizer.parameters])
        optimizer.step()


@pytest.mark.parametrize("warm", [False, True])
def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards(tmp_path: Path, warm: bool) -> None:
    module, optimizer = trained("adamw_torch", 3)
    other, its_optimizer = trained("adamw_torch", 1 if warm else 0)
    if warm:
        train(other, its_optimizer, 1, all_of_it=True)
    through(tmp_path, {"model": module, "optimizer": optimizer}, {"model": other, "optimizer": its_optimizer})
    found, wanted = its_optimizer.named_state(), optimizer.named_state()
    assert found["pooler.weight"] == {}
    assert {name: state.keys() for name, state in found.items()} == {k: s.keys() for k, s in wanted.items()}
    for one in ((module, optimizer), (other, its_optimizer)):
        train(*one, 2, all_of_it=True)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_a_refused_restore_leaves_an_optimizer_as_it_was(tmp_path: Path) -> None:
    module, optimizer = trained("adamw_torch", 3)
    new, its_optimizer = trained("adamw_torch", 0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer}, block=True)
        other = {"model": new, "optimizer": its_optimizer, "nest": {"other": torch.zeros(1)}}
        with pytest.raises(CheckpointMismatch):
            checkpointer.restore(other)
    assert not any(its_optimizer.named_state().values())


def test_another_kind_of_optimizer_is_refused_though_it_had_no_state(tmp_path: Path) -> None:
    module, optimizer = trained("sgd", 3)
    other, its_optimizer = trained("adamw_torch", 3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer}, block=True)
        with pytest.raises(CheckpointMismatch, match="without .*betas.*; resume with the one it was saved from"):
            checkpointer.restore({"model": other, "optimizer": its_optimizer})
        plain = torch.optim.AdamW(other.parameters())
        other(torch.ones(1, 2)).sum().backward()
        plain.step()
        with pytest.raises(CheckpointMismatch, match="without .*betas"):
            checkpointer.restore({"model": other, "optimizer": plain})


def test_comparing_an_optimizer_takes_as_many_calls_as_it_has_parameters(tmp_path: Path) -> None:
    def calls(count: int) -> int:
        module = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros(1)
        optimizer.step()
        state = {"model": module, "optimizer": optimizer}
        folder = tmp_path / str(count)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
        path = folder / "checkpoint-1"
        manifest = read_manifest(path)
        reader = TensorReader(path, manifest)
        plan = ReadPlan(reader, read_values(path, manifest), EagerRuntime(torch.device("cpu")))
        sections = describe(state)
        found = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            compare(plan, state, sections)
        finally:
            sys.setprofile(before)
            reader.close()
        return found

    assert calls(400) < 2.5 * calls(200)


class Keeps:
    """An optimizer that names its state, and keeps state for every parameter from the start."""

    def __init__(self, value: float, *names: str) -> None:
        self.flat = torch.full((4,), value)
        self.step = torch.full((1,), value)
        self.names = names

    def named_state(self) -> dict[str, dict[str, Any]]:
        halves = {
            "a": Shard(self.flat, range_layout((2,), 0, 2)),
            "b": Shard(self.flat, range_layout((2,), 0, 2, at=2)),
        }
        return {name: {"step": self.step, "m": halves[name]} if name in self.names else {} for name in halves}

    def named_groups(self) -> list[dict[str, Any]]:
        return [{"params": ["a", "b"]}]

    def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
        pass


def test_state_that_cannot_be_removed_becomes_zero(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    restored = Keeps(9.0, "a", "b")
    through(tmp_path, {"model": Pair(), "o": Keeps(5.0, "a")}, {"model": Pair(), "o": restored})
    assert restored.flat.tolist() == [5.0, 5.0, 0.0, 0.0]
    assert restored.step.item() == 5.0


class Scaled(torch.optim.SGD):
    """State under a key that is not a parameter, and an extra member in its state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.scale = torch.ones(3)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["global"] = {"n": self.state.get("global", {}).get("n", 0) + 1, "t": torch.full((2,), 7.0)}
        self.scale = self.scale * 2
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict.pop("scale")
        super().load_state_dict(state_dict)


def test_what_an_optimizer_has_of_its_own_comes_back(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, restored = Scaled(module.parameters()), Scaled(other.parameters())
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    group = restored.param_groups[0]
    through(tmp_path, {"model": module, "o": optimizer}, {"model": other, "o": restored})
    assert restored.state["global"]["n"] == 3
    assert restored.state["global"]["t"].tolist() == [7.0, 7.0]
    assert restored.scale.tolist() == [8.0] * 3
    assert restored.param_groups[0] is group
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["momentum_buffer"], restored.state[b]["momentum_buffer"])


@pytest.mark.parametrize(
    "make", [lambda o: schedulers.MultiStepLR(o, [3, 5]), lambda o: torch.optim.swa_utils.SWALR(o, 0.05)]
)
def test_schedulers_with_counters_and_functions(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    def made() -> tuple[nn.Module, Any, Any]:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return module, optimizer, make(optimizer)

    def rates(optimizer: Any, scheduler: Any) -> list[float]:
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    module, optimizer, scheduler = made()
    rates(optimizer, scheduler)
    other, its_optimizer, its_scheduler = made()
    through(
        tmp_path,
        {"model": module, "optimizer": optimizer, "scheduler": scheduler},
        {"model": other, "optimizer": its_optimizer, "scheduler": its_scheduler},
    )
    assert rates(its_optimizer, its_scheduler) == rates(optimizer, scheduler)


# Modules


class Extra(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.value)

    def set_extra_state(self, state: Tensor) -> None:
        self.value = float(state)


class Packed(nn.Module):
    """Saves a tensor that it makes for the purpose."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), value))
        self.value = value

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.tensor([self.value])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.value = state_dict.pop(prefix + "packed").item()
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("kind", [Extra, Packed])
def test_tensors_that_a_module_makes_for_its_state_dict_are_restored(tmp_path: Path, kind: Any) -> None:
    saved, restored = nn.Sequential(kind(7.0), kind(8.0)), nn.Sequential(kind(1.0), kind(2.0))
    weight = restored[0].w
    through(tmp_path, {"model": saved}, {"model": restored})
    assert [module.value for module in restored] == [7.0, 8.0]
    assert restored[0].w is weight
    assert torch.equal(weight, saved[0].w)
    read_checkpoint(tmp_path / "checkpoint-1")


def test_a_module_that_lacks_the_extra_state_is_a_mismatch(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="extra state"):
        through(tmp_path, {"model": nn.Sequential(Extra(1.0))}, {"model": nn.Sequential(nn.ParameterList())})


def test_an_expanded_buffer_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("ids", torch.zeros(1).expand(4))
    refused(tmp_path, {"model": module}, r"'ids' has elements that share memory.*clone")


# Ranks


class Group:
    """Ranks that are threads of this process."""

    lost = False

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(60)
        found = list(self._shared)
        self._barrier.wait(60)
        return found

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        return self.all_gather(value)[source]

    def barrier(self) -> None:
        self.all_gather(None)

    def explain(self, error: BaseException | None) -> None:
        """No rank of these is ever lost."""


def on_ranks(size: int, function: Callable[[int, Any], Any]) -> list[Any]:
    shared: list[Any] = [None] * size
    results: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank, Group(rank, size, shared, barrier))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Statistics(nn.Module):
    """Parameters are equal on all ranks, buffers are not."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1 << 20))
        self.register_buffer("mean", torch.full((400_000,), float(rank)))
        self.second = nn.Parameter(torch.ones(1 << 20))
        self.register_buffer("var", torch.full((1 << 20,), float(rank)))
        self.register_buffer("count", torch.full((3,), rank))


def test_buffers_that_differ_are_saved_from_the_first_rank(tmp_path: Path) -> None:
    def save(rank: int, group: Any) -> None:
        with Checkpointer(tmp_path, group=group) as checkpointer:
            checkpointer.save(1, {"model": Statistics(rank)})
            checkpointer.wait()

    on_ranks(2, save)
    manifest, _, groups = read_checkpoint(tmp_path / "checkpoint-1")
    for name in ("mean", "var", "count"):
        assert not groups["model"][name].any(), name
    writers = [sorted({rank for rank, _ in file["writers"]}) for file in manifest["files"] if "header" in file]
    assert sorted(writers) == [[0], [0, 1]]  # the buffers have their own file; the parameters are written together


def test_torchs_optimizers_of_sharded_parameters_resume_in_a_fresh_process(tmp_path: Path) -> None:
    """A packed projection, of which each rank has a row of each of three, and a vocabulary with rows that pad it."""

    def start(rank: int, value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        packed, vocabulary = nn.Linear(4, 3, bias=False), nn.Embedding(5, 4)
        rows = [(Box((2 * i + rank, 0), (1, 4)), (i, 0)) for i in range(3)]
        annotate(packed.weight, Layout.boxes((6, 4), rows))
        annotate(vocabulary.weight, Layout.box((9, 4), (5 * rank, 0), (5 - rank, 4)))
        for parameter in (packed.weight, vocabulary.weight):
            nn.init.constant_(parameter, value)
        module = nn.ModuleDict({"packed": packed, "vocabulary": vocabulary})
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[Tensor]:
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.arange(float(parameter.numel())).view(parameter.shape) + 10 * number + rank
            layout = layout_of(parameter)
            assert layout is not None
            parameter.grad[sum(part.slice.box.lengths[0] for part in layout.parts) :] = 0
        optimizer.step()
        return [parameter.detach().clone() for parameter in module.parameters()]

    def job(rank: int, group: Any) -> None:
        with Checkpointer(tmp_path, group=group) as checkpointer:
            module, optimizer = start(rank, 1.0)
            step(module, optimizer, rank)
            checkpointer.save(1, {"model": module, "optimizer": optimizer}, block=True)
            expected = step(module, optimizer, rank)
            fresh, other = start(rank, 1.0)
            step(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), rank)
            assert checkpointer.restore({"model": fresh, "optimizer": other}) == 1
            assert not other.state[fresh.vocabulary.weight]["exp_avg"][5 - rank :].any()
            found = step(fresh, other, rank)
        cut = [slice(None), slice(5 - rank)]
        assert all(torch.equal(a[rows], b[rows]) for a, b, rows in zip(found, expected, cut, strict=True))

    on_ranks(2, job)


def test_a_shard_stays_a_shard(tmp_path: Path) -> None:
    def job(rank: int, group: Any) -> None:
        def state(value: float) -> dict[str, Any]:
            return {"n": {"x": Shard(torch.full((4,), value), Layout.box((8,), (4 * rank,), (4,)))}}

        restored = state(9.0)
        live = restored["n"]["x"].tensor
        with Checkpointer(tmp_path, group=group) as checkpointer:
            checkpointer.save(1, state(float(rank)))
            checkpointer.wait()
            checkpointer.restore(restored)
            assert isinstance(restored["n"]["x"], Shard)
            assert restored["n"]["x"].tensor is live
            checkpointer.save(2, restored)
            checkpointer.wait()

    on_ranks(2, job)
    assert read_checkpoint(tmp_path / "checkpoint-2")[2]["state/n"]["x"].tolist() == [0.0] * 4 + [1.0] * 4


# Tensors, values and files


def test_strided_and_conjugated_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrix, numbers = torch.randn(4, 3), torch.randn(4, dtype=torch.complex64)
    state = {
        "column": matrix[:, 0],
        "second": torch.randn(20)[::2],
        "expanded": torch.ones(1).expand(4),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
    }
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    other = torch.zeros(4, dtype=torch.complex64)
    restored = {
        "column": torch.zeros(4, 3)[:, 0],
        "second": torch.zeros(20)[::2],
        "expanded": torch.zeros(1).expand(4),
        "conjugated": other.conj(),
        "negated": torch.zeros(4, dtype=torch.complex64).conj().imag,
    }
    through(tmp_path, {"n": state}, {"n": restored})
    assert all(torch.equal(restored[name], wanted[name]) for name in wanted)
    assert restored["conjugated"].is_conj()
    assert torch.equal(other, numbers)


def test_a_strided_tensor_that_occurs_twice_comes_back(tmp_path: Path) -> None:
    """In two sections, and twice in one."""
    torch.manual_seed(0)

    def state(value: float) -> tuple[dict[str, Any], list[Tensor]]:
        conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        numbers, tensor = torch.full((6,), value, dtype=torch.complex64), torch.full((5, 7), value)
        nested = {"a": tensor.t(), "b": numbers.conj(), "c": numbers[:3]}
        return {"model": conv, "again": {"conv": conv.weight}, "n": {**nested, "again": dict(nested)}}, [
            conv.weight,
            tensor,
            numbers,
        ]

    (saved, tensors), (restored, found) = state(2.0), state(0.0)
    assert not found[0].is_contiguous()
    through(tmp_path, saved, restored)
    assert restored["again"]["conv"] is found[0]
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def test_counters_and_texts_of_numpy(tmp_path: Path) -> None:
    values = {"c": collections.Counter([3, 5, 3]), "s": np.str_(""), "a": np.array(["", ""]), "t": np.str_("x")}
    restored: dict[str, Any] = {"n": {}}
    through(tmp_path, {"n": values}, restored)
    assert type(restored["n"]["c"]) is collections.Counter
    assert restored["n"]["c"] == values["c"]
    assert [type(restored["n"][key]) for key in "st"] == [np.str_, np.str_]
    assert (restored["n"]["s"], restored["n"]["t"]) == ("", "x")
    assert restored["n"]["a"].tolist() == ["", ""]
    _, sections, _ = read_checkpoint(tmp_path / "checkpoint-1")
    assert sections["n"]["value"]["c"] == {3: 2, 5: 1}


def test_what_could_not_be_restored_is_refused(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    refused(tmp_path, {"n": {"__metadata__": tensor}}, "'__metadata__' has a name.*another name")
    refused(tmp_path, {"n": tensor}, "is not an integer from 0 to", step=1 << 63)
    refused(tmp_path, {"n": tensor}, "is not an integer from 0 to", step=-1)
    refused(tmp_path, {"n": {"m": np.ma.array([1.0], mask=[1])}}, r"n\['m'\] is a .*MaskedArray")
    with pytest.warns(UserWarning, match="beta"):
        sparse = torch.eye(3).to_sparse_csr()
    refused(tmp_path, {"n": {"s": sparse}}, "sparse_csr, which cannot be stored")
    with warnings.catch_warnings(action="ignore"):  # torch warns once in a process
        nested = torch.nested.nested_tensor([tensor, torch.zeros(3)])
    refused(tmp_path, {"n": {"s": nested}}, "tensor 's' is .*, which cannot be stored")
    rational = np.array([1, 2]).astype(_rational_tests.rational)  # as of a package that adds types to numpy's
    for value in (rational, rational[0]):
        refused(tmp_path, {"n": {"r": value}}, r"n\['r'\] is a .*, neither a tensor nor a plain value")
    wrapper = TwoTensor(tensor, tensor)
    refused(tmp_path, {"n": {"s": wrapper}}, "'s' is a TwoTensor, which is made of other tensors")
    refused(tmp_path, {"n": tensor}, "backslash", files=lambda folder: (folder / "a\\b").write_text(""))
    refused(tmp_path, {"n": tensor}, "leads to no file", files=lambda folder: (folder / "a").symlink_to("gone"))
    refused(tmp_path, {"n": tensor}, "leads to no file", files=lambda folder: (folder / "a").symlink_to("."))


def test_a_link_among_extra_files_becomes_a_copy(tmp_path: Path) -> None:
    outside = tmp_path / "tokenizer.json"
    outside.write_text("{}")
    folder = tmp_path / "run"
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"n": torch.ones(1)}, files=lambda path: (path / "t.json").symlink_to(outside))
        checkpointer.wait()
        outside.unlink()
        assert checkpointer.restore({"n": torch.zeros(1)}) == 1
    assert (folder / "checkpoint-1" / "t.json").read_text() == "{}"


def test_what_two_sections_have_in_common_counts_once(tmp_path: Path) -> None:
    """The rest of the tensor is in no section, and keeps its values."""
    tensor = torch.arange(12.0).view(3, 4).t()
    half = Shard(tensor, Layout.box((2, 3), (0, 0), (2, 3)))
    state = {"a": {"t": half}, "b": {"t": half}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        expected = tensor.clone()
        expected[2:] = -1
        tensor.fill_(-1)
        checkpointer.restore(state)
    assert tensor.equal(expected)


# Tensors that share memory


def test_an_average_that_began_as_the_model_gets_values_of_its_own(tmp_path: Path) -> None:
    shared = torch.zeros(400_000)
    saved = {"weights": {"now": torch.full((400_000,), 1.0), "best": torch.full((400_000,), 2.0)}}
    state = {"weights": {"now": shared, "best": shared}}
    through(tmp_path, saved, state)
    assert state["weights"]["now"] is shared
    assert shared.eq(1).all()
    assert state["weights"]["best"].eq(2).all()


def test_a_view_of_another_tensor_gets_values_of_its_own_where_they_differ(tmp_path: Path) -> None:
    whole = torch.zeros(4, 3)
    state = {"nest": {"whole": whole, "row": whole[1]}}
    through(tmp_path, {"nest": {"whole": torch.ones(4, 3), "row": torch.full((3,), 2.0)}}, state)
    assert whole.eq(1).all()
    assert state["nest"]["row"].eq(2).all()


def test_views_that_agree_or_do_not_meet_stay_what_they_are(tmp_path: Path) -> None:
    whole, halves = torch.zeros(4, 6), torch.zeros(4, 6)
    left, right = halves[:, :3], halves[:, 3:]
    expected = torch.arange(24.0).view(4, 6)
    nest = {"whole": whole, "row": whole[1], "again": whole, "left": left, "right": right}
    copies = {
        "whole": expected,
        "row": expected[1],
        "again": expected,
        "left": expected[:, :3],
        "right": expected[:, 3:],
    }
    through(tmp_path, {"nest": {name: tensor.clone() for name, tensor in copies.items()}}, {"nest": nest})
    assert whole.equal(expected)
    assert halves.equal(expected)
    assert [nest["row"].data_ptr(), nest["again"], nest["left"], nest["right"]] == [
        whole[1].data_ptr(), whole, left, right,
    ]  # fmt: skip


def test_one_module_cannot_be_two_that_differ(tmp_path: Path) -> None:
    module, average = nn.Linear(3, 2), nn.Linear(3, 2)
    before = module.weight.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": average, "ema": nn.Linear(3, 2)})
        with pytest.raises(CheckpointMismatch, match=r"share memory here but have different values"):
            checkpointer.restore({"model": module, "ema": module})
        assert module.weight.equal(before)
        checkpointer.save(2, {"model": average, "ema": average})
        assert checkpointer.restore({"model": module, "ema": module}) == 2
    assert module.weight.equal(average.weight)


# Optimizers and what they keep


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.05),
    ],
)
def test_moments_lie_in_memory_as_their_parameters_do(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """Fused optimizers go through the memory of both at once."""

    def made(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        module = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        return module, make(module.parameters())

    def steps(module: nn.Module, optimizer: Any) -> None:
        for number in range(3):
            torch.manual_seed(number)
            module(torch.randn(2, 3, 8, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    module, optimizer = made(0)
    steps(module, optimizer)
    fresh, fresh_optimizer = made(1)
    through(tmp_path, {"model": module, "optimizer": optimizer}, {"model": fresh, "optimizer": fresh_optimizer})
    steps(module, optimizer)
    steps(fresh, fresh_optimizer)
    assert all(a.equal(b) for a, b in zip(module.parameters(), fresh.parameters(), strict=True))


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"aux": nn.Linear(2, 2)})
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    refused(tmp_path, {"model": model, "aux": other, "optimizer": optimizer}, "two parameters would have the name 'aux")


def test_state_under_a_key_that_is_not_a_string_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][0] = torch.ones(2)
    refused(tmp_path, {"model": model, "optimizer": optimizer}, "has a key 0, which is not a string")


def test_groups_that_shared_a_rate_get_their_own(tmp_path: Path) -> None:
    def made(rates: tuple[Tensor, Tensor]) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    shared = torch.tensor(0.5)
    state = made((shared, shared))
    through(tmp_path, made((torch.tensor(0.1), torch.tensor(0.01))), state)
    assert [round(float(group["lr"]), 6) for group in state["optimizer"].param_groups] == [0.1, 0.01]
    assert state["optimizer"].param_groups[0]["lr"] is shared


def test_a_number_in_place_of_a_tensor_comes_back_exactly(tmp_path: Path) -> None:
    """As a schedule puts it there. Where it is the tensor's, or graphs have that, the tensor gets it."""

    def rate(saved: Any, **options: Any) -> Any:
        model, live = nn.Linear(2, 2), torch.tensor(0.1)
        optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), lr=live)
        optimizer.param_groups[0]["lr"] = saved
        other.param_groups[0].update(options)
        through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": model, "optimizer": other})
        found = other.param_groups[0]["lr"]
        assert found is live or type(found) is float
        return found

    assert float(rate(1e-4)) == 1e-4
    assert isinstance(rate(0.25), Tensor)
    assert isinstance(rate(1e-4, capturable=True), Tensor)


def test_parameters_that_were_one_group_are_not_made_two(tmp_path: Path) -> None:
    """As in torch: settings of one would be those of both, and a schedule of one would leave the other behind."""
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    one, two = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(CheckpointMismatch, match="'optimizer': group 1 has other parameters in"):
        through(tmp_path / "split", {"model": model, "optimizer": one}, {"model": model, "optimizer": two})
    with pytest.raises(CheckpointMismatch, match="'optimizer': group 0 has other parameters in"):
        through(tmp_path / "joined", {"model": model, "optimizer": two}, {"model": model, "optimizer": one})
    assert two.param_groups[1]["weight_decay"] == 0


class Outer(torch.optim.Optimizer):
    """Has the state of another one, as torch's ZeroRedundancyOptimizer."""

    def __init__(self, parameters: Any) -> None:
        self.other = torch.optim.AdamW(parameters)
        super().__init__(self.other.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.other.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.other.state_dict()


def test_an_optimizer_whose_state_is_elsewhere_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Outer(list(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    refused(tmp_path, {"model": model, "optimizer": optimizer}, "optimizer: Outer has its state in another optimizer")


def test_a_default_device_of_the_programs_changes_nothing(tmp_path: Path) -> None:
    """Such as torch.set_default_device("cuda"), whose memory is no place for what is read."""

    def state() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)), "n": {}}

    saved, other = state(), state()
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    saved["n"] = {"a": torch.ones(2), "b": torch.full((2,), 2.0), "none": torch.ones(0)}
    other["n"]["a"] = torch.zeros(2)
    other["n"]["b"] = other["n"]["a"].view(2)  # which the values separate
    other["n"]["none"] = torch.zeros(0)
    with torch.device("meta"):
        through(tmp_path, saved, other)
    for key in ("model", "optimizer"):
        mine, theirs = (tree_leaves(each[key].state_dict()) for each in (saved, other))
        assert list(map(str, mine)) == list(map(str, theirs))
    assert (other["n"]["a"].tolist(), other["n"]["b"].tolist()) == ([1, 1], [2, 2])


def test_how_an_optimizer_computes_and_names_parameters_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved = torch.optim.AdamW(list(model.named_parameters()), lr=0.5, foreach=True)
    saved.param_groups[0]["capturable"] = True  # as on a GPU
    live = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    through(tmp_path, {"model": model, "optimizer": saved}, {"model": model, "optimizer": live})
    (group,) = live.param_groups
    assert (group["lr"], group["fused"], group["foreach"], group["capturable"]) == (0.5, True, None, False)
    assert "param_names" not in group
    model(torch.ones(1, 2)).sum().backward()
    live.step()


# Containers


def test_going_back_leaves_nothing_later_in_nested_containers(tmp_path: Path) -> None:
    saved = {"nest": {"seen": collections.Counter(a=1), "per": {"x": 1}}, "count": collections.Counter(a=2)}
    state = {
        "nest": {"seen": collections.Counter(a=3, b=5), "per": {"x": 2, "y": 9}, "newer": 7},
        "count": collections.Counter(b=1),
    }
    through(tmp_path, saved, state)
    assert state == {**saved, "nest": {**saved["nest"], "newer": 7}}


def test_a_state_that_cannot_be_changed_is_refused_where_it_would_have_to_be(tmp_path: Path) -> None:
    saved = {"epoch": 3, "rates": {"x": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
        with pytest.raises(UsageError, match="pass the state as a dict"):
            checkpointer.restore(MappingProxyType({"epoch": 0, "rates": {"x": 0}}))
        changeable = collections.UserDict({"epoch": 0, "rates": {"x": 0}})
        checkpointer.restore(changeable)
    assert changeable.data == saved


def test_a_state_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        through(tmp_path, {"model": model, "optimizer": optimizer}, {"model": model, "optimizer": fresh})
        held = {"t": torch.zeros(3)}
        through(tmp_path / "more", {"nest": {"t": torch.ones(3)}}, {"nest": held})
    fresh.step()
    assert held["t"].eq(1).all()


@pytest.mark.parametrize("checkpoint", [True, 1.5, None, torch.tensor(3.0), np.ones(2)])
def test_a_checkpoint_is_a_step_or_a_path(tmp_path: Path, checkpoint: Any) -> None:
    state = {"nest": {"x": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        assert checkpointer.restore(state, np.int64(1)) == 1  # type: ignore[arg-type]
        assert checkpointer.metadata(np.int64(1)) == {}  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is neither a step nor a path"):
            checkpointer.manifest(checkpoint)
        if checkpoint is not None:
            with pytest.raises(UsageError, match="is neither a step nor a path"):
                checkpointer.restore(state, checkpoint)


@pytest.mark.parametrize("state", [nn.Linear(2, 2), [nn.Linear(2, 2)]])
def test_a_state_is_a_dict_of_sections(tmp_path: Path, state: Any) -> None:
    refused(tmp_path, state, "is not a dict of sections")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": nn.Linear(2, 2)})
        with pytest.raises(UsageError, match="is not a dict of sections"):
            checkpointer.restore(state)
