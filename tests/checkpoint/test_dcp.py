"""`dcp.save` and `dcp.load` give what torch.distributed.checkpoint gives for the same calls, in one process."""

from __future__ import annotations

import enum
import io
import random
import warnings
from collections import deque, namedtuple
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import torch
import torch.distributed.checkpoint as torchs
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stepmark.checkpoint import Checkpointer, dcp
from stepmark.checkpoint.format.verify import verify
from stepmark.checkpoint.restore.restore import Restored, Restorer
from stepmark.cli.main import run
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, UsageError

State = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, schedule


class App:
    """The object of torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "version": 3}

    def load_state_dict(self, state: State) -> None:
        self.version = state["version"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def application(seed: int, steps: int = 2) -> State:
    model, optimizer, schedule = trained(seed, steps)
    return {"app": App(model, optimizer), "schedule": schedule, "step": seed}


def separate(seed: int, steps: int = 2) -> State:
    model, optimizer, schedule = trained(seed, steps)
    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1], "lr_scheduler": schedule, "train_state": {"step": seed}}


def flat(seed: int, steps: int = 2) -> State:
    """As torchtitan has it: the model's names at the top."""
    model, optimizer, _ = trained(seed, steps)
    options = torchs.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_state_dict(model, optimizer, options=options)
    return {**states[0], "optimizer": states[1], "train_state": {"step": seed, "loss": float(seed) / 3}}


def objects(seed: int, steps: int = 2) -> State:
    """Modules and optimizers themselves, whose states have numbers."""
    model, optimizer, schedule = trained(seed, steps or 1)
    return {"model": model, "optim": optimizer, "sched": schedule}


def nested(seed: int, steps: int = 2) -> State:
    torch.manual_seed(seed)
    return {
        "list": [torch.randn(3), {"a": seed, "b": torch.randn(2, dtype=torch.bfloat16)}, [1, seed]],
        "plain": [seed, 2.5, None],
        "tuple": (seed, torch.full((2,), float(seed))),
        "bytes": bytes([seed]),
        "odd key! ": {"nan": float("nan") if steps else 0.0, "empty": torch.ones(0, 3), "scalar": torch.tensor(seed)},
        "rng": torch.get_rng_state(),
    }


def values(state: Any) -> Any:
    """Everything in a state, with tensors as lists."""
    if isinstance(state, Tensor):
        return [str(state.dtype), list(state.shape), state.double().tolist()]
    if hasattr(state, "state_dict"):
        return values(state.state_dict())
    if isinstance(state, dict):
        return {str(key): values(value) for key, value in state.items()}
    return [values(item) for item in state] if isinstance(state, list | tuple) else repr(state)


@pytest.mark.parametrize("make", [application, separate, flat, objects, nested])
def test_a_state_is_loaded_as_torch_loads_it(make: Any, tmp_path: Path) -> None:
    dcp.save(make(1), checkpoint_id=tmp_path / "ours")
    torchs.save(make(1), checkpoint_id=tmp_path / "torchs")
    ours, theirs = make(2, 0), make(2, 0)
    assert values(ours) != values(make(1))
    dcp.load(ours, checkpoint_id=tmp_path / "ours")
    torchs.load(theirs, checkpoint_id=tmp_path / "torchs")
    assert values(ours) == values(theirs) == values(make(1))
    assert verify(tmp_path / "ours").faults == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "torchs"]


KEYS = ("model", "optim", "state_dict", "state", "a.b", "optimizer", "x")


def random_state(choices: random.Random, depth: int = 0) -> State:
    """Models, optimizers and plain values under all names that mean something, at any depth."""
    found: State = {}
    for key in choices.sample(KEYS, choices.randrange(1, 5)):
        kind = choices.choice(["tensor", "value", "list", "optimizer", *(["dict"] * 3 if depth < 3 else [])])
        if kind == "optimizer":
            model, optimizer, _ = trained(choices.randrange(1, 9))
            found[key] = get_state_dict(model, optimizer)[1]
        elif kind == "list":
            found[key] = [torch.rand(2), {"inner": choices.random()}]
        else:
            made = {"tensor": torch.rand(2), "value": choices.random(), "dict": None}[kind]
            found[key] = random_state(choices, depth + 1) if kind == "dict" else made
    return found


def blank(state: Any) -> Any:
    """The same state with other values."""
    if isinstance(state, Tensor):
        return torch.full_like(state, 77)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(item) for item in state] if isinstance(state, list) else "" if isinstance(state, str) else -1


def test_every_leaf_of_any_state_is_in_the_folder(tmp_path: Path) -> None:
    """What a save has taken is loaded again, whatever the keys on the way to it are."""
    for seed in range(60):
        state = random_state(random.Random(seed))
        try:
            path = dcp.save(state, checkpoint_id=tmp_path / "c")
        except UsageError as error:  # two names for one place, which is said
            assert "two values have the name" in str(error), seed
            continue
        found = blank(state)
        dcp.load(found, checkpoint_id=path)
        assert values(found) == values(state), seed


def test_an_optimizer_of_named_parameters(tmp_path: Path) -> None:
    model = trained(1)[0]
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert state["optimizer"]["param_groups"][0]["param_names"]
    found = blank(state)
    path = dcp.save(state, checkpoint_id=tmp_path / "c")
    dcp.load(found, checkpoint_id=path)
    assert values(found) == values(state)
    other, its_optimizer, _ = trained(3, 1)
    Checkpointer(tmp_path / "run").restore({"model": other, "optimizer": its_optimizer}, path)
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    assert values(other) == values(model)


class Ordered:
    """Says when it is asked."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def state_dict(self) -> State:
        self.calls.append(f"save {self.name}")
        return {"name": self.name}

    def load_state_dict(self, state: State) -> None:
        self.calls.append(f"load {state['name']}")


def test_objects_are_asked_in_the_order_of_their_keys(tmp_path: Path) -> None:
    """They may communicate, and ranks may have them in different orders; as in DCP."""
    calls: list[str] = []
    state = {key: Ordered(key, calls) for key in ("b", "c", "a")}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    dcp.load(state, checkpoint_id=tmp_path / "c")
    in_order = [f"save {key}" for key in "abc"]
    assert calls == [*in_order, *in_order, *(f"load {key}" for key in "abc")]


def test_values_of_the_standard_library(tmp_path: Path) -> None:
    file = io.BytesIO(b"state of a generator")
    file.seek(5)
    saved = {
        "shape": torch.Size([2, 3]),
        "file": file,
        "buffer": bytearray(b"abc"),
        "range": range(3, 9, 2),
        "slice": slice(None, 4),
        "window": deque([1.5, torch.ones(2)], maxlen=3),
        "tensors": ({torch.ones(2)}, frozenset([torch.ones(3)])),
        "day": date(2026, 11, 28),
        "moment": datetime(2026, 11, 28, 12, 30, 1, 7),
        "zoned": datetime(2026, 11, 28, tzinfo=timezone(timedelta(hours=2))),
        "span": timedelta(days=-1, microseconds=3),
        "path": Path("runs/mine"),
    }
    state: State = dict.fromkeys(saved)
    dcp.load(state, checkpoint_id=dcp.save(saved, checkpoint_id=tmp_path / "c"))
    assert {key: type(value) for key, value in state.items()} == {key: type(value) for key, value in saved.items()}
    assert (state["file"].getvalue(), state["file"].tell()) == (b"state of a generator", 5)
    assert (state["window"].maxlen, state["window"][1].tolist()) == (3, [1.0, 1.0])
    assert [[tensor.tolist() for tensor in each] for each in state["tensors"]] == [[[1, 1]], [[1, 1, 1]]]
    same = saved.keys() - {"file", "window", "tensors"}
    assert {key: state[key] for key in same} == {key: saved[key] for key in same}


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("value", [Color.RED, namedtuple("Pair", "a b")(1, 2), datetime.now(ZoneInfo("UTC"))])
def test_a_class_that_would_have_to_be_imported_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'x'\] is a .*, neither a tensor nor a plain value; save its parts"):
        dcp.save({"x": value}, checkpoint_id=tmp_path / "c")


def test_tensors_and_containers_keep_their_identity(tmp_path: Path) -> None:
    dcp.save({"a": {"w": torch.ones(2)}, "b": {3: "x"}}, checkpoint_id=tmp_path / "c")
    tensor = torch.zeros(2)
    state: State = {"a": {"w": tensor}, "b": {3: "old"}}
    inner = state["b"]
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert tensor.tolist() == [1, 1]
    assert state["b"] is inner
    assert inner == {3: "x"}  # torch adds a key "3"


def test_part_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    dcp.save(separate(1), checkpoint_id=tmp_path / "c")
    state = {"model": {"0.weight": torch.zeros(8, 4)}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert torch.equal(state["model"]["0.weight"], separate(1)["model"]["0.weight"])
    assert list(state) == ["model"]


def test_a_name_that_is_missing_is_named_and_nothing_changes(tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(2), "bias": torch.ones(1)}, "step": 3}, checkpoint_id=tmp_path / "c")
    state = {"model": {"weight": torch.zeros(2), "bais": torch.zeros(1)}, "step": 0}
    with pytest.raises(CheckpointMismatch, match=r"no 'model.bais'; it has 'model.bias'"):
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert (state["model"]["weight"].sum(), state["step"]) == (0, 0)  # type: ignore[index]
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=torchs.DefaultLoadPlanner(allow_partial_load=True))
    assert (state["model"]["weight"].sum(), state["model"]["bais"].sum(), state["step"]) == (2, 0, 3)  # type: ignore[index]


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 1), 5, None])
def test_another_shape_is_named(wrong: Any, tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointMismatch, match=r"'model.weight' is F32 \[2\]"):
        dcp.load({"model": {"weight": wrong}}, checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_values_are_converted_to_the_live_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = {"w": torch.linspace(-3, 3, 7)}
    dcp.save(saved, checkpoint_id=tmp_path / "ours")
    torchs.save(saved, checkpoint_id=tmp_path / "torchs")
    ours, theirs = {"w": torch.zeros(7, dtype=dtype)}, {"w": torch.zeros(7, dtype=dtype)}
    live = ours["w"]
    dcp.load(ours, checkpoint_id=tmp_path / "ours")
    torchs.load(theirs, checkpoint_id=tmp_path / "torchs")
    assert ours["w"] is live
    assert torch.equal(live, theirs["w"])


def test_what_cannot_be_filled_is_named(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointMismatch, match=r"'model\.w' has elements that share memory"):
        dcp.load({"model": {"w": torch.zeros(1).expand(4)}}, checkpoint_id=tmp_path / "c")

    class ShardedTensor(Tensor):
        """Named as the one of the first FSDP."""

    with pytest.raises(UsageError, match=r"'model\.w' is a ShardedTensor"):
        dcp.save({"model": {"w": torch.ones(4).as_subclass(ShardedTensor)}}, checkpoint_id=tmp_path / "d")


def test_an_optimizer_without_state_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in torch, what a new optimizer has no state for is not loaded."""
    dcp.save(objects(1), checkpoint_id=tmp_path / "c")
    dcp.load(objects(2), checkpoint_id=tmp_path / "c")
    assert caplog.messages == []
    model = trained(1)[0]
    dcp.load({"optim": torch.optim.AdamW(model.parameters())}, checkpoint_id=tmp_path / "c")
    (told,) = caplog.messages  # of six parameters: two averages and a count each
    assert "'optim' has no state yet: 18 tensors of" in told


def test_meta_tensors_get_memory(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path / "c")
    state = {"model": {"w": torch.empty(6, device="meta")}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert torch.equal(state["model"]["w"], torch.arange(6.0))
    with pytest.raises(UsageError, match="meta"):
        dcp.save({"w": torch.empty(6, device="meta")}, checkpoint_id=tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_commands_take_it(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    ddp = {f"module.{name}": value for name, value in model.state_dict().items()}
    state = {"model": ddp, "optim": get_state_dict(model, optimizer)[1]}
    path = dcp.save(state, checkpoint_id=tmp_path / "step-2")
    for command in ("verify", "inspect"):
        assert run([*map(str, (command, path))]) == 0
    assert run([*map(str, ("consolidate", path, tmp_path / "model"))]) == 0
    assert values(load_file(tmp_path / "model" / "model.safetensors")) == values(
        dict(sorted(model.state_dict().items()))
    )
    assert run([*map(str, ("export", path, tmp_path / "exported", "--to", "dcp"))]) == 0
    theirs = {"optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros(8, 4)}}}}
    torchs.load(theirs, checkpoint_id=tmp_path / "exported")
    assert torch.equal(theirs["optimizer"]["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])  # type: ignore[index]


def test_any_checkpoint_is_loaded_by_names(tmp_path: Path) -> None:
    model, optimizer, schedule = trained(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"model": model, "optimizer": optimizer, "sched": schedule, "at": 7})
    fresh, fresh_optimizer, fresh_schedule = trained(2, 1)
    found = get_state_dict(fresh, fresh_optimizer)
    state: State = {"model": found[0], "optimizer": found[1], "sched": fresh_schedule, "at": 0}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint-5")
    set_state_dict(fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert values(fresh) == values(model)
    assert values(fresh_optimizer) == values(optimizer)
    assert (values(fresh_schedule), state["at"]) == (values(schedule), 7)


def test_a_checkpoint_of_torchs_is_imported_first(tmp_path: Path) -> None:
    torchs.save(separate(1), checkpoint_id=tmp_path / "torchs")
    with pytest.raises(CheckpointMismatch, match=f"stepmark import {tmp_path / 'torchs'} OUT"):
        dcp.load(separate(2), checkpoint_id=tmp_path / "torchs")
    assert run([*map(str, ("import", tmp_path / "torchs", tmp_path / "ours"))]) == 0
    state = separate(2)
    del state["lr_scheduler"], state["train_state"]
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    assert values(state["model"]) == values(separate(1)["model"])
    assert values(state["optimizer"]["state"]) == values(separate(1)["optimizer"]["state"])


def test_a_later_save_replaces_an_earlier_one(tmp_path: Path) -> None:
    torchs.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c")
    for number in (1.0, 2.0):
        dcp.save({"w": torch.full((2,), number)}, checkpoint_id=tmp_path / "c")
        state = {"w": torch.zeros(2)}
        dcp.load(state, checkpoint_id=tmp_path / "c")
        assert state["w"].tolist() == [number, number]
    assert not list((tmp_path / "c").glob(".*"))


def test_other_files_are_not_lost(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c" / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"notes\.txt"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]


def test_a_link_leads_to_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-1")
    (tmp_path / "step-1").mkdir()
    assert dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "latest") == tmp_path / "step-1"
    assert (tmp_path / "latest").is_symlink()


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    first = dcp.async_save(state, checkpoint_id=tmp_path / "a")
    state["w"].zero_()
    second = dcp.async_save(state, checkpoint_id=tmp_path / "b")
    assert (first.result(), second.result()) == (tmp_path / "a", tmp_path / "b")
    for path, value in ((first.result(), 1), (second.result(), 0)):
        dcp.load(state, checkpoint_id=path)
        assert state["w"].unique().tolist() == [value]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UsageError, match=r"state_dict\['a.odd'\] is a builtins.object"):
        dcp.save({"a": {"odd": object()}}, checkpoint_id=tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr("stepmark.checkpoint.save.commit.publish", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        future = dcp.async_save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c")
        with pytest.raises(Exception, match="broken"):
            future.result()
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["w"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_corrupted_checkpoint_is_named(tmp_path: Path) -> None:
    path = dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="'w'"):
        dcp.load({"model": {"w": torch.zeros(2)}}, checkpoint_id=path)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (
        dcp.save({"w": torch.full((2,), value)}, checkpoint_id=tmp_path / f"c{value}") for value in (1.0, 2.0)
    )

    class Replaced(Restorer):
        def named(self, path: Path, state: Any) -> Restored:
            if other.exists():
                path.rename(tmp_path / "old")
                other.rename(path)
                raise CheckpointDamaged("parts of both")
            return super().named(path, state)

    monkeypatch.setattr("stepmark.checkpoint.dcp.Restorer", Replaced)
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=path)
    assert state["w"].tolist() == [2, 2]


@pytest.mark.parametrize("checkpoint_id", [None, "", "s3://"])
def test_a_checkpoint_id_is_a_folder(checkpoint_id: Any) -> None:
    for call in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(UsageError, match="checkpoint_id|s3://: is no address"):
            call({"w": torch.ones(1)}, checkpoint_id=checkpoint_id)


def test_what_is_no_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointNotFound):
            dcp.load({"w": torch.ones(1)}, checkpoint_id=path)


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    refused: dict[str, Any] = {
        "storage_writer": torchs.FileSystemWriter(tmp_path / "w"),
        "planner": torchs.DefaultSavePlanner(flatten_state_dict=False),
        "use_collectives": False,
        "async_checkpointer_type": torchs.state_dict_saver.AsyncCheckpointerType.PROCESS,
        "unknown": None,
    }

    class DefaultLoadPlanner(torchs.DefaultLoadPlanner):
        """One of the user's own, which would not be asked."""

    with pytest.raises(UsageError, match=r"^planner="):
        dcp.load(state, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner())
    with pytest.raises(UsageError, match=r"^storage_writer=.*; give the folder as checkpoint_id, or use"):
        dcp.save(state, torchs.FileSystemWriter(tmp_path / "w"))
    for name, value in refused.items():
        with pytest.raises(UsageError, match=name):
            dcp.async_save(state, checkpoint_id=tmp_path / "c", **{name: value})
    with pytest.raises(UsageError, match="storage_reader"):
        dcp.load(state, checkpoint_id=tmp_path / "c", storage_reader=torchs.FileSystemReader(tmp_path))
    assert not (tmp_path / "c").exists()
    thread = torchs.state_dict_saver.AsyncCheckpointerType.THREAD
    accepted: dict[str, Any] = {"storage_writer": None, "use_collectives": True, "async_checkpointer_type": thread}
    dcp.save(state, checkpoint_id=tmp_path / "c", planner=torchs.DefaultSavePlanner(), no_dist=True, **accepted)


def test_other_names_of_torchs_module_are_not_here() -> None:
    with pytest.raises(AttributeError, match=r"no 'FileSystemReader', only save, async_save and load"):
        dcp.FileSystemReader  # noqa: B018


def test_names_that_clash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'a\.b'"):
        dcp.save({"a.b": 1, "a": {"b": 2}}, checkpoint_id=tmp_path / "c")


def test_nothing_is_warned_about(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.save(application(1), checkpoint_id=tmp_path / "c")
        dcp.load(application(2), checkpoint_id=tmp_path / "c")
