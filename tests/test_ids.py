"""Names of tests are words, the same in every process: pytest-xdist stops where its workers collect other names."""

from __future__ import annotations

import re

import pytest

from tests.support.parameter_ids import parameter_id

BYTES_OR_ADDRESS = re.compile(r"\\x[89a-f][0-9a-f]|\bat 0x|0x[0-9a-f]{8,}")


def test_names_hold_neither_bytes_nor_addresses(request: pytest.FixtureRequest) -> None:
    wrong = [item.nodeid for item in request.session.items if BYTES_OR_ADDRESS.search(item.nodeid)]
    assert wrong == []


@pytest.mark.parametrize("value", [b"", b"\x1f\x8b", [b"\0", 1], {"key": b"a"}])
def test_bytes_are_named_by_a_word(value: object) -> None:
    assert "bytes" in (parameter_id(value) or "")
