"""What the doctor has found: one line each, with its status and, for a warning or failure, its remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Good, of no consequence or unknown; a risk; something that will make a run fail."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One line of the page, in the section `topic`. `text` says what was found, and with a warning or a failure also
    what to do; `values` are the same for machines."""

    topic: str
    name: str
    text: str
    status: Status = Status.OK
    values: dict[str, Any] = field(default_factory=dict)
