"""What a checkpoint of another tool holds, in one form for all formats: global tensors by name, and where they lie.

A format is a module of `sources` or `neuron` with two functions, `recognize` and `open_checkpoint`. They read names and
headers and do the arithmetic; nothing of a tensor is read before it is written to the new checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.records import Record

TRAINER_STATE = "trainer_state.json"


@dataclass
class ForeignOptimizer:
    """States by parameter name: tensors, and plain values. `groups` are hyperparameters, with names in "params"."""

    groups: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]

    def tensors(self) -> Iterable[GlobalTensor]:
        """All tensors among the states."""
        return (value for state in self.states.values() for value in state.values() if isinstance(value, GlobalTensor))

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives parameters these names, in place; any other keeps its own."""
        self.states = {names.get(name, name): state for name, state in self.states.items()}
        for group in self.groups:
            group["params"] = [names.get(name, name) for name in group["params"]]


@dataclass
class ForeignCheckpoint:
    """A checkpoint of another tool.

    Args:
        kind: The tool and layout, in words.
        folder: Where it is.
        model: Tensors by their Hugging Face name.
        optimizer: None where there is none, or it cannot be recovered.
        step: None where no file states it.
        schedule: The learning rate schedule's state dict.
        trainer_state: The contents of trainer_state.json.
        files: Files to take along (config, tokenizer), by name.
        texts: Files that are made, by name.
        records: Records with checksums, which are verified before what is written gets its name.
        mesh: Sizes of the mesh that wrote it, as far as that can be known.
        assumed: What the files do not prove, in sentences.
        lost: What is not taken along and why, in sentences.
        adapter: Whether it is a PEFT adapter and not a model.
        prefixes: What names of a section began with in the state dict that was saved, where that was nested.
        identity: What a run's identity has of it.
        architecture: The model's class, if the config names it.
        tied: Names of tied tensors to the names they are stored under.
        written: What transformers changes when it writes the model; see `stepmark.checkpoint.written_form`.
    """

    kind: str
    folder: Path
    model: dict[str, GlobalTensor]
    optimizer: ForeignOptimizer | None = None
    step: int | None = None
    schedule: Mapping[str, Any] | None = None
    trainer_state: dict[str, Any] | None = None
    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    adapter: bool = False
    architecture: str | None = None
    tied: dict[str, str] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterable[GlobalTensor]:
        """Those of the model and of the optimizer."""
        yield from self.model.values()
        if self.optimizer is not None:
            yield from self.optimizer.tensors()


@dataclass(frozen=True)
class ImportOptions:
    """What the user says about a source, because its files do not.

    `config` is a Hugging Face config.json, `tag` the checkpoint to take of a folder with several, `model_only` leaves
    the optimizer out, `names` are the patterns of a --map file, `heads` is how query heads lie where key/value heads
    are replicated: "auto", or "natural", and `frozen` are patterns of names of parameters that were not trained.
    """

    config: Path | None = None
    tag: str | None = None
    model_only: bool = False
    names: Sequence[tuple[str, str]] = ()
    heads: str = "auto"
    frozen: Sequence[str] = ()


class CheckpointFormat(Protocol):
    """A module that reads one tool's checkpoints."""

    def recognize(self, folder: Path) -> bool:
        """Whether the folder, or file, looks like one of this tool's. Reads names, and no more than a few bytes."""

    def open_checkpoint(self, folder: Path, options: ImportOptions) -> ForeignCheckpoint:
        """What it holds. Raises CheckpointError, naming file and tensor, where it is incomplete."""
