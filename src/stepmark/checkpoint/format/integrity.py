"""Integrity checks of a checkpoint that do not read the tensors' bytes.

Everything here raises CheckpointDamaged for files that are missing or wrong, and a plain CheckpointError where a file
cannot be read at the moment, which does not mean corruption.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.checkpoint.format.checksums import bytes_checksum
from stepmark.checkpoint.format.manifest import MANIFEST, VALUES, FileEntry, Manifest, read_manifest
from stepmark.checkpoint.format.read_errors import FileIncomplete, read_errors_of, well_formed
from stepmark.checkpoint.format.tensor_file import Header, parse_header
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem.files import LARGEST, file_checksum, read_file, regular_file_size
from stepmark.filesystem.json_files import parse_json

_MODEL_FILE = re.compile(r"model.*\.(safetensors|index\.json)\Z")


def check_integrity(folder: Path, manifest: Manifest, largest: float = math.inf) -> dict[str, Header]:
    """Checks that every file exists with its size, and the checksums of headers and of files without tensors that have
    at most `largest` bytes; returns the headers by file name.

    Raises CheckpointDamaged, naming the first file that is missing or corrupted.
    """
    check_name(folder, manifest)
    headers = {}
    for entry in manifest.files:
        if entry.header is None:
            (check_file if entry.size <= largest else check_size)(folder, entry)
        else:
            headers[entry.name] = read_header(folder, manifest, entry)
    for name in foreign_model_files(folder, manifest):
        raise CheckpointDamaged(f"{folder / name} does not belong to this checkpoint; move it away")
    return headers


def what_is_wrong(folder: Path) -> str | None:
    """Why `check_integrity` finds a checkpoint corrupted; None where it does not."""
    try:
        check_integrity(folder, read_manifest(folder))
    except CheckpointDamaged as error:
        return str(error)
    return None


def check_name(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointDamaged where a folder with a checkpoint's name holds another step: a copy under that name."""
    step = step_of(folder)
    if step is not None and step != manifest.step:
        why = f"{folder / MANIFEST} is of step {manifest.step}: the folder was copied or renamed; give it another name"
        raise CheckpointDamaged(why)


def foreign_model_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files that the manifest does not list but other programs would read as the model or part of it.

    Any other extra file, such as an adapter that a callback saves there, is harmless.
    """
    known = {entry.name for entry in manifest.files}
    with read_errors_of(folder):
        return sorted(name for name in os.listdir(folder) if _MODEL_FILE.match(name) and name not in known)


def check_size(folder: Path, entry: FileEntry) -> Path:
    """The file's path. Raises CheckpointDamaged where it is missing or has another size."""
    path = folder / entry.name
    with read_errors_of(path):
        size = regular_file_size(path)
    if size is None or not path.resolve().is_relative_to(folder.resolve()):  # a link may lead anywhere
        raise FileIncomplete(f"{path} is missing")
    hollow = size > LARGEST and os.stat(path).st_blocks * 512 < size // 16 and entry.header is None
    if (entry.name == VALUES and size > LARGEST) or hollow:  # a save writes every byte
        raise CheckpointDamaged(f"{path} has {size} bytes, most of which nobody has written")
    if size != entry.size:
        raise FileIncomplete(f"{path} has {size} bytes instead of {entry.size}")
    return path


def check_file(folder: Path, entry: FileEntry) -> None:
    """Checks a file without tensors, all of it. Raises CheckpointDamaged."""
    path = check_size(folder, entry)
    with read_errors_of(path):
        _, digest = file_checksum(path)
    if digest != entry.digest:
        raise CheckpointDamaged(f"{path} does not match its checksum")


def checked_header(data: bytes, manifest: Manifest, entry: FileEntry, where: object) -> Header:
    """The header in a file's first bytes. Raises CheckpointDamaged, after `where`, if it is not the manifest's."""
    if bytes_checksum(data) != entry.digest:
        raise CheckpointDamaged(f"{where}: its header does not match its checksum")
    try:
        header = parse_header(data, entry.size)
    except CheckpointError as error:  # the manifest, which has been read, knows all its types
        raise CheckpointDamaged(f"{where}: {error}") from error
    if (header.step, header.save) != (manifest.step, manifest.save):
        raise CheckpointDamaged(f"{where} was written by another save, of step {header.step}")
    return header


def read_header(folder: Path, manifest: Manifest, entry: FileEntry) -> Header:
    """A tensor file's header, checked against the manifest. Raises CheckpointDamaged, naming the file."""
    path = check_size(folder, entry)
    if entry.header is None:
        raise CheckpointDamaged(f"{path} is listed without a header, and is needed as a tensor file")
    with read_errors_of(path), path.open("rb") as file:  # continues a short read
        return checked_header(file.read(entry.header), manifest, entry, path)


def read_values(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The sections' encoded values. Raises CheckpointDamaged."""
    entry = manifest.file(VALUES)
    if entry is None:
        raise CheckpointDamaged(f"{folder}: the manifest lists no {VALUES}")
    path = check_size(folder, entry)
    with read_errors_of(path):
        data = read_file(path)
    if bytes_checksum(data) != entry.digest:
        raise CheckpointDamaged(f"{path} does not match its checksum")
    with well_formed(f"{path} is"):
        sections = parse_json(data)["sections"]
    if not isinstance(sections, dict):
        raise CheckpointDamaged(f"{path} is malformed")
    return sections
