"""Sizes that are told apart where they differ, and what to do about errors of the file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepmark.errors import StepmarkError
from stepmark.filesystem import files
from stepmark.filesystem.sizes import distinct_sizes, size
from stepmark.liveness.failure_report import FailureReport, describe_error


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (20_123_456, "20.1 MB"), (1_250_000_000, "1.25 GB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_sizes_that_differ_look_different() -> None:
    assert distinct_sizes(20_100_000, 15_000_000) == ("20.1 MB", "15 MB")
    assert distinct_sizes(20_123_456, 20_123_400) == ("20,123,456 bytes", "20,123,400 bytes")
    assert distinct_sizes(5, 5) == ("5 bytes", "5 bytes")


def full() -> OSError:
    """What the system raises where the disk is full."""
    descriptor = files.open_for_writing(Path("/dev/full"))
    try:
        files.write_at(descriptor, memoryview(b"x"), 0)
    except OSError as error:
        return error
    finally:
        files.close(descriptor)
    raise AssertionError


def test_a_full_disk_is_named_with_its_file_and_what_to_do() -> None:
    said = "No space left on device: /dev/full; free some space there, or use another folder"
    assert describe_error(full()) == said
    message = FailureReport.of(full(), 0).message
    assert message.startswith("OSError: [Errno 28] No space left on device: '/dev/full'; free some space there")


def test_advice_is_given_once() -> None:
    error = StepmarkError("/x: No space left on device (os error 28); free some space there, or use another folder")
    assert FailureReport.of(error, 0).message == str(error)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_errors_with_advice(number: int) -> None:
    error = OSError(number, os.strerror(number), "/x")
    assert describe_error(error).startswith(f"{os.strerror(number)}: /x; ")


def test_an_error_without_advice_is_as_it_was() -> None:
    assert describe_error(OSError(errno.EPERM, "Operation not permitted", "/x")) == "Operation not permitted: /x"
