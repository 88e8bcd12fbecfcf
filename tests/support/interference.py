"""Makes one rank of a real run misbehave, whoever launches it: `install` writes a folder for PYTHONPATH whose
`sitecustomize` Python runs at its start, and which changes the rank's second step."""

from __future__ import annotations

from pathlib import Path

SITE = """
import importlib.util, os, signal, sys

RANK, WHAT = {rank!r}, {what!r}


def is_rank():
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == str(RANK)


class AfterImport:
    def find_spec(self, name, path=None, target=None):
        if name != "stepmark.trainer.training_loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module.TrainingLoop)

        spec.loader.exec_module = exec_module
        return spec


def change(run):
    train_step = run._train_step

    def step(self, batch):
        if self._step == 1 and is_rank():
            if WHAT == "raise":
                raise ValueError("the second step is bad")
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(self, batch)

    run._train_step = step


sys.meta_path.insert(0, AfterImport())
"""


def install(folder: Path, rank: int, what: str) -> str:
    """`what`: "raise" an error, or "kill" the process. Returns the folder to put on PYTHONPATH."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(rank=rank, what=what))
    return str(folder)
