"""Makes ranks of a real run misbehave, whoever launches them: `install` writes a folder for PYTHONPATH whose
`sitecustomize` Python runs at its start, and which changes a step of the rank; `install_brake` slows every step."""

from __future__ import annotations

import runpy
from pathlib import Path

SITE = """
import importlib.util, os, pathlib, shutil, signal, sys, time

RANK, WHAT, PLACE, ONCE, STEP, RESUMED = {rank!r}, {what!r}, {place!r}, {once!r}, {step!r}, {resumed!r}


def is_rank():
    return RANK is None or os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == str(RANK)


class AfterImport:
    def find_spec(self, name, path=None, target=None):
        if name != "stepmark.trainer.training_loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def misbehave():
    if WHAT == "raise":
        raise ValueError("the second step is bad")
    if WHAT == "unplug":
        os.sched_setaffinity(os.getppid(), [min(os.sched_getaffinity(os.getppid()))])
    if WHAT in ("kill", "unplug"):
        os.kill(os.getpid(), signal.SIGKILL)


def change(module):
    if RESUMED == "forgets":
        folder = sys.argv[len(sys.argv) - sys.argv[::-1].index("--output_dir")]
        for checkpoint in pathlib.Path(folder).glob("checkpoint-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
    if PLACE == "batch":
        change_batch(module)
    else:
        change_step(module.TrainingLoop)


def change_batch(module):
    show_step = module.show_step

    def show(place):
        show_step(place)
        if place.step == STEP and place.samples and is_rank() and not (ONCE and os.path.exists(ONCE)):
            if ONCE:
                open(ONCE, "w").close()
            misbehave()

    module.show_step = show


def change_step(run):
    train_step = run._train_step

    def step(self, batch):
        if os.path.exists(WHAT):
            time.sleep(0.4)
        elif self._step == STEP - 1 and is_rank():
            misbehave()
        if RESUMED == "drifts" and self._step and self._first_step is None:
            next(iter(self._parts.model.parameters())).data.mul_(1.001)
        train_step(self, batch)

    run._train_step = step


sys.meta_path.insert(0, AfterImport())
"""


def install(folder: Path, rank: int, what: str, place: str = "step", *, once: bool = False, step: int = 2) -> str:
    """`what`: "raise" an error, "kill" the process, or "unplug" its supervisor's cores but one as well, before a step
    or in it, with its "batch"; `once`: only the first time. Returns the folder to put on PYTHONPATH."""
    folder.mkdir()
    marker = str(folder / "was-here") if once else ""
    site = SITE.format(rank=rank, what=what, place=place, once=marker, step=step, resumed="")
    (folder / "sitecustomize.py").write_text(site)
    return str(folder)


def install_brake(folder: Path, brake: Path, resumed: str = "") -> str:
    """Every step of every rank takes 0.4 seconds as long as the file `brake` exists. `resumed`: a run that goes on
    "forgets" its checkpoints, or "drifts" a little. Returns the folder to put on PYTHONPATH."""
    folder.mkdir()
    site = SITE.format(rank=None, what=str(brake), place="step", once="", step=2, resumed=resumed)
    (folder / "sitecustomize.py").write_text(site)
    return str(folder)


def apply(folder: Path) -> None:
    """Changes this process, which has imported everything, as `install` into the folder would have."""
    from stepmark.trainer import training_loop

    runpy.run_path(str(folder / "sitecustomize.py"))["change"](training_loop)
