"""The last step for every format: compares it with the model's config, and gives it the types of a Stepmark run."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, UsageError
from stepmark.filesystem.files import leads_out
from stepmark.interchange.model_outline import CONFIG, ModelOutline, outline_of
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer, ImportOptions
from stepmark.interchange.sources.torch_optimizer import STEP, factored_shape, number_tensor, scalar
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.conversion import FLOATS
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece

_TAKEN = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt vocab.txt tokenizer.model spiece.model chat_template.jinja chat_template.json "
    "preprocessor_config.json processor_config.json sentencepiece.bpe.model source.spm target.spm tekken.json"
)
TAKEN = (CONFIG, *_TAKEN.split())
_KNOWN_STATES = (
    "step exp_avg exp_avg_sq max_exp_avg_sq exp_avg_sq_row exp_avg_sq_col exp_inf momentum_buffer square_avg "
    "grad_avg acc_delta sum row_var col_var variance state1 state2 qmap1 qmap2 absmax1 absmax2 RMS master"
)
_STATES = frozenset(_KNOWN_STATES.split())
_RESERVED = "__metadata__"
_Join = Callable[[str, list[GlobalTensor]], GlobalTensor]
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|embeddings\.position_ids)\Z")


def files_beside(folder: Path) -> dict[str, Path]:
    """Config and tokenizer in a folder, by name."""
    return {name: path for name in TAKEN if (path := folder / name).is_file() and not leads_out(folder, path)}


def outline_for(found_files: dict[str, Path], options: ImportOptions, tensors: int) -> ModelOutline | None:
    """The model of the config that the user gave, or that lies in the checkpoint, with the parameters that the user
    says were frozen; None where there is none. Raises UsageError for a pattern without a parameter."""
    path = options.config or found_files.get(CONFIG)
    if path is None and options.frozen:
        raise UsageError("--frozen: names are those of the model's config, which is not there; give it with --config")
    if path is None:
        return None
    outline, frozen = outline_of(path, tensors), set[str]()
    for pattern in options.frozen:
        matching = fnmatch.filter(outline.parameters, pattern)
        if not matching:
            raise UsageError(f"--frozen: no parameter of the {outline.architecture} of {path} is like {pattern!r}")
        frozen.update(matching)
    return replace(outline, frozen=outline.frozen | frozen)


def finish(found: ForeignCheckpoint, options: ImportOptions, outline: ModelOutline | None) -> ForeignCheckpoint:
    """Gives what a format found the names and types that a Stepmark run has, in place; `outline` is the config's model.

    Raises CheckpointMismatch where the config is of another model, or a tensor has a wrong shape.
    """
    beside = found.folder if found.folder.is_dir() else found.folder.parent
    left = [name for name in TAKEN if name not in found.files and (beside / name).is_symlink()]
    found.lost += [f"{name}: a link that leads nowhere, or out of {beside}; copy the file" for name in left]
    if options.config is not None and not found.adapter:
        found.files[CONFIG] = options.config
    if options.model_only:
        found.optimizer = None
    if _RESERVED in found.model:
        raise CheckpointMismatch(
            f"{found.model[_RESERVED].where} has a name that safetensors files use themselves; rename it with --map"
        )
    if outline is not None and not found.adapter:
        fit_model(found, outline)
    found.model = {name: _exact(each, "F32") if each.dtype == "F64" else each for name, each in found.model.items()}
    if found.optimizer is not None:
        _complete_optimizer(found, found.optimizer)
        found.optimizer.rename(outline.live if outline is not None else {})
    return found


def _exact(tensor: GlobalTensor, dtype: str) -> GlobalTensor:
    return tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype)


def fit_model(found: ForeignCheckpoint, outline: ModelOutline) -> None:
    """Compares with the config's model; drops tied names and buffers that it makes itself.

    Raises CheckpointMismatch, naming file and tensor, where the model is another.
    """
    config = found.files.get(CONFIG, CONFIG)
    take_own_names(found, outline)
    found.architecture, found.tied = outline.architecture, dict(outline.tied)
    found.identity = dict(outline.identity)
    for name in [name for name in found.model if name not in outline.state]:
        tensor = found.model[name]
        if name in outline.tied:
            _drop_tied(found, name, outline.tied[name])
        elif _BUFFERS.search(name) or any(re.search(pattern, name) for pattern in outline.optional):
            del found.model[name]
        else:
            raise CheckpointMismatch(
                f"{tensor.where} is not in the {outline.architecture} of {config}; give the model's own config with "
                "--config, or other names with --map"
            )
    compare_model(found, outline, config)
    found.model = {name: found.model[name] for name in outline.state if name in found.model}
    found.written = {
        name: own for name, own in outline.written.items() if name not in outline.saved or own in found.model
    }


def compare_model(found: ForeignCheckpoint, outline: ModelOutline, config: Path | str) -> None:
    """Raises CheckpointMismatch where a tensor of the config's model is missing, or has another shape."""
    for name, shape in outline.state.items():
        other = found.model.get(name)
        if other is None and name in outline.parameters:
            raise CheckpointMismatch(
                f"{found.folder} has no tensor {name!r}, which the {outline.architecture} of {config} has"
            )
        if other is not None and other.shape != shape:
            raise CheckpointMismatch(
                f"{other.where} is {list(other.shape)}, and {list(shape)} in the {outline.architecture} of {config}"
            )


def take_own_names(found: ForeignCheckpoint, outline: ModelOutline | None) -> None:
    """Gives tensors and states the names that parameters have in the model, where files have others."""
    saved = outline.saved if outline is not None else {}
    again = next((name for name, own in saved.items() if name in found.model and own in found.model), None)
    if again is not None:
        raise CheckpointMismatch(f"{found.model[again].where} is there as {saved[again]!r} as well")
    found.model = {saved.get(name, name): tensor for name, tensor in found.model.items()}
    if found.optimizer is not None:
        found.optimizer.rename(saved)
    if outline is not None and outline.joined:
        _join_experts(found, outline)


def _join_experts(found: ForeignCheckpoint, outline: ModelOutline) -> None:
    """Puts the tensors of single experts, and their states, together to those that the model has of all experts."""
    together: dict[str, list[str]] = {}
    for name, (own, _) in outline.joined.items():
        together.setdefault(own, []).append(name)

    def join(own: str, tensors: list[GlobalTensor]) -> GlobalTensor:
        begins = [outline.joined[name][1] for name in together[own]]
        lifted = [_lifted(piece, at) for each, at in zip(tensors, begins, strict=True) for piece in each.pieces]
        again = [_lifted(piece, at) for each, at in zip(tensors, begins, strict=True) for piece in each.replicas]
        joined = replace(tensors[0], shape=outline.state[own], pieces=tuple(lifted), replicas=tuple(again))
        joined.check()
        return joined

    for own, names in together.items():
        if there := [name for name in names if name in found.model]:
            if len(there) < len(names) or own in found.model:
                missing = next((name for name in names if name not in found.model), own)
                raise CheckpointMismatch(
                    f"{found.model[there[0]].where} belongs with the other parts of {own!r}, and {missing!r} is "
                    f"{'there as well' if missing == own else 'not there'}"
                )
            found.model[own] = join(own, [found.model.pop(name) for name in names])
        states = found.optimizer.states if found.optimizer is not None else {}
        if any(name in states for name in names):
            members = [states.pop(name, {}) for name in names]
            keys = dict.fromkeys(key for each in members for key in each)
            states[own] = {key: _joined_value(own, key, [each.get(key) for each in members], join) for key in keys}
    for group in found.optimizer.groups if found.optimizer is not None else ():
        group["params"] = list(dict.fromkeys(outline.joined.get(name, (name,))[0] for name in group["params"]))


def _joined_value(own: str, key: str, values: list[Any], join: _Join) -> Any:
    """The state of one key of all experts: a tensor like the weights, or a number that all have."""
    tensors = [value for value in values if isinstance(value, GlobalTensor)]
    if len(tensors) == len(values) and all(len(value.shape) > 1 for value in tensors):
        return join(own, tensors)
    numbers = {scalar(each.pieces[0].array, each.where) if isinstance(each, GlobalTensor) else each for each in values}
    if len(numbers) == 1:
        return values[0]
    raise CheckpointMismatch(
        f"the optimizer's {key} differs between the experts of {own!r}, or some have none, and the model has one for "
        "all of them; import the model alone with --model-only"
    )


def _lifted(piece: Piece, begin: Shape) -> Piece:
    """The piece of a part as one of the tensor in which the part begins there; of one expert it gets a dim."""
    array = piece.array
    if len(begin) > len(array.shape):
        strides = (array.numel, *array.strides)
        array, piece = replace(array, shape=(1, *array.shape), strides=strides), Piece(array, (0, *piece.offsets))
    return Piece(array, tuple(a + b for a, b in zip(begin, piece.offsets, strict=True)))


def _drop_tied(found: ForeignCheckpoint, name: str, kept: str) -> None:
    """Leaves out one name of a tied tensor; its values become a replica, which has to be the same."""
    dropped = found.model.pop(name)
    stays = found.model.get(kept)
    if stays is None:
        found.model[kept] = dropped
    elif stays.shape == dropped.shape and stays.source_dtype == dropped.source_dtype:
        found.model[kept] = replace(stays, replicas=(*stays.replicas, *dropped.pieces))
    else:
        raise CheckpointMismatch(f"{dropped.where} is tied to {kept!r}, and has another shape or type")


def _complete_optimizer(found: ForeignCheckpoint, optimizer: ForeignOptimizer) -> None:
    """States in fp32, and fp32 master weights for parameters of lower precision."""
    _check_keys(found, optimizer)
    downcast = any(tensor.dtype == "F64" for tensor in optimizer.tensors())
    for name, state in optimizer.states.items():
        for key, value in state.items():
            if isinstance(value, GlobalTensor) and value.dtype in FLOATS:
                state[key] = _exact(value, "F32")
        parameter = found.model.get(name)
        if parameter is None:
            raise CheckpointMismatch(
                f"{found.folder}: the optimizer has a state of {name!r}, and the model has no such tensor"
            )
        _check_shapes(state, parameter)
        step = state.get(STEP)
        if isinstance(step, int | float) and {"exp_avg", "exp_avg_sq"} <= state.keys():  # as torch's Adam has it
            state[STEP] = number_tensor(f"{name}/{STEP}", float(step), found.folder)
        if downcast and MASTER in state and parameter.dtype == "F32":
            found.model[name] = parameter = _exact(parameter, "BF16")
        if parameter.dtype == "F32":
            state.pop(MASTER, None)
        elif MASTER not in state and parameter.dtype in FLOATS:
            state[MASTER] = _exact(parameter, "F32")
    _check_steps(found, optimizer)


def _check_keys(found: ForeignCheckpoint, optimizer: ForeignOptimizer) -> None:
    """Raises CheckpointDamaged where one parameter's state has another name than that of all others with as many dims:
    the names in some stores have no checksum."""
    uses = Counter(key for state in optimizer.states.values() for key in state)
    by_dims: dict[int, dict[str, frozenset[str]]] = {}
    for name, state in optimizer.states.items():
        if name in found.model:
            by_dims.setdefault(len(found.model[name].shape), {})[name] = frozenset(state)
    for states in by_dims.values():
        (common, _), *others = Counter(states.values()).most_common()
        for name, keys in states.items() if others else ():
            strange = [key for key in keys - common if uses[key] == 1 and key not in _STATES]
            half = {"exp_avg", "exp_avg_sq"} <= common and len(keys & {"exp_avg", "exp_avg_sq"}) == 1
            if uses[next(iter(common - keys), "")] > 1 and (strange or (half and keys < common)):
                raise CheckpointDamaged(
                    f"{found.folder}: the optimizer's state of {name!r} has {', '.join(sorted(keys))}, and others have "
                    f"{', '.join(sorted(common))}"
                )


def _check_shapes(state: dict[str, Any], parameter: GlobalTensor) -> None:
    if factored_shape(state) not in (None, parameter.shape):
        raise CheckpointMismatch(
            f"{parameter.where} is {list(parameter.shape)}, and its optimizer's sums over rows and columns are of "
            f"{list(factored_shape(state) or ())}"
        )
    for key in ("exp_avg", "exp_avg_sq", MASTER, "momentum_buffer", "max_exp_avg_sq"):
        value = state.get(key)
        if isinstance(value, GlobalTensor) and value.shape != parameter.shape:
            raise CheckpointMismatch(
                f"{value.where} is {list(value.shape)}, and its parameter is {list(parameter.shape)}"
            )


def _check_steps(found: ForeignCheckpoint, optimizer: ForeignOptimizer) -> None:
    """Compares the steps that the optimizer counts with those that another file states, and takes them where none does.

    Raises CheckpointMismatch where trainer_state.json says fewer. Other files may count other things.
    """
    counted = steps_of(optimizer)
    if found.step is None:
        found.step = counted
    elif counted is not None and counted > found.step and found.trainer_state is not None:
        raise CheckpointMismatch(
            f"{found.folder}: its optimizer has taken {counted} steps, and trainer_state.json says {found.step}; the "
            "files are of several saves. Import the model alone with --model-only"
        )
    elif counted is not None and counted > found.step:
        found.assumed.append(f"the step is {found.step}, as the checkpoint says; its optimizer has taken {counted}")
    elif counted is not None and counted < found.step:
        found.assumed.append(f"the optimizer has taken {counted} of the {found.step} steps, as after skipped ones")


def steps_of(optimizer: ForeignOptimizer) -> int | None:
    """The step that an optimizer counts, None where it does not."""
    for state in optimizer.states.values():
        step = state.get(STEP)
        if isinstance(step, GlobalTensor) and step.shape in ((), (1,)):
            return _whole(scalar(step.pieces[0].array, step.where), step.where)
        if isinstance(step, int | float):
            return _whole(step, "the optimizer's step")
    return None


def _whole(step: int | float, where: str) -> int:
    if (isinstance(step, float) and not (math.isfinite(step) and step.is_integer())) or not 0 <= step < 1 << 53:
        raise CheckpointDamaged(f"{where} is {step}, which is not a step")
    return int(step)
