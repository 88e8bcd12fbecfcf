"""Files of JSON, and of JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stepmark.filesystem import files, json_files
from stepmark.filesystem.json_files import append_line, read_lines, replace_json


def refuse(word: str) -> None:
    raise AssertionError(word)


def test_a_json_file_is_strict_and_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_json(path, {"a": math.inf, "b": [math.nan, {"c": -math.inf}], "d": 1.5})
    expected = {"a": None, "b": [None, {"c": None}], "d": 1.5}
    assert json.loads(path.read_text(), parse_constant=refuse) == expected
    assert list(tmp_path.iterdir()) == [path]

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_at", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_json(path, {})
    assert json.loads(path.read_text()) == expected


def test_lines_are_strict_json_and_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"loss": 1 / 3, "norms": {"a": [math.inf, -math.inf, 1.5]}, "word": "nan"})
    append_line(path, {"b": 2}, durable=True)
    first = json.loads(path.read_text().splitlines()[0], parse_constant=refuse)
    assert first == {"loss": 1 / 3, "norms": {"a": ["Infinity", "-Infinity", 1.5]}, "word": "nan"}
    assert read_lines(path) == [{"loss": 1 / 3, "norms": {"a": [math.inf, -math.inf, 1.5]}, "word": "nan"}, {"b": 2}]


@pytest.mark.parametrize("partial", ['{"step": 2, "lo', '{"step": 2}x', "\0\0\0"])
def test_a_partial_line_spoils_no_other(tmp_path: Path, partial: str) -> None:
    path = tmp_path / "lines"
    path.write_text('{"step": 1}\n' + partial)
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


def test_lines_that_are_not_objects_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'[1]\n"x"\n\xff\xfe\n{"a": 1}\nnull\n{"b"')
    assert read_lines(tmp_path / "lines") == [{"a": 1}]
    assert read_lines(tmp_path / "no file") == []


def test_lines_that_are_not_wanted_are_not_parsed_but_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(json.dumps({"odd" if step % 100 else "hundred": step}) + "\n" for step in range(20_000)))
    parsed = []
    parse = json_files.parse_json
    monkeypatch.setattr(json_files, "parse_json", lambda line: parsed.append(line) or parse(line))
    found = read_lines(path, lambda line: b"hundred" in line)
    assert sum(text.count(b": ") for text in parsed) == len(found) < 10_000
    assert [line["hundred"] for line in found if "hundred" in line] == list(range(0, 20_000, 100))
    assert [*found[-1000:]] == read_lines(path)[-1000:]
    assert len(read_lines(path)) == 20_000


@pytest.mark.parametrize(
    "values", [{"step": -1, "a": 1.5}, {"time": 1e300, "a": 2}, {"a": [1 << 70]}, {"\u00e9": 1, "b": True}]
)
def test_a_line_with_one_odd_field_is_read_as_before(tmp_path: Path, values: dict[str, object]) -> None:
    (tmp_path / "lines").write_text(json.dumps({**values, "loss": 0.5}) + "\n")
    kept = {
        name: [math.inf] if isinstance(value, list) else value
        for name, value in values.items()
        if name not in ("step", "time")
    }
    assert read_lines(tmp_path / "lines") == [{**kept, "loss": 0.5}]
