"""Scripts that `accelerate launch` starts: its options are obeyed, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepmark import TrainingArguments
from stepmark.errors import UsageError
from stepmark.launch.accelerate_variables import Asked, asked_by_accelerate
from tests.support.ranks import Ranks

SCRIPT = """
import json, os
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}))
"""


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, Asked()),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}, Asked()),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False", "ACCELERATE_USE_FSDP": "0"}, Asked()),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, Asked(bf16=True)),
        ({"ACCELERATE_USE_CPU": "true"}, Asked(cpu=True)),
    ],
)
def test_what_the_variables_ask_for(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked: Asked) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert asked_by_accelerate() == asked


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "use bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch_compile_backend"),
        ("ACCELERATE_USE_FSDP", "true", "set fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "zero_1"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "tensor_parallel_size"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "pipeline_parallel_size"),
    ],
)
def test_what_stepmark_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, remedy: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name}={value}, as `accelerate launch` sets it, .*{remedy}"):
        TrainingArguments()


def test_arguments_follow_the_variables_where_they_do_not_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    both = TrainingArguments()
    assert (both.bf16, both.device_name) == (True, "cpu")
    assert not TrainingArguments(dtype="bfloat16").bf16  # is bfloat16 already
    assert TrainingArguments(device="xla").device_name == "xla"


def test_accelerate_launch_sets_these_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = "import runpy; runpy.run_module('accelerate.commands.launch', run_name='__main__', alter_sys=True)"
    done = ranks.script(launch, "--cpu", "--mixed_precision", "bf16", str(script), timeout=120)
    assert done.returncode == 0, done.stderr
    for name, value in json.loads(done.stdout.splitlines()[-1]).items():
        monkeypatch.setenv(name, value)
    arguments = TrainingArguments()
    assert (arguments.bf16, arguments.device_name) == (True, "cpu")
