"""The GPT-2 XL example compiles before it trains."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.ranks import ROOT

EXAMPLE = ROOT / "examples" / "gpt2_xl"


@pytest.mark.parametrize(
    ("neuron", "variables", "commands"),
    [
        (False, {}, ["srun precompile", "srun train"]),
        (True, {}, ["neuron_parallel_compile", "srun precompile", "srun train"]),
        (True, {"SLURM_RESTART_COUNT": "1"}, ["srun train"]),
        (True, {"PRECOMPILE": "0"}, ["srun train"]),
    ],
)
def test_the_script_compiles_first_and_only_once(
    tmp_path: Path, neuron: bool, variables: dict[str, str], commands: list[str]
) -> None:
    """On a Neuron host AWS's tool has to start the step: it reads the output of all ranks."""
    calls = tmp_path / "calls"
    programs = {"srun": f"echo srun ${{@: -2:1}} >> {calls}"}
    if neuron:
        programs["neuron_parallel_compile"] = f'echo neuron_parallel_compile >> {calls}; exec "$@"'
    for name, body in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "VENV": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    subprocess.run(["bash", str(EXAMPLE / "train.sbatch"), "recipe.yaml"], env=environment, check=True)
    assert calls.read_text().splitlines() == commands
