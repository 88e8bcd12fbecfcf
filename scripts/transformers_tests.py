"""Runs tests/trainer of a transformers checkout with Stepmark's Trainer and TrainingArguments in place of its own.

    python scripts/transformers_tests.py CHECKOUT [--theirs] [--results FILE] [pytest arguments]

The checkout's tests need accelerate, evaluate, scikit-learn, scipy, parameterized, pytest and pytest-timeout, and the
small models of the hub that they name. They run on the CPU, in an environment without torch_xla, with the installed
transformers. With --theirs its classes stay, which shows what passes at all. --results gets one line of JSON for each
test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RESULTS, MODE = "STEPMARK_TESTS_RESULTS", "STEPMARK_TESTS_MODE"
OURS, THEIRS = "ours", "theirs"
CLASSES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")
MODULES = ("transformers", *(f"transformers.{name}" for name in (
    "trainer", "training_args", "trainer_seq2seq", "training_args_seq2seq",
)))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--results", type=Path, default=None)
    arguments, others = parser.parse_known_args()
    folder = arguments.checkout.absolute()
    if not (folder / "tests" / "trainer").is_dir():
        parser.error(f"{folder} has no tests/trainer; name a checkout of transformers")
    with tempfile.TemporaryDirectory() as work:
        results = (arguments.results or Path(work) / "results.jsonl").absolute()
        results.unlink(missing_ok=True)
        environment = {
            **os.environ,
            RESULTS: str(results),
            MODE: THEIRS if arguments.theirs else OURS,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(folder), *sys.path[1:]]),
            "CUDA_VISIBLE_DEVICES": "",
            "TRANSFORMERS_TEST_DEVICE": "cpu",
            "USE_TORCH_XLA": "0",
        }
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", "--tb=short", "--timeout=120"]
        command += ["-o", "addopts=", "--rootdir", str(folder), *(others or [str(folder / "tests" / "trainer")])]
        code = subprocess.run(command, cwd=work, env=environment).returncode
        if results.exists():
            print(summary([json.loads(line) for line in results.read_text().splitlines()]))
    return code


def summary(rows: list[dict[str, Any]]) -> str:
    """The number of each outcome, and every failure with its reason."""
    outcomes = [row["outcome"] for row in rows]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped"))
    failures = [f"{row['test']}: {row['reason']}" for row in rows if row["outcome"] == "failed"]
    return "\n".join([counts, *failures])


# As a plugin of pytest


def _replace_classes() -> None:
    import importlib

    import stepmark

    importlib.import_module("transformers.testing_utils")  # executes transformers/__init__.py once more
    modules = [importlib.import_module(name) for name in MODULES]
    for name in CLASSES:
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, getattr(stepmark, name))


def pytest_configure() -> None:
    if os.environ.get(MODE) == OURS:
        _replace_classes()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if RESULTS not in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    error = call.excinfo
    reason = "" if error is None else f"{error.typename}: {' '.join(str(error.value).split())[:200]}"
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": item.nodeid, "outcome": report.outcome, "reason": reason}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
