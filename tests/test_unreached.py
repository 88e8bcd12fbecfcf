"""Tests of CI reach every public name, command and option, but for those that scripts/unreached.py explains."""

from __future__ import annotations

import ast
from fnmatch import filter as matching

from scripts.unreached import REASONS, Uses, unreached


def test_what_no_test_reaches_is_explained() -> None:
    """And each reason is still needed."""
    left = list(unreached())
    explained = {pattern: matching(left, pattern) for pattern in REASONS}
    assert [each for each in left if not any(each in found for found in explained.values())] == []
    assert [pattern for pattern, found in explained.items() if not found] == []


def test_what_a_file_names() -> None:
    program = "import stepmark.trl as ours\nfrom stepmark.parallel import parallelize\nours.SFTConfig\nx.evaluate()"
    uses = Uses(
        [*ast.walk(ast.parse(f"{program}\nrun(['rows', '--step=3'])\nranks.run('tests.support.programs:train')"))]
    )
    assert {"trl.SFTConfig", ".parallelize", "any.evaluate"} <= uses.names
    assert "trl.SFTTrainer" not in uses.names
    assert "rows" in uses.commands
    assert "--step" in uses.words
    assert "tests.support.programs" in uses.modules
    assert ".parallelize" in Uses([*ast.walk(ast.parse(f"PROGRAM = {program!r}"))]).names
