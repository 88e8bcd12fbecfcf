"""The history of logs in trainer_state.json: it is what a plain list would be, and no save encodes it again."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from stepmark.trainer.run_folder import log_history
from stepmark.trainer.run_folder.log_history import LogHistory, encode_state, pack, read_state
from tests.trainer.compat.test_strategies import steps, trainer

BLOCK, FEW = 16, 4
LOGS = (FEW + 3) * BLOCK + 5
Logs = list[Any]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_history, "BLOCK", BLOCK)
    monkeypatch.setattr(log_history, "FEW", FEW)


def log_of(step: int) -> dict[str, Any]:
    return {"epoch": step / 7, "loss": 1 / (step + 3), "step": step}


def usual(state: TrainerState) -> bytes:
    """What transformers writes for the state."""
    return (
        json.dumps({**asdict(state), "log_history": list(state.log_history)}, indent=2, sort_keys=True) + "\n"
    ).encode()


def logged(count: int = LOGS) -> TrainerState:
    """The state of a run that has logged so often."""
    state = TrainerState(global_step=count, stateful_callbacks={"Own": {"attributes": {"log_history": []}}})
    for step in range(count):
        state.log_history.append(log_of(step))
        pack(state)
    return state


def written(state: TrainerState) -> bytes:
    return b"".join(encode_state(state))


CHANGES: dict[str, Callable[[Logs], Any]] = {
    "nothing": lambda logs: None,
    "append": lambda logs: logs.append({"mine": 1}),
    "extend": lambda logs: logs.extend([{"mine": 1}, {"mine": 2}] * BLOCK),
    "add in place": lambda logs: logs.__iadd__([{"mine": 1}]),
    "edit the last": lambda logs: logs[-1].update(mine=0.5),
    "edit an old one": lambda logs: logs[3].update(loss=-0.0),
    "edit all": lambda logs: [log.update(step=True) for log in logs],
    "edit a slice": lambda logs: [log.pop("loss") for log in logs[2 : LOGS - 2 : 5]],
    "edit backwards": lambda logs: next(reversed(logs)).clear(),
    "assign": lambda logs: logs.__setitem__(1, {"other": None}),
    "assign a slice": lambda logs: logs.__setitem__(slice(1, 9), [{"other": [1, 2]}]),
    "delete": lambda logs: logs.__delitem__(-2),
    "delete a slice": lambda logs: logs.__delitem__(slice(None, None, 2)),
    "insert": lambda logs: logs.insert(0, {"first": 1}),
    "pop": lambda logs: logs.pop(),
    "remove": lambda logs: logs.remove(log_of(7)),
    "reverse": lambda logs: logs.reverse(),
    "sort": lambda logs: logs.sort(key=lambda log: log["loss"]),
    "clear": lambda logs: logs.clear(),
    "not finite": lambda logs: logs.append({"a": math.nan, "b": math.inf, "c": -math.inf}),
    "nested": lambda logs: logs.append({"a": {"b": [1, {"c": []}], "d": {}}, "e": (1, None), "f": []}),
    "no dict": lambda logs: logs.extend(["text,\n    {", 5, None, {}, [], [{}]] * BLOCK),
    "numbers as keys": lambda logs: logs.append({3: 1, 5: 2}),
    "numpy": lambda logs: logs.extend([{"a": numpy.float64(0.1)}] * 2 * BLOCK),
    "text": lambda logs: logs.append({"é\n": '",\n    {"\ud800', "\n  ],\n": '\n  "log_history": ['}),
    "huge": lambda logs: logs.append({"a": 1 << 200, "b": 1e308}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_file_has_what_a_program_does_to_the_list(tmp_path: Path, name: str) -> None:
    expected = [log_of(step) for step in range(LOGS)]
    state = logged()
    for _ in range(2):  # before and after it was written, and read
        CHANGES[name](expected)
        CHANGES[name](state.log_history)
        assert len(state.log_history) == len(expected)
        assert bool(state.log_history) == bool(expected)
        plain = copy.copy(state)
        plain.log_history = expected
        assert written(state) == usual(plain) == written(state)
        for step in range(LOGS, LOGS + 3 * BLOCK):
            expected.append(log_of(step))
            state.log_history.append(log_of(step))
            pack(state)
        assert written(state) == usual(plain)
        path = tmp_path / "trainer_state.json"
        path.write_bytes(written(state))
        state, loaded = read_state(path), TrainerState.load_from_json(str(path))
        assert repr(state) == repr(loaded)
        assert written(state) == usual(loaded)
        expected = loaded.log_history
        if name in ("edit all", "edit backwards", "sort", "edit a slice", "no dict", "remove"):
            return  # what they need is gone


def test_what_a_program_holds_it_can_change_at_any_time() -> None:
    state = logged()
    held, nested = state.log_history[5], {"inner": {"a": 1}}
    state.log_history.append(nested)
    inner = nested["inner"]
    del nested
    for step in range(4 * BLOCK):
        state.log_history.append(log_of(step))
        pack(state)
    written(state)
    for _ in state.log_history:  # opens and closes all blocks
        pass
    written(state)
    held["late"], inner["late"] = 1, 2
    assert state.log_history[5] is held
    assert state.log_history[LOGS] == {"inner": {"a": 1, "late": 2}}
    found = json.loads(written(state))["log_history"]
    assert found[5] == {**log_of(5), "late": 1}
    assert found[LOGS] == {"inner": {"a": 1, "late": 2}}


def test_a_list_that_a_program_has_kept_stays_its_own() -> None:
    state, own = logged(), [{"mine": 1}]
    state.log_history = own
    pack(state)
    assert state.log_history is own
    own.append({"mine": 2})
    assert json.loads(written(state))["log_history"] == own
    del own
    pack(state)
    assert isinstance(state.log_history, LogHistory)
    assert len(state.log_history) == 2


def test_it_is_a_list() -> None:
    logs, plain = logged().log_history, [log_of(step) for step in range(LOGS)]
    assert isinstance(logs, LogHistory)
    assert isinstance(logs, list)
    assert logs == plain
    assert plain == logs
    assert logs == logged().log_history
    assert (logs != plain) is False
    assert [*logs] == list(logs) == sorted(logs, key=lambda log: log["step"]) == logs.copy() == logs[:] == plain
    assert logs + [1] == plain + [1]
    assert [1] + logs == [1] + plain
    assert logs * 2 == 2 * logs == plain * 2
    assert plain[9] in logs
    assert logs.index(plain[9]) == 9
    assert logs.count(plain[9]) == 1
    assert list(reversed(logs)) == plain[::-1]
    assert repr(logs) == repr(plain)
    assert json.dumps(logs) == json.dumps(plain)
    for again in (copy.copy(logs), copy.deepcopy(logs), pickle.loads(pickle.dumps(logs))):
        assert type(again) is list
        assert again == plain
    for index in (LOGS, -LOGS - 1):
        with pytest.raises(IndexError):
            logs[index]
    assert logs[-LOGS] == plain[0]
    assert logs[True] == plain[1]
    with pytest.raises(TypeError):
        logs["1"]


def test_random_changes_end_as_in_a_list() -> None:
    rng, state, plain = random.Random(0), logged(), [log_of(step) for step in range(LOGS)]
    for number in range(600):
        at = rng.randrange(-len(plain), len(plain))
        for logs in (state.log_history, plain):
            match number % 5:
                case 0:
                    logs[at]["edited"] = number
                case 1:
                    logs[at] = {"new": number}
                case 2 if number % 25 == 2:
                    del logs[at]
                case 3:
                    logs.append({"new": number})
        pack(state)
        if number % 20 == 0:
            assert json.loads(written(state))["log_history"] == plain
    assert state.log_history == plain


@pytest.mark.parametrize("value", [object(), {1, 2}, numpy.float32(1)])
def test_what_json_cannot_hold_is_told_at_the_save(value: object) -> None:
    state = logged()
    state.log_history[3]["bad"] = value
    for step in range(3 * BLOCK):
        state.log_history.append({"bad": value, "step": step})
        pack(state)
    with pytest.raises(TypeError, match="not JSON serializable"):
        written(state)
    assert state.log_history[3]["bad"] is value


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"indent": 4}, {"indent": 2}])
def test_files_of_others_are_read(tmp_path: Path, layout: dict[str, int]) -> None:
    state = logged()
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({**asdict(state), "log_history": list(state.log_history)}, **layout))  # type: ignore[arg-type]
    assert read_state(path) == TrainerState.load_from_json(str(path)) == state


def test_a_save_encodes_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    text = log_history._text
    monkeypatch.setattr(log_history, "_text", lambda log: encoded.append(log) or text(log))

    def encodings(use: Callable[[], object]) -> int:
        encoded.clear()
        use()
        return len(encoded)

    state = logged()
    assert len(encoded) == LOGS
    assert encodings(lambda: written(state)) == 0
    assert encodings(lambda: [log for log in state.log_history if "eval_loss" in log]) == 0
    assert encodings(lambda: written(state)) == 0
    state.log_history[4]["edited"] = 1
    assert encodings(lambda: written(state)) == BLOCK
    state.log_history[-1]["edited"] = 1
    assert encodings(lambda: written(state)) == 1
    path = tmp_path / "trainer_state.json"
    path.write_bytes(written(state))
    state = read_state(path)
    assert encodings(lambda: written(state)) == 0


def test_the_content_is_that_of_the_call() -> None:
    state = logged()
    expected, pieces = usual(state), encode_state(state)
    for log in state.log_history:
        log["later"] = 1
    state.log_history.clear()
    state.best_metric = 5.0
    assert b"".join(pieces) == expected


class Saves(TrainerCallback):
    """Does with the history what programs do, and counts what each save encodes."""

    def __init__(self, encoded: list[Any]) -> None:
        self.encoded, self.counts = encoded, list[int]()

    def on_log(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        state.log_history[-1]["mine"] = state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        assert [log["step"] for log in state.log_history if "loss" in log] == list(range(1, state.global_step))

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.counts.append(len(self.encoded))
        self.encoded.clear()


def test_a_run_that_saves_every_step_encodes_each_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, text = set(), log_history._text
    encoded: list[Any] = []
    monkeypatch.setattr(log_history, "_text", lambda log: encoded.append(log) or text(log))
    monkeypatch.setattr(log_history, "BLOCK", 4)
    decompress = log_history.zlib.decompress

    class Zlib:
        compress = log_history.zlib.compress

        @staticmethod
        def decompress(data: bytes) -> bytes:
            threads.add(threading.current_thread().name)
            return decompress(data)

    options = {**steps("logging", 1), **steps("save", 1), **steps("eval", 6)}
    saves = Saves(encoded)
    made, _ = trainer(tmp_path, saves, **options)
    monkeypatch.setattr(log_history, "zlib", Zlib)
    made.train()
    assert saves.counts == [2 if number % 6 == 0 else 1 for number in range(1, 13)]
    path = tmp_path / "checkpoint-12" / "trainer_state.json"
    found, now = TrainerState.load_from_json(str(path)), list(made.state.log_history)
    assert found.log_history == now[: len(found.log_history)]
    assert [log["mine"] for log in found.log_history] == [log["step"] for log in found.log_history]
    assert path.read_bytes() == usual(found)
    assert "stepmark-save" in threads

    again, _ = trainer(tmp_path, max_steps=14, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert list(again.state.log_history)[: len(found.log_history)] == found.log_history
