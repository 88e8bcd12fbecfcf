"""Error messages of one line, for another rank or the user."""

from __future__ import annotations

from stepmark.errors import StepmarkError
from stepmark.filesystem.error_advice import with_advice


def late(what: str, timeout: float, setting: str = "save_timeout") -> str:
    """The message for something that has not happened within `timeout` seconds, which the user sets by `setting`."""
    return (
        f"{what} within {timeout:g} s ({setting}); look at what that rank's threads are doing, whose stacks are on its "
        f"standard error, or raise {setting}"
    )


def describe_error(error: BaseException) -> str:
    """The error's message; for an OSError the system's message, the file and what to do."""
    if isinstance(error, OSError) and error.strerror:
        return with_advice(f"{error.strerror}: {error.filename}" if error.filename else error.strerror, error)
    return f"{error}" if isinstance(error, StepmarkError) else f"{type(error).__name__}: {error}"
