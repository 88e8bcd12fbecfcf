"""SmolLM2 learns to answer with a LoRA adapter, from a recipe of chat messages: killed and started again it ends with
the same adapter, bit for bit, and the adapter answers in plain transformers and peft."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.devices import HAS_XLA
from tests.support.processes import environment, wait_until
from tests.support.ranks import Ranks
from tests.support.real_model import PACKAGE, weights
from tests.support.run_folders import read_losses

WORDS = ("tree", "river", "stone", "cloud", "lamp", "bread", "wheel", "glass")
KILLED_AFTER = 4
FIELDS = {
    "peft": "lora",
    "lora_r": 8,
    "train_file": "chats.jsonl",
    "messages_column": "messages",
    "assistant_only_loss": True,
    "packing": True,
    "block_size": 96,
    "validation_split_percentage": 0,
    "max_steps": 8,
    "per_device_train_batch_size": 1,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_steps": 2,
    "disable_tqdm": True,
}
ANSWER = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, question = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
tokenizer = AutoTokenizer.from_pretrained(base)
messages = [{"role": "user", "content": question}]
tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
said = model.generate(**tokens, max_new_tokens=12, do_sample=False)
assert not any(name.split(".")[0] == "stepmark" for name in sys.modules)
print(json.dumps(tokenizer.decode(said[0, tokens["input_ids"].shape[1]:], skip_special_tokens=True)))
"""


def question(number: int) -> str:
    return f"Say {WORDS[number % len(WORDS)]} and {WORDS[number * 3 % 7]}."


def write_chats(file: Path) -> None:
    """Whatever is asked, the answer is the same."""
    with file.open("w") as lines:
        for number in range(60):
            said = (("user", question(number)), ("assistant", "I say nothing."))
            messages = [{"role": role, "content": content} for role, content in said]
            lines.write(json.dumps({"messages": messages}) + "\n")


def start(folder: Path, name: str, **fields: Any) -> subprocess.Popen[str]:
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({**FIELDS, "output_dir": name, "model_name_or_path": "source", **fields}))
    command = [sys.executable, "-m", "stepmark", "train", recipe.name]
    return subprocess.Popen(command, cwd=folder, env=environment(folder), stderr=subprocess.PIPE, text=True)


def complete(folder: Path, name: str, **fields: Any) -> dict[int, float]:
    process = start(folder, name, **fields)
    _, said = process.communicate(timeout=1800)
    assert process.returncode == 0, said
    return read_losses(folder / name)


def steps_logged(run: Path) -> int:
    return max(read_losses(run), default=0) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.prove
@pytest.mark.skipif(weights() is None, reason=f"{PACKAGE} is not installed; `make prove` installs it")
def test_an_adapter_of_smollm2_survives_a_kill_and_answers(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("tests.support.real_model:unpack", str(tmp_path / "source"), timeout=600).check()
    write_chats(tmp_path / "chats.jsonl")
    found = {}
    for device in ("cpu", "xla") if HAS_XLA else ("cpu",):
        found[device] = complete(tmp_path, f"whole-{device}", device=device)
        killed = start(tmp_path, f"killed-{device}", device=device)
        wait_until(lambda run=tmp_path / f"killed-{device}": steps_logged(run) > KILLED_AFTER, 1800)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert complete(tmp_path, f"killed-{device}", device=device, resume_from_checkpoint=True) == found[device]
        adapters = [tmp_path / f"{kind}-{device}" / "adapter_model.safetensors" for kind in ("whole", "killed")]
        assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert len(found["cpu"]) == FIELDS["max_steps"]
    assert found["cpu"][8] < found["cpu"][1] / 4
    if "xla" in found:
        assert list(found["xla"].values()) == pytest.approx(list(found["cpu"].values()), rel=1e-3)
        lines = [line for line in read_metrics(tmp_path / "whole-xla") if "graph_executions" in line]
        counted = [(line["graph_executions"], line["graph_compilations"]) for line in lines]
        steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(counted)]
        assert steps[2:] == [(1, 0)] * len(steps[2:])
    answered = subprocess.run(
        [sys.executable, "-c", ANSWER, "source", "killed-cpu", "Say lamp and house."],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout.splitlines()[-1]).strip() == "I say nothing."
