"""How many threads a rank computes with, and who has said so."""

from __future__ import annotations

import os

THREADS = "OMP_NUM_THREADS"
OWN_CHOICE = "STEPMARK_THREADS_CHOSEN"  # set where `--nproc` has chosen their number


def usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_threads(nproc: int) -> dict[str, str]:
    """The variables of a rank of `--nproc`: as many threads as its share of the cores, unless they are given."""
    if THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, usable_cores() // nproc)), OWN_CHOICE: "1"}


def given_threads() -> bool:
    """Whether the user has set OMP_NUM_THREADS: not `--nproc`, nor torchrun, which sets 1 for several ranks."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != "1"
    return THREADS in os.environ and OWN_CHOICE not in os.environ and not (by_torchrun and os.environ[THREADS] == "1")
