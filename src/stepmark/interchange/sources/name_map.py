"""Files of --map: the names that tensors of another program get, as patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError
from stepmark.tensor_files.source_files import open_file


def read_map(path: Path) -> list[tuple[str, str]]:
    """Patterns and what they become, in the file's order.

    A line is `old.name: new.name`. In a pattern, `*` stands for one part of a name, and for the same part in the new
    name; `null` as the new name leaves the tensor out. Raises UsageError where the file is not such a map.
    """
    try:
        with open_file(path) as file:
            found = parse_yaml(file.read().decode())
    except (OSError, ValueError) as error:
        raise UsageError(f"--map: {path} cannot be read: {error}") from error
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"{path} is not a map of names; write lines such as `encoder.*.weight: model.layers.*.weight`")
    pairs = []
    for old, new in found.items():
        new = "" if new is None else new
        if not isinstance(old, str) or not isinstance(new, str) or new.count("*") > old.count("*"):
            raise UsageError(f"{path}: {old!r}: {new!r} does not map a name to a name with as many *")
        pairs.append((old, new))
    return pairs


def new_names(names: Collection[str], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Each name to the one that it gets: by the first pattern that fits; others stay. Those left out are missing.

    Raises UsageError where two would have one name, or a pattern fits none.
    """
    patterns = [(old, new, re.compile("([^.]+)".join(map(re.escape, old.split("*"))))) for old, new in pairs]
    found: dict[str, str] = {}
    taken: set[str] = set()
    used: set[str] = set()
    for name in names:
        new_name = name
        for old, new, pattern in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                used.add(old)
                for part in match.groups():
                    new = new.replace("*", part, 1)
                new_name = new
                break
        if new_name in taken:
            raise UsageError(f"--map: two tensors would have the name {new_name!r}, one of them {name!r}")
        if new_name:
            found[name] = new_name
            taken.add(new_name)
    unused = [old for old, _ in pairs if old not in used]
    if unused:
        raise UsageError(
            f"--map: no tensor has a name like {unused[0]!r}; those here are such as {next(iter(names), '')!r}"
        )
    return found
