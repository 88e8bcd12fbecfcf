"""The names, order and shapes of a model's parameters, from its Hugging Face config alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.filesystem.json_files import read_json
from stepmark.sharding.layout import Shape

CONFIG = "config.json"


@dataclass(frozen=True)
class ModelOutline:
    """A model without values.

    Args:
        config: The contents of config.json.
        architecture: The class's name.
        parameters: Names to shapes, in the order of `named_parameters()`; of tied ones the first name.
        state: Names in the state dict to shapes, without those of tied tensors that are not stored.
        tied: Names of tied tensors to the names they are stored under.
        layer_norms: Parameters of torch's LayerNorm.
        frozen: Parameters that the class makes without a gradient.
        optional: Patterns of names that old versions of the model stored, and that it does not need.
        saved: Names in the files that transformers writes to those in the model, where it changes only the name.
        joined: Names in those files of tensors that are parts of one in the model, such as the weights of one expert:
            its name, and where the part begins in it.
        live: Of an adapter, whose `parameters` and `state` have the names in PEFT's file: those in the PeftModel.
        identity: Of an adapter, what a run's identity has of it.
    """

    config: dict[str, Any]
    architecture: str
    parameters: dict[str, Shape]
    state: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    layer_norms: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    saved: dict[str, str] = field(default_factory=dict)
    joined: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps({**asdict(self), "layer_norms": sorted(self.layer_norms), "frozen": sorted(self.frozen)})

    @classmethod
    def from_json(cls, text: str) -> ModelOutline:
        """What `to_json` wrote."""
        found = json.loads(text)
        for key in ("parameters", "state"):
            found[key] = {name: tuple(shape) for name, shape in found[key].items()}
        found["joined"] = {name: (own, tuple(begin)) for name, (own, begin) in found["joined"].items()}
        for key in ("layer_norms", "frozen"):
            found[key] = frozenset(found[key])
        return cls(**{**found, "optional": tuple(found["optional"])})


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a config.json. Raises CheckpointMismatch where it is not one."""
    try:
        found = read_json(path, follow=True)
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointMismatch(f"{path} is not a JSON file: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointMismatch(f"{path} is not the config of a model")
    return found
