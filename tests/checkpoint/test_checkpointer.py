"""What is saved comes back bit for bit, into the tensors that were there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.save import background
from stepmark.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, UsageError
from tests.support.checkpoint_states import Net, identities, net, same, snapshot, train

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "tensor-rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, optimizer_name: str) -> None:
    def make(seed: int) -> tuple[Net, Any, Any]:
        module = net(seed)
        optimizer = OPTIMIZERS[optimizer_name](module.parameters())
        return module, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)

    module, optimizer, scheduler = make(0)
    train(module, optimizer, 3, scheduler)
    with Checkpointer(tmp_path) as checkpointer:
        before = identities(module, optimizer)
        checkpointer.save(3, {"model": module, "optimizer": optimizer, "scheduler": scheduler})
        checkpointer.wait()
        assert identities(module, optimizer) == before
        expected_losses = train(module, optimizer, 4, scheduler)

        fresh_module, fresh_optimizer, fresh_scheduler = make(1)
        before = identities(fresh_module, fresh_optimizer)
        state = {"model": fresh_module, "optimizer": fresh_optimizer, "scheduler": fresh_scheduler}
        assert checkpointer.restore(state) == 3
        assert set(before) <= set(identities(fresh_module, fresh_optimizer))
        assert fresh_module.again.weight is fresh_module.first.weight
    assert train(fresh_module, fresh_optimizer, 4, fresh_scheduler) == expected_losses
    assert same(snapshot(fresh_module, fresh_optimizer), snapshot(module, optimizer))
    assert fresh_scheduler.state_dict() == scheduler.state_dict()


def test_states_that_exist_are_written_in_place(tmp_path: Path) -> None:
    module = net(0)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 2)
    state = {"model": module, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        checkpointer.wait()
        expected, before = snapshot(module, optimizer), identities(module, optimizer)
        train(module, optimizer, 3)
        checkpointer.restore(state)
    assert same(snapshot(module, optimizer), expected)
    assert identities(module, optimizer) == before


def test_state_of_a_bfloat16_parameter_keeps_its_type(tmp_path: Path) -> None:
    parameter = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(parameter.parameters())
    for value in parameter.parameters():
        optimizer.state[value] = {"step": torch.tensor(5.0), "exp_avg": torch.randn(value.shape, dtype=torch.float32)}
    expected = snapshot(parameter, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": parameter, "optimizer": optimizer})
        fresh = nn.Linear(3, 3, dtype=torch.bfloat16)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        checkpointer.restore({"model": fresh, "optimizer": fresh_optimizer})
    assert same(snapshot(fresh, fresh_optimizer), expected)


def test_a_state_that_was_not_there_yet_is_removed(tmp_path: Path) -> None:
    module = net(0)
    optimizer = torch.optim.AdamW(module.parameters())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"model": module, "optimizer": optimizer})
        checkpointer.wait()
        expected = train(module, optimizer, 3)
        checkpointer.restore({"model": module, "optimizer": optimizer})
    assert not optimizer.state
    assert train(module, optimizer, 3) == expected


def test_lbfgs_with_its_lists_of_tensors(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(30, 5), nn.Tanh(), nn.Linear(5, 1))
        module.forward = lambda x, inner=nn.Sequential.forward, m=module: inner(m, x).square().mean()  # type: ignore
        return module, torch.optim.LBFGS(module.parameters(), max_iter=4)

    module, optimizer = make(0)
    train(module, optimizer, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer})
        checkpointer.wait()
        expected = train(module, optimizer, 3)
        fresh, fresh_optimizer = make(1)
        checkpointer.restore({"model": fresh, "optimizer": fresh_optimizer})
    assert train(fresh, fresh_optimizer, 3) == expected


NESTED: dict[str, Any] = {
    "tensor": torch.arange(12.0).reshape(3, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "scalar": torch.tensor(7, dtype=torch.int16),
    "floats": [0.1, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308],
    "tuple": (1, (2.5, "three"), None, True),
    "keys": {1: "one", (2, "x"): torch.ones(2), None: 3, 1.5: 4},
    "bytes": b"\x00\xff",
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "set": {1, 2},
    "big": 1 << 5000,
    "text": "\ud800 \x00 é",
    "complex": complex(1, -0.0),
    "random": (3, tuple(range(600)), None),
    "numpy": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "numpy scalar": np.float32(0.1),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "$": {"$": "tensor", "v": "not a tensor"},
    "a/b": torch.zeros(1),
    "a": {"b": torch.ones(1)},
}


def emptied(value: Any) -> Any:
    """The same nest with zero tensors."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, emptied(item)) for key, item in value.items())
    return value


def test_nested_values_are_restored_exactly(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": NESTED, "plain": 4.5})
        live = emptied(NESTED)
        tensor, inner = live["tensor"], live["keys"]
        state: dict[str, Any] = {"nest": live, "plain": 0}
        checkpointer.restore(state)
    numpy_keys = ("numpy", "numpy scalar")
    for key in numpy_keys:
        assert live[key].dtype == NESTED[key].dtype
        assert np.array_equal(live[key], NESTED[key])
    assert same(
        {key: value for key, value in live.items() if key not in numpy_keys},
        {key: value for key, value in NESTED.items() if key not in numpy_keys},
    )
    assert live["tensor"] is tensor
    assert live["keys"] is inner
    assert state["plain"] == 4.5


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"]
    + ["uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"],
)
def test_every_type_of_safetensors(tmp_path: Path, dtype: str) -> None:
    raw = torch.arange(64) % (2 if dtype == "bool" else 256)
    value = raw.to(torch.uint8).view(getattr(torch, dtype))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"t": value, "0-dim": value[0]}})
        live = {"t": torch.zeros_like(value), "0-dim": torch.zeros_like(value[0])}
        checkpointer.restore({"nest": live})
    assert same(live["t"], value)
    assert same(live["0-dim"], value[0])


def test_extra_state_of_a_module(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count, "t": torch.tensor([self.count])}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"] + int(state["t"]) * 100

    module = nn.Sequential(Counting(2, 2))
    module[0].count = 7
    fresh = nn.Sequential(Counting(2, 2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module})
        checkpointer.restore({"model": fresh})
    assert fresh[0].count == 707


def test_several_modules_and_optimizers(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
        return {"model": actor, "critic": critic, "optimizer": optimizer}

    state = make(0)
    for parameter in [*state["model"].parameters(), *state["critic"].parameters()]:
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    fresh = make(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.restore(fresh)
        names = checkpointer.manifest(1).tensors["optimizer/optimizer"]
    assert set(names) == {
        f"{prefix}{name}/momentum_buffer" for prefix in ("", "critic.") for name in ("weight", "bias")
    }
    for name in ("model", "critic"):
        assert same(snapshot(fresh[name]), snapshot(state[name]))
    assert same(snapshot(fresh["model"], fresh["optimizer"]), snapshot(state["model"], state["optimizer"]))


def test_metadata_and_which_is_latest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() is None
        assert checkpointer.restore({"nest": {}}) is None
        for step in (9, 10):
            checkpointer.save(step, {"nest": {"x": step}}, metadata={"loss": 0.1, "at": (1, None)})
        checkpointer.wait()
        assert checkpointer.latest() == tmp_path / "checkpoint-10"
        assert checkpointer.metadata(10) == {"loss": 0.1, "at": (1, None)}
        live = {"x": 0}
        assert checkpointer.restore({"nest": live}, 9) == 9
        assert live == {"x": 9}
        assert checkpointer.restore({"nest": live}, tmp_path / "checkpoint-10") == 10
        with pytest.raises(CheckpointNotFound, match="checkpoint-11"):
            checkpointer.restore({"nest": live}, 11)
        with pytest.raises(CheckpointNotFound, match="a run's folder; .* such as checkpoint-10"):
            checkpointer.restore({"nest": live}, tmp_path)
    for path in tmp_path.glob("checkpoint-*"):  # as a loop may have named them with dcp.save
        path.rename(tmp_path / path.name.replace("checkpoint", "step"))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointNotFound, match="is a folder of checkpoints; name one of them: .*step-10"):
            checkpointer.restore({"nest": live})
        assert checkpointer.restore({"nest": live}, tmp_path / "step-10") == 10
    with pytest.raises(UsageError, match="step-10 is a checkpoint; give the folder around it"):
        Checkpointer(tmp_path / "step-10")


def test_a_difference_is_named_before_anything_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": saved})

        def refused(module: nn.Module, *words: str) -> None:
            expected = snapshot(module)
            with pytest.raises(CheckpointMismatch) as caught:
                checkpointer.restore({"model": module})
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert same(snapshot(module), expected)

        refused(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), "1.weight", "[2, 3]", "[5, 3]")
        refused(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).bfloat16()), "1.weight", "F32", "BF16")
        refused(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)), "2.weight", "no tensor")
        refused(nn.Sequential(nn.Linear(4, 3)), "1.bias", "the state passed to restore")
        with pytest.raises(CheckpointMismatch, match="no section 'optimizer'; it has model"):
            checkpointer.restore({"model": saved, "optimizer": torch.optim.SGD(saved.parameters())})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    module = net(0)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer})
        with pytest.raises(CheckpointMismatch, match="saved from AdamW .* is SGD here"):
            checkpointer.restore({"model": module, "optimizer": torch.optim.SGD(module.parameters())})
        fewer = torch.optim.AdamW([module.scale])
        with pytest.raises(CheckpointMismatch, match="the state passed to restore.. lacks it"):
            checkpointer.restore({"model": module, "optimizer": fewer})


def test_model_only(tmp_path: Path) -> None:
    module = net(0)
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"model": module, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, model_only=True)
        assert not (tmp_path / "checkpoint-1" / "optimizer").exists()
        fresh = net(1)
        checkpointer.restore({"model": fresh})
        assert same(snapshot(fresh), snapshot(module))
        with pytest.raises(CheckpointMismatch, match="holds the model only"):
            checkpointer.restore(state)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    module = net(0)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=r"nest\['a'\]\['1'\] is a .*object"):
            checkpointer.save(1, {"nest": {"a": [0, object()]}})
        with pytest.raises(UsageError, match="parameter 0 of group 0"):
            checkpointer.save(1, {"optimizer": torch.optim.SGD(module.parameters())})
        with pytest.raises(UsageError, match="complex128"):
            checkpointer.save(1, {"nest": {"z": torch.zeros(1, dtype=torch.complex128)}})
        with pytest.raises(UsageError, match="metadata"):
            checkpointer.save(1, {"nest": {}}, metadata={"t": torch.zeros(1)})
        with pytest.raises(UsageError, match="model.safetensors"):
            checkpointer.save(1, {"nest": {}}, files=lambda folder: (folder / "model.safetensors").touch())
        loop: dict[str, Any] = {}
        loop["self"] = loop
        with pytest.raises(UsageError, match="contains itself"):
            checkpointer.save(1, {"nest": loop})
        checkpointer.save(1, {"nest": {}})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".stepmark", "checkpoint-1"]


def test_a_named_object_serves_as_an_optimizer(tmp_path: Path) -> None:
    class Masters:
        def __init__(self, value: float) -> None:
            self.master = torch.full((3,), value)
            self.step = torch.tensor(value)
            self.groups: list[dict[str, Any]] = [{"lr": value, "params": ["w"]}]

        def named_state(self) -> dict[str, dict[str, Any]]:
            return {"w": {"master": self.master, "step": self.step}}

        def named_groups(self) -> list[dict[str, Any]]:
            return self.groups

        def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
            self.groups = groups

    saved, fresh = Masters(2.0), Masters(0.0)
    tensor = fresh.master
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": saved})
        checkpointer.restore({"optimizer": fresh})
        assert set(checkpointer.manifest(1).tensors["optimizer/optimizer"]) == {"w/master", "w/step"}
    assert fresh.master is tensor
    assert fresh.master.tolist() == [2.0] * 3
    assert fresh.groups == [{"lr": 2.0, "params": ["w"]}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_wrappers_of_torch_are_seen_through(tmp_path: Path) -> None:
    module = net(0)
    compiled = torch.compile(net(1))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module})
        checkpointer.restore({"model": compiled})
        assert same(snapshot(compiled._orig_mod), snapshot(module))
        checkpointer.save(2, {"model": compiled, "optimizer": optimizer}, block=True)
        assert checkpointer.manifest(2).tensors["model"].keys() == checkpointer.manifest(1).tensors["model"].keys()


def test_what_files_returns_completes_them_behind_training(tmp_path: Path) -> None:
    threads = []

    def begin(folder: Path) -> Any:
        (folder / "long.txt").touch()

        def complete() -> None:
            threads.append(threading.current_thread())
            (folder / "long.txt").write_text("complete")

        return complete

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": net(0)}, files=begin)
        checkpointer.wait()
        assert (tmp_path / "checkpoint-1" / "long.txt").read_text() == "complete"
        assert checkpointer.restore({"model": net(1)}) == 1  # its checksum is of the complete file
        assert threads != [threading.current_thread()]


def test_a_save_whose_files_cannot_be_completed_has_failed(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": net(0)}, files=lambda _: fail)
        with pytest.raises(CheckpointError, match="step 1 was not saved: No space left"):
            checkpointer.wait()
        assert checkpointer.latest() is None


def test_a_save_lists_the_checkpoints_only_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Any:
        raise AssertionError(folder)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": net(0)}, block=True)
        monkeypatch.setattr(background, "checkpoints", refuse)
        checkpointer.save(2, {"model": net(0)}, block=True)


class AnyName(dict[str, Any]):
    """A mapping that has an attribute of any name."""

    __getattr__ = dict.get


def test_a_mapping_with_any_attribute_is_refused_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="progress is a .*AnyName, neither"):
        checkpointer.save(1, {"progress": AnyName(epoch=3)}, block=True)


def test_the_order_of_keys_is_the_saved_one(tmp_path: Path) -> None:
    saved, live = OrderedDict(b=1, a=2), OrderedDict(a=0, b=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"order": saved}, block=True)
        checkpointer.restore({"order": live})
    assert live == saved, "an OrderedDict is equal where its order is"


def test_going_back_tells_of_later_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"n": {"step": step}}, block=True)
        checkpointer.restore({"n": {"step": 0}}, 2)
        assert not caplog.messages
        checkpointer.restore({"n": {"step": 0}}, 1)
    assert [each.partition(" has ")[2] for each in caplog.messages] == [
        "checkpoints of later steps, from which a restart goes on: delete checkpoint-2"
    ]
