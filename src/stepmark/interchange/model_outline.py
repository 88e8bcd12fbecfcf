"""The names, order and shapes of a model's parameters, from its Hugging Face config alone.

The class of any model that transformers has is made on the meta device. torch and the class take several hundred MB and
some seconds, so that is done in a process of its own, which ends before tensors are read, unless this process has
imported them already.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import stepmark
from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.errors import CheckpointMismatch
from stepmark.filesystem.error_advice import first_line
from stepmark.filesystem.json_values import decode_plain, encode_plain
from stepmark.model_folder.adapted_model import class_of_task, read_adapter_config
from stepmark.model_folder.model_config import CONFIG as CONFIG
from stepmark.model_folder.model_config import check_counts, few_modules, model_class
from stepmark.sharding.layout import Shape, row_major_strides
from stepmark.tensor_files.source_files import read_json

_MODULES = (20, 4000)  # that a class may make: so many for each tensor of the checkpoint, and so many more
_SECONDS = 600  # after which that process is taken to hang


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
        written: How transformers writes what it changes, as `stepmark.checkpoint.written_form` has it.
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
    written: dict[str, Any] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def saved(self) -> dict[str, str]:
        """Names in the files that transformers writes to those in the model, where it changes only the name."""
        return {name: own for name, own in self.written.items() if isinstance(own, str)}

    @cached_property
    def joined(self) -> dict[str, tuple[str, Shape]]:
        """Names in those files of tensors that are parts of one in the model, such as the weights of one expert: its
        name, and where the part begins in it. The part has its dims in their order, without the first perhaps."""
        found, sizes = {}, Counter[str]()
        for name, (own, start, lengths, strides) in ((n, v) for n, v in self.written.items() if isinstance(v, list)):
            steps = row_major_strides(self.state[own]) if isinstance(own, str) else ()
            if steps[-len(lengths) :] == tuple(strides):
                found[name] = own, tuple(start // step % n for step, n in zip(steps, self.state[own], strict=True))
                sizes[own] += math.prod(lengths)
        return {name: part for name, part in found.items() if sizes[part[0]] == math.prod(self.state[part[0]])}


def outline_of(path: Path, tensors: int, adapter: Path | None = None) -> ModelOutline:
    """The model that a config.json describes, or PEFT's adapter in the folder `adapter` over it.

    A config of many more layers than the checkpoint has `tensors` is refused before it is built. Raises
    CheckpointMismatch where it is not the config of a model that transformers knows, or not of this checkpoint.
    """
    config = read_json(path)
    check_counts(path, config, tensors)
    try:
        here = {"torch", "transformers"} <= sys.modules.keys()
        asked = (config, tensors, None if adapter is None else str(adapter))
        return _outline(*asked) if here else _from_process(*asked)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{path}: {error}") from error
    except Exception as error:  # the constructors of models raise anything
        raise CheckpointMismatch(
            f"{path} does not describe a model that transformers can make: {first_line(error)[:200]}"
        ) from error


def _from_process(*asked: Any) -> ModelOutline:
    """The outline as another process of this Python finds it; -P: nothing is imported from the current folder."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); from stepmark.interchange.model_outline import main; main()"
    command = [sys.executable, "-P", "-c", program, str(Path(stepmark.__file__).parents[1])]
    told = json.dumps(asked)
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=_SECONDS, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
    found = json.loads(lines[-1])
    if "error" in found:
        raise CheckpointMismatch(found["error"])
    return ModelOutline(**decode_plain(found))


def _outline(config: dict[str, Any], tensors: int, adapter: str | None = None) -> ModelOutline:
    import torch
    import transformers

    from stepmark.checkpoint.sections import kept_names
    from stepmark.checkpoint.written_form import written_form

    kind = config.get("model_type")
    if type(kind) is not str or "auto_map" in config:
        raise CheckpointMismatch("it names no model_type of transformers")
    values = {key: _plain(value) for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(kind, **values)
    names = config.get("architectures") or []
    task = None if adapter is None else class_of_task(read_adapter_config(Path(adapter)))
    found = model_class(task or names[0], Path(CONFIG)) if task or names else None
    with torch.device("meta"), few_modules(_MODULES[0] * tensors + _MODULES[1]):
        make: Any = getattr(found or transformers.AutoModelForCausalLM, "from_config", found)
        model: Any = make(made)
    model.tie_weights()
    if adapter is not None:
        return _adapted(model, config, adapter)
    state = model.state_dict(keep_vars=True)
    kept = kept_names(model, state)
    shapes = {name: tuple(state[name].shape) for name in state if kept[name] == name}
    return ModelOutline(
        config=config,
        architecture=type(model).__name__,
        parameters={kept.get(name, name): tuple(p.shape) for name, p in model.named_parameters()},
        state=shapes,
        tied={name: other for name, other in kept.items() if name != other},
        layer_norms=frozenset(_layer_norms(model)),
        frozen=frozenset(kept.get(name, name) for name, p in model.named_parameters() if not p.requires_grad),
        written=written_form(model, shapes),
        optional=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
    )


def _layer_norms(model: Any) -> Iterator[str]:
    """The parameters of torch's LayerNorm."""
    import torch

    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            yield from (f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False))


def _adapted(model: Any, config: dict[str, Any], folder: str) -> ModelOutline:
    """The outline of an adapter over a model: its tensors as PEFT saves them, in the order of the PeftModel."""
    import peft
    import torch

    from stepmark.trainer.run_folder.adapters import adapter_identity
    from stepmark.training.model_wrappers import adapter_tensors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is unknown here
        asked: Any = peft.PeftConfig.from_pretrained(folder)
    given = read_adapter_config(Path(folder))
    unknown = sorted(name for name, value in given.items() if value and not hasattr(asked, name))
    if unknown:
        raise CheckpointMismatch(f"the installed peft, {peft.__version__}, does not know {unknown[0]} of the adapter")
    asked.inference_mode, asked.base_model_name_or_path = False, None
    identity = adapter_identity(asked)
    if hasattr(asked, "init_lora_weights"):
        asked.init_lora_weights = False  # nothing is computed of weights that are not there
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, asked)
    saved = adapter_tensors(adapted, adapted.active_adapter)
    names: dict[int, str] = {}
    first = {name: names.setdefault(id(tensor), name) for name, (_, tensor) in saved.items()}
    tied = {name: other for name, other in first.items() if name != other}
    live = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    if not all(full for full, _ in saved.values()) or any(id(each) not in names for each in live.values()):
        raise CheckpointMismatch(
            f"peft does not save all that an adapter of type {given.get('peft_type')} trains, or saves what it computes"
        )
    shapes = {name: tuple(tensor.shape) for name, (_, tensor) in saved.items()}
    norms = {names.get(id(live.get(name)), "") for name in _layer_norms(adapted)}
    return ModelOutline(
        config=config,
        architecture="Adapter",
        parameters={names[id(each)]: shapes[names[id(each)]] for each in live.values()},
        state={name: shape for name, shape in shapes.items() if name not in tied},
        tied=tied,
        layer_norms=frozenset(norms),
        live={names[id(each)]: name for name, each in live.items()},
        identity={"adapter": identity},
    )


def _plain(value: Any) -> Any:
    """A value of a config, without the form in which transformers stores what JSON lacks: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        special = value.get("__float__") if len(value) == 1 else None
        return float(special) if isinstance(special, str) else {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Reads a config, and prints the outline, or what is wrong with it."""
    leave_out_torch_xla()
    quiet_libraries()
    try:
        print(json.dumps(encode_plain(asdict(_outline(*json.load(sys.stdin))), "outline")))
    except Exception as error:
        text = f"transformers cannot make it: {first_line(error)[:200]}"
        text = str(error) if isinstance(error, CheckpointMismatch) else text
        print(json.dumps({"error": text}))
