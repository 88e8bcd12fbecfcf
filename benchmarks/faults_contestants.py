"""The trainings that faults.py kills, which are those of survival_contestants.py, called as there, and two more:

- "Stepmark, memory": its Trainer with `memory_every: 1`.
- "torchft": a loop as in its train_ddp.py. Each rank is a replica group with an agent of torchrun of its own, which
  starts it again; the others go on meanwhile, with what is left of each batch. The one that comes back gets model and
  optimizer from a peer. Group 0 saves as the other loops do. The lighthouse has the options of torchft's README.
  Gradients are averaged by its manager's `allreduce`, without its DDP: when a peer dies, the hook of that in 0.2.0
  fails on gloo with an AssertionError, and all groups are started again.

torchft's steps are noted when they are done, by the first group of a quorum; a step whose gradients were discarded is
noted as `again`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from survival_contestants import (
    CONTESTANTS,
    EVERY,
    PAUSE,
    STEPS,
    Texts,
    Training,
    adamw,
    batch_of,
    free_port,
    launch,
    main,
    note,
    plain_model,
    prune,
    rank,
    run_agent,
    stepmark_trainer,
)
from torch import nn


def torchft_loop() -> Training:
    from torchft import Manager, Optimizer, ProcessGroupGloo

    def train(folder: Path) -> nn.Module:
        model = plain_model()
        torch.manual_seed(rank())

        def load_state_dict(state: Mapping[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def state_dict() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        manager = Manager(
            pg=ProcessGroupGloo(),
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            min_replica_size=1,
            init_sync=False,  # all begin with the same seed
            replica_id=f"group_{rank()}",
        )
        optimizer = Optimizer(manager, adamw(model))
        found = sorted(folder.glob("step-*"), key=lambda each: int(each.name[5:]))
        if found:
            saved = torch.load(found[-1] / "state.pt")
            load_state_dict(saved)
            manager.load_state_dict(saved["manager"])
        texts, participants = Texts(), 0
        while (step := manager.current_step()) < STEPS:
            optimizer.zero_grad()
            time.sleep(PAUSE)
            model(**batch_of(texts, step)).loss.backward()
            average_gradients(manager, model)
            optimizer.step()
            done = manager.current_step()
            if manager.errored():
                note("again")
            elif manager.participating_rank() == 0:
                if participants != manager.num_participants():
                    participants = manager.num_participants()
                    note("from", done - 1)
                note("step")
            if rank() == 0 and done > step and done % EVERY == 0:
                save({**state_dict(), "manager": manager.state_dict()}, folder, done)
        manager.shutdown(wait=False)
        return model

    return train


def average_gradients(manager: Any, model: nn.Module) -> None:
    """All at once. An error is the manager's: `step` then discards them."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def save(state: dict[str, Any], folder: Path, step: int) -> None:
    """A folder gets its name when its file is complete."""
    made = folder / f"new-{step}"
    made.mkdir(parents=True, exist_ok=True)
    torch.save(state, made / "state.pt")
    made.rename(folder / f"step-{step}")
    prune(folder, "step-*")


def launch_groups(train: Training, folder: Path, ranks: int) -> None:
    """A lighthouse, and a process with an agent for each group. The first one that fails ends it."""
    from torchft.coordination import LighthouseServer

    port = free_port()
    os.environ |= {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": str(ranks)}
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # its Manager needs the agent's store
    groups = []
    for group in range(ranks):
        if (child := os.fork()) == 0:
            os.environ["REPLICA_GROUP_ID"] = str(group)
            run_agent(train, folder, 1)
            os._exit(0)
        groups.append(child)
    lighthouse = LighthouseServer(f"[::]:{port}", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000)
    for _ in groups:
        if code := os.waitstatus_to_exitcode(os.wait()[1]):
            raise SystemExit(f"a group's agent ended with {code}")
    lighthouse.shutdown()


FAULTS_CONTESTANTS: dict[str, Callable[[], Training]] = {
    **CONTESTANTS,
    "Stepmark, memory": lambda: stepmark_trainer(memory_every=1),
    "torchft": torchft_loop,
}


if __name__ == "__main__":
    import sys

    main(FAULTS_CONTESTANTS, launch_groups if sys.argv[1] == "torchft" else launch)
