"""The line that an error is said to come from."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import DataError, MetricsError, UsageError
from stepmark.evaluation.metric_functions import load_function
from stepmark.filesystem.error_advice import causes
from stepmark.filesystem.json_files import read_lines
from stepmark.liveness.failure_report import MOST_KEPT, FailureReport, keep_failure, raised_at

HERE = Path(__file__).name


def caught(function: Any, *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError


class Reads:
    """Stands for a user's object that Stepmark calls."""

    def __init__(self, use: Any) -> None:
        self.use = use

    def __fspath__(self) -> Any:
        return self.use()


def called_by_package(use: Any) -> FailureReport:
    return FailureReport.of(caught(read_lines, Reads(use)), 0)


def fails() -> None:
    raise KeyError("absent")


def fails_in_json() -> None:
    json.loads("{")


def fails_in_torch() -> None:
    torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(2, 2))


def fails_in_package() -> None:
    load_function("nothing", "metrics")


def fails_with_cause() -> None:
    try:
        fails()
    except KeyError as error:
        raise DataError("data are bad") from error


@pytest.mark.parametrize(
    ("use", "function"),
    [
        (fails, "fails"),
        (fails_in_json, "fails_in_json"),
        (fails_in_torch, "fails_in_torch"),
        (fails_in_package, "fails_in_package"),
        (fails_with_cause, "fails"),
    ],
)
def test_the_last_line_of_the_users_is_named(use: Any, function: str) -> None:
    line = next(frame for frame in traceback.extract_tb(caught(use).__traceback__) if frame.name == use.__name__)
    message = called_by_package(use).message
    assert HERE in message
    assert message.endswith(f", in {function})")
    if function == use.__name__:
        assert f"line {line.lineno}," in message


def test_a_token_beyond_the_vocabulary_is_explained() -> None:
    assert "vocab_size" in called_by_package(fails_in_torch).message


def test_an_error_of_this_package_names_no_line_of_the_script_that_called_it() -> None:
    """Its message is complete."""
    found = FailureReport.of(caught(load_function, "nothing", "metrics"), 0)
    assert isinstance(caught(load_function, "nothing", "metrics"), UsageError)
    assert HERE not in found.message


def test_an_error_without_a_line_of_the_users_names_one_of_the_package() -> None:
    found = FailureReport.of(caught(read_lines, None), 0)
    assert found.message.endswith(", in open_for_reading)")


class Rows:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"row {index} is bad")


def test_a_data_workers_error_names_the_line_in_the_worker() -> None:
    loader = DataLoader(Rows(), num_workers=1)  # type: ignore[arg-type]
    message = FailureReport.of(caught(list, loader), 0).message
    assert "row 0 is bad" in message
    assert "DataLoader worker" in message
    assert message.endswith(", in __getitem__)")
    assert HERE in message
    assert "Traceback" not in message


def test_a_metrics_functions_own_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics_of_test.py").write_text("def bad(prediction):\n    return prediction.nothing\n")
    monkeypatch.chdir(tmp_path)
    error = caught(load_function("own_metrics_of_test:bad", "metrics"), 3)
    assert isinstance(error, MetricsError)
    assert FailureReport.of(error, 0).message.endswith("(own_metrics_of_test.py, line 2, in bad)")


def test_tracebacks_are_kept_once_each_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "failures" / "rank-3.txt"
    error = caught(fails)
    for _ in range(2):
        keep_failure(tmp_path, error, 3)
    assert path.read_text().count("\nKeyError: 'absent'") == 1
    for _ in range(5):
        keep_failure(tmp_path, ValueError("x" * MOST_KEPT), 3)
    assert path.stat().st_size < 4 * MOST_KEPT
    (tmp_path / "other").mkdir()
    keep_failure(tmp_path / "other", UsageError("a: is wrong"), 0)
    assert not list((tmp_path / "other").iterdir())


def test_what_dataclasses_generate_is_no_line_of_the_user() -> None:
    with pytest.raises(UsageError) as caught:
        TrainingFields(step_timeout="soon")
    assert "<string>" not in str(raised_at(caught.value, known=True))


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("no")
    error.__cause__ = error
    assert causes(error) == [error]
    assert raised_at(error, known=True) is None
