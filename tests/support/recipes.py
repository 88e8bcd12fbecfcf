"""A recipe that trains in a moment: one layer of GPT-2 on a few lines of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepmark.config.yaml_file import format_yaml

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "under", "hill"]
TINY = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}


def write_text(path: Path, lines: int = 40) -> Path:
    """A text of `lines` lines, always the same."""
    path.write_text(
        "".join(" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(9)) + ".\n" for i in range(lines))
    )
    return path


def tiny_recipe(folder: Path, **fields: Any) -> dict[str, Any]:
    """The recipe's fields; its files lie in `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    return {
        "output_dir": str(folder / "out"),
        "config_name": "gpt2",
        "config_overrides": TINY,
        "tokenizer_name": "bytes",
        "train_file": str(text),
        "block_size": 32,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "device": "cpu",
        **fields,
    }


def write_recipe(folder: Path, **fields: Any) -> Path:
    """`tiny_recipe` as a file; a field given as None is left out."""
    path = folder / "recipe.yaml"
    given = {name: value for name, value in tiny_recipe(folder, **fields).items() if value is not None}
    path.write_text(format_yaml(given))
    return path
