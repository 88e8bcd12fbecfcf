"""A machine with Trainium, as far as importing torch_xla goes: a stand-in for Neuron's package libneuronxla."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import ROOT

# What a plain `srun` with two nodes of two tasks sets for the last task.
SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "10.0.0.1,10.0.0.2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_RANK",
    "MASTER_",
    "TORCHELASTIC",
    "SLURM",
    "NEURON",
    "PJRT",
    "USE_TORCH_XLA",
)
SHOWN = ("NEURON", "PJRT")
PROGRAM = """
import json, os
from stepmark.runtime import hardware
hardware.neuron_device_present = lambda: True
{body}
print(json.dumps({{name: value for name, value in os.environ.items() if name.startswith({shown})}}))
"""


def variables_after(body: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Runs Python statements in a process that finds libneuronxla; Neuron's and PJRT's variables after them."""
    package = folder / "site" / "libneuronxla"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("def configure_environment():\n    pass\n")
    (package / "libneuronpjrt_path.py").write_text(
        "def libneuronpjrt_path():\n    return '/missing/libneuronpjrt.so'\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    paths = os.pathsep.join([str(package.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body, shown=SHOWN)],
        env={**kept, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    variables: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return variables
