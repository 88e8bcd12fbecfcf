"""The texts of one split, from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from stepmark.errors import DataError


@dataclass(frozen=True)
class Texts:
    """The text segments of one split, in order.

    `read` starts from the beginning each time it is called; None and "" are segments without text. If `continuous`, the
    segments are parts of one document (the lines of a text file), else each is a document. `content` identifies the
    texts: it changes when they do. `where` names the source in messages.
    """

    where: str
    content: str
    read: Callable[[], Iterator[str | None]]
    continuous: bool = False

    def split(self, percentage: int) -> tuple[Texts, Texts]:
        """Training and validation texts: the first `percentage` percent of the segments, at least one, are validation.

        Raises DataError if no training text would remain.
        """
        count = sum(1 for _ in self.read())
        held_out = max(1, count * percentage // 100)
        if held_out >= count:
            unit = "line" if self.continuous else "document"
            raise DataError(
                f"{self.where}: {count} {unit}{'' if count == 1 else 's'} cannot be split into training and validation;"
                " give validation_file, or validation_split_percentage: 0"
            )
        return (
            Texts(
                self.where, f"{self.content}[{held_out}:]", lambda: islice(self.read(), held_out, None), self.continuous
            ),
            Texts(self.where, f"{self.content}[:{held_out}]", lambda: islice(self.read(), held_out), self.continuous),
        )
