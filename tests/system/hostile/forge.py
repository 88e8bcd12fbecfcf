"""Forges what a stranger may have put into a folder: whatever it changes has right sizes and checksums afterwards."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

TERA = 1 << 40
BLANK = "0" * 32
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
CODE = "import pathlib\npathlib.Path({canary!r}).touch()\n"
Forgery = Callable[["Place"], None]


@dataclass(frozen=True)
class Place:
    """Where a stranger's folders lie: `run` and `model`, and beside them what is the user's own."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "place" / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint-3"

    @property
    def saved(self) -> Path:
        """What a program has saved with Checkpointer, in steps 1 and 2."""
        return self.root / "place" / "saved"

    @property
    def model(self) -> Path:
        """A Hugging Face folder."""
        return self.root / "place" / "model"

    @property
    def adapter(self) -> Path:
        return self.root / "place" / "adapter"

    @property
    def outside(self) -> Path:
        """The user's own files."""
        return self.root / "outside"

    @property
    def work(self) -> Path:
        """The folder in which commands run."""
        return self.root / "work"

    @property
    def canary(self) -> Path:
        """What forged code makes."""
        return self.outside / "code-has-run"

    def path(self, name: str) -> Path:
        return self.root / "place" / name.format(c="run/checkpoint-3")

    def code(self) -> str:
        return CODE.format(canary=str(self.canary))


def fill_outside(place: Place) -> None:
    """The user's own files, which nothing may touch."""
    (place.outside / "folder" / "inner").mkdir(parents=True)
    (place.outside / "secret.txt").write_text("s3cret-words-of-the-user\n")
    (place.outside / "secret.json").write_text('{"model_type": "gpt2", "s3cret-words-of-the-user": 1}\n')
    (place.outside / "folder" / "notes.txt").write_text("notes\n")
    for name in (".owner.0", ".1a2b3c4d", "1a2b3c4d"):
        (place.outside / "folder" / name).mkdir()
        (place.outside / "folder" / name / "alive.0").write_text("{}")


# Signed parts of a checkpoint


def signed(text: str) -> bytes:
    """The text of a manifest with a right checksum; its last field is the digest."""
    head, _, _ = text.rpartition('"digest": "')
    blank = f'{head}"digest": "{BLANK}"\n}}\n'.encode("utf-8", "surrogatepass")
    return blank.replace(f'"digest": "{BLANK}"\n}}\n'.encode(), f'"digest": "{digest(blank)}"\n}}\n'.encode())


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def manifest(change: Callable[[dict[str, Any]], Any], checkpoint: str = "{c}") -> Forgery:
    """Changes the manifest as plain values."""

    def forge(place: Place) -> None:
        path = place.path(checkpoint) / "manifest.json"
        body = json.loads(path.read_text())
        change(body)
        last = body.pop("digest")
        body["digest"] = last
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
        path.write_bytes(signed("{\n" + ",\n".join(lines) + "\n}\n"))

    return forge


def manifest_text(old: str, new: str, checkpoint: str = "{c}") -> Forgery:
    """Replaces a piece of the manifest's text, for what JSON's own writer does not write."""

    def forge(place: Place) -> None:
        path = place.path(checkpoint) / "manifest.json"
        text = path.read_text()
        assert old in text
        path.write_bytes(signed(text.replace(old, new, 1)))

    return forge


def signed_file(name: str, data: bytes | Callable[[Place, bytes], bytes], checkpoint: str = "{c}") -> Forgery:
    """Replaces a file without tensors, and what the manifest says of it."""

    def forge(place: Place) -> None:
        path = place.path(checkpoint) / name
        new = data if isinstance(data, bytes) else data(place, path.read_bytes() if path.exists() else b"")
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(new)
        entry = {"name": name, "size": len(new), "digest": digest(new)}

        def change(body: dict[str, Any]) -> None:
            known = next((each for each in body["files"] if each["name"] == name), None)
            if known is None:
                body["files"].append(entry)
            else:
                known.update(entry)

        manifest(change, checkpoint)(place)

    return forge


def signed_json(name: str, change: Callable[[Any], Any], checkpoint: str = "{c}") -> Forgery:
    """Changes a JSON file of a checkpoint; what `change` returns, if anything, replaces it."""

    def changed(_: Place, data: bytes) -> bytes:
        value = json.loads(data)
        found = change(value)
        return json.dumps(value if found is None else found).encode()

    return signed_file(name, changed, checkpoint)


def header(name: str, change: Callable[[dict[str, Any]], Any]) -> Forgery:
    """Changes the header of a tensor file as plain values, `stepmark` in it as well."""

    def forge(place: Place) -> None:
        path = place.checkpoint / name
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        body = json.loads(data[8 : 8 + length])
        own = json.loads(body["__metadata__"]["stepmark"])
        body["__metadata__"]["stepmark"] = own
        change(body)
        body["__metadata__"]["stepmark"] = json.dumps(body["__metadata__"]["stepmark"])
        text = json.dumps(body).encode()
        text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
        whole = struct.pack("<Q", len(text)) + text
        path.write_bytes(whole + data[8 + length :])

        def describe(listed: dict[str, Any]) -> None:
            (entry,) = (each for each in listed["files"] if each["name"] == name)
            entry.update(size=path.stat().st_size, header=len(whole), digest=digest(whole))

        manifest(describe)(place)

    return forge


def config(**fields: Any) -> Forgery:
    """Changes fields of config.json, in the checkpoint and in the model folder."""

    def forge(place: Place) -> None:
        signed_json("config.json", lambda value: value.update(fields))(place)
        for path in (place.model / "config.json", place.run / "config.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return forge


# Files of any kind


def text(name: str, content: str | Callable[[Place], str]) -> Forgery:
    """Writes a file. `{c}` in its name is the newest checkpoint, others are below the stranger's folder."""

    def forge(place: Place) -> None:
        path = place.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else content(place))

    return forge


def appended(name: str, *values: Any) -> Forgery:
    """Appends lines: text as it is, values as JSON."""

    def forge(place: Place) -> None:
        with place.path(name).open("a") as file:
            file.writelines((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in values)

    return forge


def removed(*names: str) -> Forgery:
    def forge(place: Place) -> None:
        for name in names:
            path = place.path(name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    return forge


def link(name: str, target: str) -> Forgery:
    """A link in place of what was there; `target` from the root of the place, or absolute."""

    def forge(place: Place) -> None:
        removed(name)(place)
        path = place.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(place.root / target)

    return forge


def hard_link(name: str, target: str) -> Forgery:
    def forge(place: Place) -> None:
        removed(name)(place)
        place.path(name).hardlink_to(place.root / target)

    return forge


def pipe(name: str) -> Forgery:
    def forge(place: Place) -> None:
        removed(name)(place)
        path = place.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)

    return forge


def folder(name: str) -> Forgery:
    def forge(place: Place) -> None:
        removed(name)(place)
        place.path(name).mkdir(parents=True)

    return forge


def sparse(name: str, size: int = TERA) -> Forgery:
    """A file of so many bytes, of which the disk holds none but what was in it."""

    def forge(place: Place) -> None:
        path = place.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        os.truncate(path, size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))

    return forge


def sparse_listed(name: str, size: int = TERA) -> Forgery:
    """The same of a file that the manifest lists with that size."""

    def forge(place: Place) -> None:
        sparse(f"{{c}}/{name}", size)(place)

        def describe(body: dict[str, Any]) -> None:
            (entry,) = (each for each in body["files"] if each["name"] == name)
            entry["size"] = size

        manifest(describe)(place)

    return forge


def old(*names: str) -> Forgery:
    """Gives files and folders a time of long ago."""

    def forge(place: Place) -> None:
        for name in names:
            os.utime(place.path(name), (1e9, 1e9))

    return forge


# Pickles and archives


class Runs:
    """Runs code where it is unpickled."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> Any:
        return exec, (self._code,)


def evil_pickle(place: Place, protocol: int = 2) -> bytes:
    return pickle.dumps({"weight": Runs(place.code())}, protocol)


def torch_archive(data: bytes, *, compressed: bool = False, **records: bytes) -> bytes:
    """A file of torch.save with this pickle and further records."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


def archive(name: str, *, compressed: bool = False, evil: bool = True) -> Forgery:
    def forge(place: Place) -> None:
        path = place.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if evil:
            path.write_bytes(torch_archive(evil_pickle(place), compressed=compressed))
        else:
            path.write_bytes(
                torch_archive(pickle.dumps({"n": 1}, 2), compressed=True, **{"data/0": bytes(1_200_000_000)})
            )

    return forge
