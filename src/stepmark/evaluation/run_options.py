"""Evaluation settings of a run, kept in its checkpoints for evaluations outside of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MANIFEST, read_manifest
from stepmark.errors import CheckpointDamaged
from stepmark.filesystem.json_files import read_json
from stepmark.filesystem.json_values import decode_plain
from stepmark.model_folder.consolidate import EVALUATION, EVALUATION_FILE

DEFAULT_BATCH_SIZE = 8
OF_LOSS = ("bf16", "fp16", "label_smoothing_factor", "causal_shift")  # as `stepmark.evaluate` names them too


@dataclass(frozen=True)
class RunOptions:
    """Evaluation settings of a run, apart from the model and the data.

    `block_size`: tokens of a sample, and `columns`: the data fields by which rows become samples, where the run's
    dataset says them. `metrics` and `loss`: functions of the user's by
    the names that they have, `module:function` for one that can be imported, None for none.
    """

    bf16: bool = False
    fp16: bool = False
    label_smoothing_factor: float = 0.0
    per_device_eval_batch_size: int = DEFAULT_BATCH_SIZE
    block_size: int | None = None
    metrics: str | None = None
    loss: str | None = None
    columns: Mapping[str, Any] | None = None
    attn_implementation: str | None = None
    causal_shift: bool | None = None

    @classmethod
    def of_training(cls, args: Any, **more: Any) -> RunOptions:
        """The settings in training arguments, plus `more` of the fields above."""
        return cls(**{name: getattr(args, name) for name in (*OF_LOSS, "per_device_eval_batch_size")}, **more)

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunOptions | None:
        """Those that a checkpoint has kept, or the model that it was consolidated into; None for one of a custom loop,
        of an older version, or another folder."""
        kept = None
        if (checkpoint / MANIFEST).is_file():
            kept = decode_plain(read_manifest(checkpoint).metadata).get(EVALUATION)
        elif (path := checkpoint / EVALUATION_FILE).is_file():
            try:
                kept = read_json(path, follow=True)
            except ValueError as error:
                raise CheckpointDamaged(f"{path}: not valid JSON ({error}); consolidate again, or delete it") from error
        if not isinstance(kept, Mapping):
            return None
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})

    @property
    def metrics_flag(self) -> str:
        """The flag that evaluates with the run's own metrics."""
        assert self.metrics is not None
        return f"--metrics {self.metrics if ':' in self.metrics else f'MODULE:FUNCTION (its {self.metrics})'}"


def function_name(function: Callable[..., Any] | None) -> str | None:
    """`module:function` of a function, as `--metrics` takes it; its own name where a module does not have it, such as
    that of a method; None for None. The module of a script that is being run is its file's name."""
    if function is None:
        return None
    name = getattr(function, "__qualname__", None) or type(function).__name__
    module = getattr(function, "__module__", None)
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else None
    return f"{module}:{name}" if module and name.isidentifier() else name
