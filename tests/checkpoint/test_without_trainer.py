"""The checkpointer alone: it works where transformers and datasets are not installed, as in an image for FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = '''
import sys
from pathlib import Path

ABSENT = {"accelerate", "datasets", "huggingface_hub", "peft", "rich", "tokenizers", "transformers"}


class Absent:
    """Finds these packages nowhere."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stepmark
from stepmark.checkpoint import Checkpointer, KeepBest, KeepLast, dcp, read_manifest

folder = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "progress": {"step": 0}}


def train(state):
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["progress"]["step"] += 1


def weights(state):
    return [each.full_tensor() for each in state["model"].parameters()]


state = made()
with Checkpointer(folder / "run", keep=[KeepLast(1), KeepBest("loss")]) as checkpointer:
    for step in range(3):
        train(state)
        checkpointer.save(step, state, metrics={"loss": float(step)})
    checkpointer.wait()
    other = made()
    assert checkpointer.restore(other) == 2
assert read_manifest(folder / "run" / "checkpoint-2").step == 2
assert other["progress"] == {"step": 3}
for one, two in ((state, other), (other, state)):
    train(one)
    assert len(one["optimizer"].state) == len(two["optimizer"].state) == 4
assert all(map(torch.equal, weights(state), weights(other)))

dcp.save({"model": state["model"].state_dict()}, checkpoint_id=folder / "dcp")
dcp.async_save({"model": state["model"].state_dict()}, checkpoint_id=folder / "later").result()
for name in ("dcp", "later"):
    loaded = made()
    dcp.load({"model": loaded["model"].state_dict()}, checkpoint_id=folder / name)
    assert all(map(torch.equal, weights(state), weights(loaded)))
stepmark.save({"tensor": torch.ones(2)}, folder / "file")
assert torch.equal(stepmark.load(folder / "file")["tensor"], torch.ones(2))
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
dist.destroy_process_group()
print("all of it")
'''


def test_the_checkpointer_needs_no_transformers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("all of it\n")
