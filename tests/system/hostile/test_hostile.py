"""A stranger's folder: no code of it runs, nothing outside of it is touched, nothing hangs, and one line says why."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import commands as started
from tests.support.ranks import Ranks
from tests.system.hostile.commands import BYTES, SECONDS, WRITES, Outcome, run, tree
from tests.system.hostile.forge import Place, fill_outside
from tests.system.hostile.inputs import INPUTS, Input

RECIPE = """
config_name: gpt2
config_overrides: {n_layer: 1, n_embd: 16, n_head: 2, n_positions: 64}
tokenizer_name: bytes
block_size: 16
max_steps: 3
save_steps: 1
eval_strategy: steps
eval_steps: 3
per_device_train_batch_size: 2
logging_steps: 1
disable_tqdm: true
device: cpu
"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff]")
UNEXPLAINED = re.compile(r"error: \w*(Error|Exception|Interrupt)\b")
EVERY = 12  # every so many cells are in the ordinary suite


@pytest.fixture(scope="session")
def original(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, its model, and an adapter."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "place").mkdir()
    work = root / "work"
    work.mkdir()
    (work / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    (work / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n' * 9)
    (work / "recipe.yaml").write_text(f"{RECIPE}train_file: {work / 'text.txt'}\n")
    tuned = [line for line in RECIPE.splitlines() if "config" not in line]
    (work / "tuned.yaml").write_text("\n".join([*tuned, f"train_file: {work / 'text.txt'}\n"]))
    place = Place(root)
    trained = started.run(ranks, work, "train", "recipe.yaml", "--output_dir", str(place.run))
    assert trained.returncode == 0, trained.stderr
    (place.run / "failures").mkdir()
    (place.run / "failures" / "rank-0.txt").write_text("== 2026, process 1 on a: error\nTraceback\n")
    consolidated = started.run(ranks, work, "consolidate", str(place.checkpoint), str(place.model))
    assert consolidated.returncode == 0, consolidated.stderr
    ranks.run("tests.system.hostile.test_hostile:make_adapter", str(place.model), str(place.adapter)).check()
    ranks.run("tests.system.hostile.test_hostile:save_steps", str(place.saved)).check()
    for name in ("cache", "stdout", "stderr"):
        path = work / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return root


def make_adapter(model: str, folder: str) -> None:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def save_steps(folder: str) -> None:
    import torch

    from stepmark import Checkpointer

    with Checkpointer(folder, keep_last=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": torch.nn.Linear(2, 2, bias=False)}, block=True)


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Place:
    shutil.copytree(original, tmp_path, symlinks=True, dirs_exist_ok=True)
    copied = ("place/**/used_recipe.yaml", "place/adapter/adapter_config.json", "work/*.yaml")
    for path in [found for pattern in copied for found in tmp_path.glob(pattern)]:
        content = path.read_text().replace(str(original), str(tmp_path))
        if path.parent.name.startswith("checkpoint-"):
            _resign(path, content)
        else:
            path.write_text(content)
    found = Place(tmp_path)
    fill_outside(found)
    return found


def _resign(path: Path, content: str) -> None:
    from tests.system.hostile.forge import signed_file

    here = Place(path.parents[3])
    signed_file(path.name, content.encode(), f"run/{path.parent.name}")(here)


def cells() -> Iterator[object]:
    number = 0
    for each in INPUTS:
        for command, fine in each.cells():
            marks = [pytest.mark.prove] if number % EVERY else []
            yield pytest.param(each, command, fine, id=f"{each.name}-{command}", marks=marks)
            number += 1


@pytest.mark.parametrize(("given", "command", "fine"), [*cells()])
def test_a_stranger_s_folder(ranks: Ranks, place: Place, given: Input, command: str, fine: bool) -> None:
    for forge in given.forgeries:
        forge(place)
    before, theirs = tree(place.outside), tree(place.root / "place")
    outcome = run(ranks, place, command)
    check_verdict(outcome, given, fine, command)
    assert tree(place.outside) == before, "something outside was changed"
    check_theirs(theirs, tree(place.root / "place"), command)
    for name in given.keeps:
        assert (place.run / name).read_text() == "mine", f"{name} is lost"
    opened = [path for path in outcome.opened if Path(path).absolute().is_relative_to(place.outside)]
    assert not opened, f"read outside: {opened}"
    check_nothing_is_looked_up(outcome)


def check_nothing_is_looked_up(outcome: Outcome) -> None:
    assert not {*outcome.looked_up} - {"localhost", "127.0.0.1", socket.gethostname()}


def check_verdict(outcome: Outcome, given: Input, fine: bool, command: str) -> None:
    told = f"{outcome.out}\n{outcome.err}"
    assert outcome.code is not None, f"it hangs:\n{told}"
    assert outcome.seconds <= SECONDS, f"{outcome.seconds:.1f} s\n{told}"
    assert outcome.memory <= BYTES, f"{outcome.memory / 1e6:.0f} MB\n{told}"
    assert not CONTROL.search(told), f"control characters: {CONTROL.findall(told)}"
    assert "s3cret" not in told
    assert "Traceback" not in outcome.err, told
    assert outcome.code in ((0,) if fine else (1, 2)), told
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if fine:
        assert not errors, told
        return
    if command.startswith("verify") and not errors:
        errors = [line for line in outcome.out.splitlines() if "corrupted" in line or line.startswith("  ")]
        assert given.says in outcome.out
        return
    assert len(errors) == 1, told
    assert given.says in errors[0], told
    assert not UNEXPLAINED.match(errors[0]), told


def check_theirs(before: dict[str, tuple], after: dict[str, tuple], command: str) -> None:  # type: ignore[type-arg]
    """Nothing is made, changed or deleted but what the command writes into a run."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not {name for name in changed if not f"{name}/".startswith(WRITES.get(command, ()))}


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(INPUTS) >= 120
    assert len({each.name for each in INPUTS}) == len(INPUTS)
