"""Texts of one split, whatever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from stepmark.errors import DataError


@dataclass(frozen=True)
class Texts:
    """The pieces of text of one split, in order.

    `read` gives them from the beginning each time it is called; None and "" are pieces without text. Where
    `continuous`, the pieces follow each other within one document (the lines of a text file), else each is a document.
    `content` changes when the texts do. `where` names the source in messages.
    """

    where: str
    content: str
    read: Callable[[], Iterator[str | None]]
    continuous: bool = False

    def split(self, percentage: int) -> tuple[Texts, Texts]:
        """Training and validation texts: the first `percentage` percent of the pieces, one at least, are validation.

        Raises DataError where nothing would be left to train on.
        """
        count = sum(1 for _ in self.read())
        cut = max(1, count * percentage // 100)
        if cut >= count:
            unit = "line" if self.continuous else "document"
            raise DataError(
                f"{self.where}: {count} {unit}{'' if count == 1 else 's'} cannot be split into training and validation;"
                " give validation_file, or validation_split_percentage: 0"
            )
        return (
            Texts(self.where, f"{self.content}[{cut}:]", lambda: islice(self.read(), cut, None), self.continuous),
            Texts(self.where, f"{self.content}[:{cut}]", lambda: islice(self.read(), cut), self.continuous),
        )
