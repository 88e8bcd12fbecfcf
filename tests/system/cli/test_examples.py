"""The examples do what they say."""

from __future__ import annotations

import email
import json
import math
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from stepmark import read_metrics
from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.cli.main import run
from tests.support.processes import environment, torchrun
from tests.support.ranks import ROOT, Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_losses

STEPS, EVERY = 6, 2  # the loop keeps two checkpoints, those of steps 4 and 6


def train_on_little(*arguments: Any) -> None:
    """The example, for which one package is the whole standard library."""
    from examples.custom_loop import main
    from stepmark.data.sources import sources

    with mock.patch.object(sources, "sysconfig", SimpleNamespace(get_path=lambda _: str(Path(email.__file__).parent))):
        main(*arguments)


@pytest.mark.parametrize(
    ("device", "nproc"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.prove),
        pytest.param("cpu", 2, marks=pytest.mark.prove),
        pytest.param("xla", 1, marks=pytest.mark.xla),
    ],
)
def test_custom_loop_carries_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, cache: dict[str, str], device: str, nproc: int
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"

    def run(folder: Path) -> list[str]:
        arguments = (str(folder), device, STEPS, EVERY)
        outcome = ranks.run(train_on_little, *arguments, nproc=nproc, environment=cache)
        outcome.check()
        return [line for line in outcome.logs[0].splitlines() if line.startswith("step ")]

    told = run(whole)
    assert [line.split(":")[0] for line in told] == ["step 2", "step 4", "step 6"]
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-6")
    assert run(again) == told[2:]
    files = [folder / "checkpoint-6" / "model.safetensors" for folder in (whole, again)]
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"STEPMARK_CACHE": str(tmp_path_factory.mktemp("cache"))}


def shard_and_train(store: str, folder: str, shape: tuple[int, int, int], model: str | None, steps: int) -> None:
    """The example, on a mesh of (replicas, shards, tensor parallel ranks)."""
    from examples.fsdp2_loop import main

    joined = partial(dist.init_process_group, "gloo", f"file://{store}", rank=int(os.environ["RANK"]))
    with mock.patch.object(dist, "init_process_group", partial(joined, world_size=int(os.environ["WORLD_SIZE"]))):
        main(folder, *shape, model, steps, 2)


def test_what_torch_shards_resumes_on_other_meshes(ranks: Ranks, tmp_path: Path) -> None:
    def run(folder: Path, *shape: int) -> list[str]:
        arguments = (f"{folder}-store", str(folder), shape, None, 6)
        outcome = ranks.run(shard_and_train, *arguments, nproc=math.prod(shape))
        outcome.check()
        return [line for line in outcome.logs[0].splitlines() if line.startswith("step ")]

    whole = run(tmp_path / "whole", 1, 2, 1)
    assert [line.split(":")[0] for line in whole] == ["step 2", "step 4", "step 6"]
    for shape in ((1, 2, 1), (2, 2, 1), (1, 2, 2)):  # fully_shard, HSDP, fully_shard with tensor parallelism
        folder = tmp_path / "-".join(map(str, shape))
        shutil.copytree(tmp_path / "whole", folder)
        shutil.rmtree(folder / "checkpoint-6")
        (line,) = run(folder, *shape)
        assert float(line.split()[-1]) == pytest.approx(float(whole[2].split()[-1]), abs=1e-4)
        assert line == whole[2] or shape != (1, 2, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's, on loading in one process
def test_what_transformers_shards_resumes_on_another_mesh(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(tmp_path / "model")
    for steps, mesh in ((2, (1, 2, 1)), (4, (1, 1, 2))):
        arguments = (str(tmp_path / f"store-{steps}"), str(tmp_path / "run"), mesh, str(tmp_path / "model"), steps)
        outcome = ranks.run(shard_and_train, *arguments, nproc=2)
        outcome.check()
        told = [line for line in outcome.logs[0].splitlines() if line.startswith("step ")]
        assert [line.split(":")[0] for line in told] == [f"step {steps}"]
    checkpoint, plain = tmp_path / "run" / "checkpoint-4", LlamaForCausalLM.from_pretrained(tmp_path / "model")
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.restore({"model": plain, "optimizer": torch.optim.AdamW(plain.parameters())}, checkpoint)
    for command in ("verify {}", "inspect {}", "consolidate {} {}/whole", "export {} {}/dcp --to dcp"):
        assert (
            run([word.format(checkpoint) if word == "{}" else word.format(tmp_path) for word in command.split()]) == 0
        )
    found = LlamaForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    exported = {"model": {name: torch.zeros_like(value) for name, value in found.items()}}
    dcp.load(exported, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, found[name])
        assert torch.equal(value, exported["model"][name])


@pytest.mark.prove
def test_the_loop_of_plain_torch_runs_under_torchrun(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "run"), "--shard", "2", "--steps", "2", "--every", "1"]
    command = torchrun(str(ROOT / "examples" / "fsdp2_loop.py"), *options)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.prove
def test_a_run_for_each_combination_is_trained_and_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.sweep import main

    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    recipe = write_recipe(tmp_path, logging_steps=1, eval_strategy="steps", eval_steps=2, max_eval_samples=2)
    runs = tmp_path / "runs"
    arguments = [str(recipe), "--output_dir", str(runs), "--learning_rate", "1e-4", "fast", "--seed", "1"]
    assert main([*arguments, "--print"]) == 0
    first, _ = capfd.readouterr().out.splitlines()
    folder = runs / "learning_rate=1e-4"
    flags = f"--learning_rate 1e-4 --seed 1 --output_dir {folder} --resume_from_checkpoint true"
    assert first == f"stepmark train {recipe} {flags}"
    assert main(arguments) == 1
    told = capfd.readouterr()
    assert "error: learning_rate: should be a number, and is 'fast'" in told.err
    best, failed = told.out.splitlines()[-2:]
    assert re.fullmatch(r"learning_rate=1e-4: done, eval_loss \d\.\d+", best)
    assert failed == "learning_rate=fast: not started"
    assert main([*arguments, "--max_steps", "3"]) == 1
    assert [line["resumed"] for line in read_metrics(folder) if "resumed" in line] == [2]


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}"
)


def write_chat_model(folder: Path) -> None:
    """A small Llama whose tokenizer has a chat template, as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from stepmark.data.tokenize.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's call
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_chat_with_lora_carries_on_bit_for_bit(ranks: Ranks, tmp_path: Path, device: str) -> None:
    """Its adapter is one that plain peft loads."""
    pytest.importorskip("peft")
    model, file, whole, again = (tmp_path / name for name in ("model", "chats.jsonl", "whole", "again"))
    write_chat_model(model)
    answers = [("say", "ok " * (1 + i % 5)) for i in range(60)]
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in answers]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    def run(folder: Path) -> None:
        arguments = (str(model), str(file), str(folder), 64, 60, device)
        ranks.run("examples.chat_lora:main", *arguments).check()

    run(whole)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoint-60")
    (again / "adapter_model.safetensors").unlink()
    run(again)
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, again))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    losses = [read_losses(folder) for folder in (whole, again)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    adapted(model, again)


def adapted(model: Path, adapter: Path) -> None:
    """Loads the adapter as plain transformers and peft do; it changes what the model says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.arange(3, 9)[None]
    before = base(tokens).logits
    assert not torch.equal(PeftModel.from_pretrained(base, adapter)(tokens).logits, before)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The demo's module, with two runs in `tmp_path` that are the same."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    monkeypatch.setattr(demo, "STEPS", 4)
    for name, steps in (("RUN", [1, 2, 3, 3, 4]), ("UNDISTURBED", [1, 2, 3, 4])):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(demo, name, folder)
        lines: list[dict[str, Any]] = [{"step": step, "loss": 1 / step, "grad_norm": 0.1 * step} for step in steps]
        if name == "RUN":
            lines.insert(3, {"resumed": 2, "attempt": 1})
        lines.append({"step": 4, "eval_loss": 0.3})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "model.safetensors").write_bytes(b"weights")
    return demo


def compared(demo: Any) -> bool:
    return bool(demo.compare(demo.read_history(demo.RUN), demo.read_history(demo.UNDISTURBED)))


def test_demo_finds_equal_runs_equal(demo: Any) -> None:
    assert demo.read_history(demo.RUN).resumed == [2]
    assert compared(demo)


@pytest.mark.parametrize("key", ["loss", "grad_norm", "eval_loss"])
def test_demo_finds_one_bit(demo: Any, key: str) -> None:
    path = demo.RUN / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in reversed(lines) if key in line)
    line[key] = math.nextafter(line[key], math.inf)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not compared(demo)


def test_demo_finds_other_weights_and_missing_steps(demo: Any) -> None:
    (demo.RUN / "model.safetensors").write_bytes(b"Weights")
    assert not compared(demo)
    (demo.RUN / "model.safetensors").write_bytes(b"weights")
    path = demo.RUN / "metrics.jsonl"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"step": 4, "loss"' not in line))
    assert not compared(demo)


def test_demo_draws_its_curve(demo: Any) -> None:
    path = demo.RUN / "loss.png"
    demo.draw(demo.read_history(demo.RUN), demo.read_history(demo.UNDISTURBED), 3, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_demo_makes_its_tokenizer(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import demo_tokenizer
    from transformers import AutoTokenizer

    text = "def read(self):\n        return self.name\n"
    monkeypatch.setattr(demo_tokenizer, "VOCABULARY", 300)
    monkeypatch.setattr(demo_tokenizer, "sources", lambda: iter([text] * 9))
    demo.make_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ids = tokenizer(text).input_ids
    assert len(ids) < len(text) / 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == tokenizer.bos_token == demo_tokenizer.END
