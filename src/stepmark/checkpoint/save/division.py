"""A save of ranks that see different folders: what is not in rank 0's goes to the run's bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import delete, remove_temporary
from stepmark.checkpoint.format.manifest import FileEntry, Manifest
from stepmark.checkpoint.save.plan import PlannedFile, SavePlan
from stepmark.liveness.failure_report import describe_error

logger = logging.getLogger("stepmark")


@dataclass(frozen=True)
class Division:
    """`folders[rank]` is the first rank that sees the same folder as a rank: it uploads what these ranks have written,
    by `upload(folder, manifest, entries)`. `downloaded` are checkpoints that are only there to be read."""

    folders: list[int]
    upload: Callable[[Path, Manifest, Sequence[FileEntry]], object]
    downloaded: set[Path]

    def files_of(self, plan: SavePlan, rank: int) -> dict[int, PlannedFile]:
        """By their index, the files that the folder of a rank holds."""
        own = self.folders[rank]
        return {index: file for index, file in enumerate(plan.files) if self.folders[file.finalizer] == own}

    def senders(self, plan: SavePlan) -> set[int]:
        """The ranks that upload."""
        return {self.folders[file.finalizer] for file in plan.files} - {0}

    def clear(self, temporary: Path) -> None:
        """Removes what the bucket has by now, and what was downloaded, as far as possible."""
        try:
            remove_temporary(temporary)
            while self.downloaded:
                if (path := self.downloaded.pop()).exists():
                    delete(path, temporary.name.rpartition(".")[2], unless=lambda: False)
        except OSError as error:  # the save is complete nevertheless
            logger.warning("cannot remove what the bucket has: %s", describe_error(error))
