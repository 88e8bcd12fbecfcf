"""The contents of a disk after a power failure: everything that was synced, and a random part of the rest.

A model of a file system. `Faults` (faults.py) reports every change to it, in order: a file's bytes are safe once
the file is synced, a folder's entries once the folder is; entries that are not become so in the order they were made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class File:
    """`durable` are the bytes at the last sync."""

    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    """Entries as a program sees them, those on the disk, and the changes in between."""

    live: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder]] = field(default_factory=list)

    def changed(self) -> None:
        self.pending.append(dict(self.live))

    def sync(self) -> None:
        self.durable, self.pending = dict(self.live), []


class Disk:
    """The model, beginning with what lies in the folder `root` now, all of it synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _existing(root)

    def apply(self, record: tuple[Any, ...]) -> None:
        """One change, as `Faults` has noted it."""
        kind, *arguments = record
        handler: Callable[..., None] = getattr(self, f"_{kind}")
        handler(*arguments)

    def image(self, target: Path, generator: random.Random, *, worst: bool) -> None:
        """Writes the disk's contents to `target`. `worst`: only what was synced."""
        self._build(self.top, self.root, target, generator, worst)

    def _folder(self, path: str) -> Folder:
        node = self.top
        for part in Path(path).relative_to(self.root).parts:
            child = node.live[part]
            assert isinstance(child, Folder)
            node = child
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        return self._folder(str(Path(path).parent)), Path(path).name

    def _create(self, path: str) -> None:
        folder, name = self._parent(path)
        if name not in folder.live:
            folder.live[name] = File()
            folder.changed()

    def _mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.live[name] = Folder()
        folder.changed()

    def _remove(self, path: str) -> None:
        folder, name = self._parent(path)
        del folder.live[name]
        folder.changed()

    def _rename(self, source: str, target: str) -> None:
        (one, old), (other, new) = self._parent(source), self._parent(target)
        assert one is other, "the engine renames within one folder"
        one.live[new] = one.live.pop(old)
        one.changed()

    def _exchange(self, source: str, target: str) -> None:
        (one, old), (other, new) = self._parent(source), self._parent(target)
        assert one is other
        one.live[old], one.live[new] = one.live[new], one.live[old]
        one.changed()

    def _sync(self, path: str, data: bytes) -> None:
        folder, name = self._parent(path)
        if name not in folder.live:  # made by another process
            self._create(path)
        node = folder.live[name]
        assert isinstance(node, File)
        node.durable = data

    def _sync_folder(self, path: str) -> None:
        self._folder(path).sync()

    def _build(self, node: Folder, here: Path | None, target: Path, generator: random.Random, worst: bool) -> None:
        """`here`: where the folder's live entries are, None where it has lost its name."""
        target.mkdir()
        states = [node.durable, *node.pending]
        entries = states[0] if worst else generator.choice(states)
        for name, child in entries.items():
            place = None if here is None else next((here / n for n, c in node.live.items() if c is child), None)
            if isinstance(child, Folder):
                self._build(child, place, target / name, generator, worst)
            else:
                (target / name).write_bytes(_contents(child, place, generator, worst))


def _contents(file: File, place: Path | None, generator: random.Random, worst: bool) -> bytes:
    live = place.read_bytes() if place is not None and place.is_file() else file.durable
    if worst or live == file.durable:
        return file.durable
    cut = generator.randrange(len(live) + 1)
    return generator.choice([file.durable, live, live[:cut], bytes(len(live)), live[:cut] + bytes(len(live) - cut)])


def _existing(path: Path) -> Folder:
    folder = Folder()
    for child in path.iterdir():
        folder.live[child.name] = _existing(child) if child.is_dir() else File(child.read_bytes())
    folder.sync()
    return folder
