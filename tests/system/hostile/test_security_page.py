"""Each promise of SECURITY.md has tests, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.hostile.commands import COMMANDS
from tests.system.hostile.inputs import INPUTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISES = re.findall(r"^- \*\*(.+?)\*\*", PAGE, re.MULTILINE)
MESSAGES, JOINING = "tests/liveness/test_messages.py", "tests/launch/test_joining.py"
TESTS: dict[str, tuple[str, ...]] = {  # an input of the table, or a test
    "Nothing of it runs.": ("pickle-of-the-model", "pickle-for-load", "pickle-of-dcp", "template-with-code"),
    "Consent is the caller's.": (
        "metrics-of-the-recipe",
        "metrics-of-the-manifest",
        "consent-of-the-recipe",
        "code-beside-the-model",
        "kernel-of-attn_implementation",
        "kernel-of-experts_implementation",
    ),
    "The current folder": (
        "metrics-below-the-folder",
        "tests/system/cli/test_cli.py::test_modules_of_the_current_folder_are_not_imported",
    ),
    "Nothing outside it is touched.": ("coordination-is-a-link", "model-staging-is-a-link", "a-tensor-file-is-a-link"),
    "Your own files in it stay.": (
        "own-hidden-files",
        "own-file-named-as-a-checkpoint",
        "own-folder-named-as-the-staging",
        "own-weights",
    ),
    "Nothing hangs or fills the memory.": (
        "manifest-is-a-pipe",
        "manifest-without-end",
        "header-as-large-as-the-manifest-says",
        "state-is-sparse",
        "config-that-is-nested",
        "width-of-10-to-the-9",
        "recipe-of-20-megabytes",
    ),
    "Nothing takes over the terminal.": ("escape-in-a-tensor", "escape-in-the-status", "escape-in-a-sample"),
    "An error is one line": ("tests/system/hostile/test_hostile.py::test_a_stranger_s_folder",),
    "Reports": ("escape-in-the-console", "tests/report/test_history.py::test_the_page_asks_for_nothing_from_elsewhere"),
    "Ranks tell each other plain values,": (
        f"{MESSAGES}::test_no_object_collective_and_no_pickle_is_left_between_ranks",
        f"{MESSAGES}::test_a_pickle_does_not_run",
        f"{JOINING}::test_what_a_stranger_answers_as_a_rank_does_not_run",
    ),
    "A secret": (
        f"{JOINING}::test_who_does_not_know_the_secret_does_not_join",
        f"{JOINING}::test_a_stranger_in_the_store_runs_nothing",
        "tests/launch/test_supervisor.py::test_ranks_of_a_supervisor_have_a_secret",
    ),
    "On one machine,": (f"{JOINING}::test_ranks_of_a_supervisor_listen_on_this_machine_alone",),
    "Shared nodes and networks.": (f"{JOINING}::test_a_stranger_in_the_store_runs_nothing",),
    "The hub.": ("tests/system/hostile/test_hostile.py::check_nothing_is_looked_up",),
}


def test_every_promise_has_tests() -> None:
    assert list(TESTS) == PROMISES


@pytest.mark.parametrize("promise", TESTS)
def test_the_tests_of_a_promise_exist(promise: str) -> None:
    inputs = {each.name for each in INPUTS}
    for name in TESTS[promise]:
        path, _, function = name.partition("::")
        assert name in inputs or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_every_command_that_the_page_lists_reads_forged_folders() -> None:
    listed = {name for row in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    tested = {words.split()[0] for words in COMMANDS.values()} - {"python"}
    assert {*listed, "plan", "doctor"} == tested
