"""Finds the line that an error came from: in the user's code, rather than in this package or a library."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

from stepmark.filesystem.error_advice import causes

_PACKAGE = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SITE = re.compile(r".*/(?:site|dist)-packages/")
_TYPED = ("<stdin>", "<string>", "<ipython")  # code without a file that a user has written
_TOLD = re.compile(r'^\s+File "(.+)", line (\d+), in (.+)$')


class Line(NamedTuple):
    """A line of a traceback."""

    file: str
    line: int
    function: str

    @property
    def of_package(self) -> bool:
        return self.file.startswith(f"{_PACKAGE}/")

    @property
    def of_library(self) -> bool:
        made = self.function.startswith("__")  # by dataclasses, whose generated code is named <string> too
        unwritten = self.file.startswith("<") and (made or not self.file.startswith(_TYPED))
        return unwritten or self.file.startswith(_INSTALLED) or _SITE.match(self.file) is not None

    @property
    def of_torch(self) -> bool:
        """Or of Python itself."""
        return "/site-packages/torch/" in self.file or not _SITE.match(self.file)

    def __str__(self) -> str:
        file = Path(_SITE.sub("", self.file))
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        return f"{shown}, line {self.line}, in {self.function}"


def raised_at(error: BaseException, *, known: bool) -> Line | None:
    """The line that the error came from: the last line of the user's code that this package has called, directly or
    through a library. If there is none: None for errors whose message is meant for users (`known`); for others the last
    line outside of this package and torch, or outside of this package, or in it."""
    error = causes(error)[-1]
    lines = _told(error) or [Line(*frame[:3]) for frame in traceback.extract_tb(error.__traceback__)]
    first = next((index for index, line in enumerate(lines) if line.of_package), 0)
    called = [line for line in lines[first:] if not line.of_package]
    kinds = [[line for line in called if not line.of_library]]
    kinds += [] if known else [[line for line in called if not line.of_torch], called, lines]
    return next((found[-1] for found in kinds if found), None)


def _told(error: BaseException) -> list[Line]:
    """The lines of the traceback that an error of a data worker contains as text: the first traceback, which is the
    cause of the others."""
    found: list[Line] = []
    for text in "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines():
        match = _TOLD.match(text)
        if match is not None:
            found.append(Line(match[1], int(match[2]), match[3]))
        elif found and not text.startswith(" "):
            break
    return found
