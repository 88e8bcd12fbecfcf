"""Error messages for fields that a recipe cannot have."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

from stepmark.config.absent_arguments import INSTEAD
from stepmark.config.old_names import FIELDS

# Fields of run_clm, which no installed package declares.
RUN_CLM = ("cache_dir", "use_fast_tokenizer", "model_revision", "token", "streaming")
TYPING_ERROR = 0.85  # similarity from which a name counts as a typing error


def unknown_field(name: str, known: Collection[str], path: str | None = None) -> str:
    """One line that says that `name`, in the recipe `path` or a flag, is not a field, and what to do instead."""
    where = f" in {path}" if path else ""
    if name.replace("-", "_") in FIELDS:
        return f"{name}: is not a Stepmark field{where}; {FIELDS[name.replace('-', '_')]}"
    if name in INSTEAD:
        return f"{name}: is a transformers field that Stepmark does not support{where}; {INSTEAD[name]}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=TYPING_ERROR)
    if close and not name.startswith(f"{close[0]}_"):
        return f"{name}: is not a field{where}; did you mean {close[0]}?"
    listed = "`stepmark train --help` lists all fields"
    if name in RUN_CLM or name in _transformers_fields():
        return f"{name}: is a transformers field that Stepmark does not support{where}; leave it out; {listed}"
    return f"{name}: is not a field{where}; {listed}"


def _transformers_fields() -> Collection[str]:
    """Read from the source of the installed transformers: importing it takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ()
    source = (Path(found.origin).parent / "training_args.py").read_text(encoding="utf-8")
    return set(re.findall(r"^    (\w+): .*=", source, flags=re.MULTILINE))
