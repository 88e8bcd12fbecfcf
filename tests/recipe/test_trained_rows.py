"""`stepmark rows`: the samples of past steps are those that were trained."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as call
from stepmark.data.loader.fetcher import Fetcher
from stepmark.data.loader.order import sample_order
from stepmark.trainer.training_loop import TrainingLoop
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe, write_text
from tests.trainer.compat import test_strategies as strategies
from tests.trainer.test_training_loop import EndsEpochs

HERE = "tests.recipe.test_trained_rows"
RUN: dict[str, Any] = {"max_steps": 12, "save_steps": 2, "logging_steps": 1, "async_save": False, "disable_tqdm": True}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
CHAT = {
    "messages_column": "messages",
    "train_file": "{}/chat.jsonl",
    "chat_template_path": "{}/template.jinja",
    "validation_split_percentage": 20,
    "config_overrides": {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 96},
}


def message(role: str, n: int) -> dict[str, str]:
    return {"role": role, "content": f"{role} {n}; " + "x" * (n * 7 % 11)}


def text_of(ids: list[int]) -> str:
    return bytes(each for each in ids if each < 256).decode()


def spied(arguments: list[str], folder: str, kill_at: int | None) -> None:
    """`stepmark train` in a rank, which keeps each micro-batch as it was collated, and is killed after a step."""
    labelled, follow = Fetcher._labelled, TrainingLoop._follow_control
    path = Path(folder) / f"{os.environ.get('RANK', '0')}.jsonl"

    def label(self: Any, inputs: Any, task: Any) -> Any:
        with path.open("a") as file:
            print(json.dumps(inputs["input_ids"][: task.rows].tolist()), file=file)
        return labelled(self, inputs, task)

    def end(self: Any) -> None:
        follow(self)
        if self._step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Fetcher._labelled, TrainingLoop._follow_control = label, end  # type: ignore[method-assign]
    assert call(arguments) == 0


def batches(folder: Path, rank: int, accumulation: int, first: int) -> dict[tuple[int, int, int], list[list[int]]]:
    """What a rank has collated, by step, rank and micro-batch. It has fetched batches ahead of the last step, too."""
    lines = map(json.loads, (folder / f"{rank}.jsonl").read_text().splitlines())
    return {(first + n // accumulation, rank, n % accumulation): line for n, line in enumerate(lines)}


def rows(run: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert call(["rows", run, "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt", 12)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"number {n}; " * 2}) for n in range(1, 21)))
    chats = [[message("user", n), message("assistant", n)] for n in range(1, 41)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


MIXED = {
    "train_file": None,
    "dataset_mixture": [{"train_file": "{}/a.txt", "weight": 1}, {"train_file": "{}/b.jsonl", "weight": 2}],
}
CASES = {
    "texts": {"train_file": ["{}/a.txt", "{}/b.jsonl"]},
    "packed": {**CHAT, "packing": True, "block_size": 96},
    "grouped": {**CHAT, "train_sampling_strategy": "group_by_length"},
    "mixture": {**MIXED, "dataloader_drop_last": True},
}


@pytest.mark.parametrize("case", [pytest.param("texts", marks=pytest.mark.prove), *list(CASES)[1:]])
def test_rows_are_those_that_were_collated(
    data: Path, ranks: Ranks, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks are killed, and one goes on with other batches, as both of them; there are several epochs."""
    fields = json.loads(json.dumps(CASES[case]).replace("{}", str(data)))
    recipe = str(write_recipe(data, **RUN, **fields))
    environment = {"STEPMARK_CACHE": os.environ["STEPMARK_CACHE"]}
    first, second = data / "first", data / "second"
    first.mkdir()
    second.mkdir()
    killed = ranks.run(f"{HERE}:spied", ["train", recipe], str(first), 7, nproc=2, environment=environment)
    assert -signal.SIGKILL in killed.codes, killed.logs
    sizes = ["--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"]
    again = ["train", recipe, *sizes, "--resume_from_checkpoint", "true"]
    ranks.run(f"{HERE}:spied", again, str(second), None, environment=environment).check()

    seen = {place: batch for rank in (0, 1) for place, batch in batches(first, rank, 1, 1).items() if place[0] <= 6}
    seen |= {place: batch for place, batch in batches(second, 0, 2 * 2, 7).items() if place[0] <= RUN["max_steps"]}
    found = rows("out", capsys, "--step", f"1-{RUN['max_steps']}")
    named: dict[tuple[int, int, int], list[str]] = {place: [] for place in seen}
    for row in found["rows"]:
        named[row["step"], row["ranks"][0], row["micro_batch"]].append(re.sub(r"<\|\w+\|>", "", row["text"]))
    assert named == {place: [text_of(ids) for ids in batch] for place, batch in seen.items()}
    assert found["missing"] is None
    assert len({row["epoch"] for row in found["rows"]}) > 1
    chats = [row for row in found["rows"] if "messages_column" in fields]
    for row in chats:  # what is written in them names its row, and no other
        told = {int(name.rpartition(" ")[2]) for name in row["origin"]}
        assert told == {int(number) for number in re.findall(r"[a-z] (\d+);", row["text"])}
    if "mixture" in case:
        assert {(row["source"], *map(Path, row["origin"])) for row in found["rows"]} == {
            (1, Path(f"train_file {data}/a.txt")),
            (2, Path(f"train_file {data}/b.jsonl")),
        }
    one = [row for row in found["rows"] if row["step"] == 3 and row["ranks"] == [1]]
    assert rows("out", capsys, "--step", "3", "--rank", "1")["rows"] == one


def test_rows_of_a_run_from_python_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The callback ends the first epoch early."""
    strategies.run(tmp_path, EndsEpochs(2), max_steps=8)
    assert call(["rows", str(tmp_path), "--step", "2-3"]) == 0
    told = capsys.readouterr()
    first, second = (sample_order(strategies.SAMPLES, 42, epoch, True) for epoch in (0, 1))
    places = [(2, 0, first[2]), (2, 0, first[3]), (3, 1, second[0]), (3, 1, second[1])]
    lines = [f"step {step}, epoch {epoch}, rank 0, micro-batch 0: sample {sample}" for step, epoch, sample in places]
    assert told.out.splitlines() == lines
    assert "the run was started from Python, and" in told.err
    assert call(["rows", str(tmp_path), "--step", "9", "--json"]) == 0
    assert "the last step on record is 7" in capsys.readouterr().err


def test_what_has_no_rows_is_said(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies.run(data / "own", max_steps=1, train_sampling_strategy="group_by_length")
    for folder, options, said in (
        ("own", ["--step", "1"], "the order of the samples (grouped-1 shuffled-1) depends on the data; texts and"),
        ("own", ["--step", "0"], "should be a step from 1"),
        ("own", ["--step", "3-2"], "should be a step from 1"),
        ("own", ["--step", "1", "--rank", "1"], "--rank: step 1 has ranks 0 to 0, and no rank 1"),
        (".", ["--step", "1"], "is not a run's output_dir"),
    ):
        assert call(["rows", folder, *options]) == 2
        assert said in capsys.readouterr().err


def test_texts_of_data_that_have_changed_are_not_shown(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(data, train_file=str(data / "b.jsonl"), max_steps=1, disable_tqdm=True))
    assert call(["train", recipe]) == 0
    text = (data / "b.jsonl").read_text()
    (data / "b.jsonl").write_text(text.replace("number 9;", "number 0;"))
    found = rows("out", capsys, "--step", "1")
    assert ["text" in row for row in found["rows"]] == [False, False]
    assert found["missing"].endswith("used_recipe.yaml have changed since")
    (data / "b.jsonl").write_text(text)
    assert all(row["text"] for row in rows("out", capsys, "--step", "1")["rows"])


def test_what_a_recipe_names_is_used_where_code_is_trusted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"train_file": str(data / "b.jsonl"), "compile_cache": str(data / "graphs")}
    assert call(["train", str(write_recipe(data, max_steps=1, disable_tqdm=True, **fields))]) == 0
    for options, left_out in (([], True), (["--trust_remote_code"], False)):
        caplog.clear()
        assert call(["rows", "out", "--step", "1", *options]) == 0
        assert ("is left out; --trust_remote_code uses it" in caplog.text) == left_out
