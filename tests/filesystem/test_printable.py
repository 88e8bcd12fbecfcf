"""What comes from a file of others reaches the terminal without escapes."""

from __future__ import annotations

import io
import logging

import pytest

from stepmark.filesystem.printable import PrintableOutput, printable, printable_record

TEXTS = {
    "plain words\twith\ttabs\nand lines": "plain words\twith\ttabs\nand lines",
    "größer 重み ✓": "größer 重み ✓",
    "\x1b]0;owned\x07\x1b[2J": "\\x1b]0;owned\\x07\\x1b[2J",
    "a\rb\x08c\x7f\x9b2J": "a\\rb\\x08c\\x7f\\x9b2J",
    "file\u202etxt.exe": "file\\u202etxt.exe",
    "\ud800": "\\ud800",
}


@pytest.mark.parametrize("text", TEXTS, ids=["plain", "letters", "escape", "control", "direction", "surrogate"])
def test_control_characters_are_shown_and_not_sent(text: str) -> None:
    assert printable(text) == TEXTS[text]
    PrintableOutput(stream := io.StringIO()).write(text)
    assert stream.getvalue() == TEXTS[text]


def test_a_logged_message_with_arguments() -> None:
    record = logging.LogRecord("stepmark", logging.WARNING, "", 0, "%s: %d %%", ("\x1b[2J", 3), None)
    assert printable_record(record)
    assert record.getMessage() == "\\x1b[2J: 3 %"


def test_the_stream_is_otherwise_as_it_was() -> None:
    stream = io.StringIO()
    shown = PrintableOutput(stream)
    print("words", file=shown, flush=True)
    assert shown.isatty() is False
    assert stream.getvalue() == "words\n"
