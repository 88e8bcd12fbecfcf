"""The GPT-2 XL example describes the model, the precision and the variables that its README says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from stepmark.config.recipe import read_recipe
from tests.support.ranks import ROOT

EXAMPLE = ROOT / "examples" / "gpt2_xl"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
SCRIPT = (EXAMPLE / "train.sbatch").read_text(encoding="utf-8")
VARIABLES = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "NEURON_COMPILE_CACHE_URL": '"$COMPILE_CACHE"',
}


def test_the_recipe_is_the_model_of_the_readme() -> None:
    recipe = read_recipe(EXAMPLE / "recipe.yaml", {})
    assert (recipe.model.config_name, recipe.model.tokenizer_name) == ("gpt2", "gpt2")
    assert isinstance(recipe.model.config_overrides, dict)
    config = GPT2Config(**recipe.model.config_overrides)  # its vocabulary is that of GPT-2's tokenizer
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"N = {parameters:,} parameters" in README


def test_the_recipe_shards_and_accumulates_as_the_readme_says() -> None:
    training = read_recipe(EXAMPLE / "recipe.yaml", {}).training
    assert (training.dtype, training.zero_1, training.gradient_checkpointing) == ("bfloat16", True, True)
    sequences = training.per_device_train_batch_size, training.gradient_accumulation_steps
    tokens = 128 * sequences[0] * sequences[1] * 1024
    assert f"128 x {sequences[0]} x {sequences[1]} x 1024 = {tokens:,}" in README


def test_the_script_sets_the_networks_and_neurons_variables() -> None:
    exported = dict(re.findall(r"^export (\w+)=(\S+)", SCRIPT, re.MULTILINE))
    assert {name: exported.get(name) for name in VARIABLES} == VARIABLES
    assert not {name for name in exported if name.startswith(("XLA_", "PJRT_", "NEURON_PJRT", "RANK", "WORLD_"))}


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
