"""Ranks on machines that share no folder: each sees its machine's own under the same path."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.checkpoint import Checkpointer, dcp
from stepmark.checkpoint import checkpointer as checkpointer_module
from stepmark.checkpoint.format.integrity import what_is_wrong
from stepmark.errors import CheckpointError
from stepmark.filesystem import files
from tests.support import dcp_programs, programs

_NEW_MOUNTS, _BIND, _PRIVATE_BELOW = 0x20000, 0x1000, 0x44000


def be_on(machine: int, folder: Path) -> None:
    """From now on, this process has the folder `machine-<machine>` beside `folder` under the name of `folder`."""
    # On a real network file system, a name may take longer to appear.
    files.PATIENCE = files.SOON = checkpointer_module.SOON = 0.5
    libc = ctypes.CDLL(None, use_errno=True)
    own = folder.with_name(f"machine-{machine}")
    for each in (own, folder):
        each.mkdir(exist_ok=True)
    bound = str(own).encode(), str(folder).encode(), None, _BIND, None
    for code in (libc.unshare(_NEW_MOUNTS), libc.mount(b"none", b"/", None, _PRIVATE_BELOW, None), libc.mount(*bound)):
        assert code == 0, os.strerror(ctypes.get_errno())


def rank() -> int:
    return int(os.environ["RANK"])


def digest(state: dict[str, Any]) -> str:
    """Of a model and an optimizer."""
    found = hashlib.sha256()
    held = [state["model"].state_dict(), *state["optimizer"].state_dict()["state"].values()]
    for tensors in held:
        for _, tensor in sorted(tensors.items()):
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def begin(folder: str, machines: list[int]) -> dict[str, Any]:
    """Joins the ranks; returns a model and its optimizer."""
    be_on(machines[rank()], Path(folder))
    dcp_programs.join(str(Path(folder).parent))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def save(folder: str, machines: list[int], address: str, steps: int, looks: bool = True) -> dict[str, Any]:
    """Restores the newest checkpoint, and trains and saves so many more steps; `looks` at the newest then."""
    state = begin(folder, machines)
    told: dict[str, Any] = {}
    with Checkpointer(address, keep_last=2) as checkpointer:
        told["restored"] = first = checkpointer.restore(state)
        told["digest"] = digest(state)
        for step in range((first or 0) + 1, (first or 0) + steps + 1):
            torch.manual_seed(step)
            state["model"](torch.randn(4, 64)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            try:
                checkpointer.save(step, state, metadata={"step": step}, block=True)
            except CheckpointError as error:
                told.setdefault("errors", []).append(str(error))
        if looks:
            newest = checkpointer.latest()
            assert newest is not None
            told["newest"] = newest.name
            told["whole"] = rank() != 0 or what_is_wrong(newest) is None
            told["metadata"] = checkpointer.metadata(newest) if "errors" not in told else None
    told["saved"] = digest(state)
    told["left"] = sorted(path.parent.name for path in Path(folder).rglob("manifest.json"))
    told["unfinished"] = sorted(path.name for path in Path(folder).rglob(".checkpoint-*"))
    return told


def claim_twice(folder: str, machines: list[int], address: str) -> list[str]:
    """Claims a folder that is no folder on the second machine, and then is one; the error, and what is beside it."""
    begin(folder, machines)
    with Checkpointer(address) as checkpointer:
        if rank() == 1:
            checkpointer.folder.parent.mkdir(parents=True)
            checkpointer.folder.touch()
        with pytest.raises(CheckpointError) as failed:
            checkpointer.claim()
        if rank() == 1:
            checkpointer.folder.unlink()
        checkpointer.claim()
    return [str(failed.value), *(path.name for path in (checkpointer.folder / ".stepmark").glob("*seen*"))]


def dcp_step(folder: str, machines: list[int], address: str) -> bool:
    """Saves twice, and loads; caches have other paths."""
    be_on(machines[rank()], Path(folder))
    os.environ["STEPMARK_CACHE"] += f"-{machines[rank()]}"
    dcp_programs.join(str(Path(folder).parent))
    state = {"w": torch.arange(1000.0), "v": torch.arange(500.0), "n": 3}
    for _ in range(2):
        dcp.save(state, checkpoint_id=address)
    found = {"w": torch.zeros(1000), "v": torch.zeros(500), "n": 0}
    dcp.load(found, checkpoint_id=address)
    assert not list(Path(folder).rglob(".*.saving"))
    return bool((found["w"] == state["w"]).all() and (found["v"] == state["v"]).all() and found["n"] == 3)


class Adds(TrainerCallback):
    """Reads each checkpoint that is saved, and adds a file to it."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero:
            assert what_is_wrong(path) is None
            (path / "added.txt").write_text(str(state.global_step))


class KillLater(TrainerCallback):
    """Ends the process with SIGKILL so many seconds after its first step."""

    def __init__(self, seconds: float) -> None:
        self.timer: threading.Timer | None = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.timer is not None:
            self.timer.daemon = True
            self.timer.start()
            self.timer = None


def train(
    folder: str, machines: list[int], options: dict[str, Any], kill_at: int | None, kill_later: Any = None
) -> dict[str, Any]:
    """Trains and saves the tiny model; what rank 0 has logged, and checksums of its file and of this rank's part. Ranks
    are killed in the step `kill_at`, or the seconds in `kill_later` after their first one; then no callback waits for
    saves."""
    be_on(machines[rank()], Path(folder))
    os.environ["STEPMARK_CACHE"] += f"-{machines[rank()]}"
    defaults = {"max_steps": 8, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-3}
    defaults |= {"disable_tqdm": True, "save_steps": 1, "save_timeout": 60}
    trainer = Trainer(
        programs.tiny_model(),
        TrainingArguments(**{**defaults, **options}),
        train_dataset=programs.Blocks(30, ragged=True),
        eval_dataset=programs.Blocks(7, seed=1),
        callbacks=[
            *([] if kill_later is None or kill_later[rank()] is None else [KillLater(kill_later[rank()])]),
            *([] if kill_at is None else [programs.KillAt(kill_at, None)]),
            *([Adds()] if kill_later is None else []),
        ],
    )
    trainer.train()
    logged = programs.logged(Path(trainer.args.output_dir)) if rank() == 0 else {}
    trainer.save_model()
    model = Path(trainer.args.output_dir, "model.safetensors")
    logged |= {"model": hashlib.sha256(model.read_bytes()).hexdigest()} if rank() == 0 else {}
    return {**logged, "weights": programs.checksum(trainer), "beside": (model.parent / ".model").exists()}
