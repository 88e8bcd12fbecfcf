"""What the user's code that makes batches keeps between calls: generators of its own, and numbers."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from stepmark.runtime.seeds import GENERATORS

GLOBAL: tuple[Any, ...] = (random._inst, np.random.mtrand._rand, torch.default_generator)
PARTS = (*GENERATORS, DataLoader, Dataset, Sampler)
INSIDE = ("base_dataloader", "batch_sampler", "collate_fn", "dataset", "sampler")  # also if of another class
LONGEST = 100  # of a list that is looked into: others are of samples
LIBRARIES = ("accelerate", "datasets", "stepmark", "tokenizers", "torch", "torchdata", "transformers")
_OTHERS = {*LIBRARIES, *sys.stdlib_module_names, "fsspec", "huggingface_hub", "numpy", "pyarrow", "typing_extensions"}


def _is_part(each: Any) -> bool:
    return isinstance(each, PARTS)


def _may_reach(each: Any) -> bool:
    """Whether it is a part, or a function or an object of the user's, which may hold or find generators."""
    own = _is_own(each if inspect.isfunction(each) else type(each)) and not isinstance(each, torch.nn.Module)
    return own or isinstance(each, PARTS)


def parts_of(*roots: Any, wanted: Callable[[Any], bool] = _is_part) -> list[Any]:
    """The objects, and the loaders, datasets, samplers, collators and generators that these are made of, each once and
    in the same order in every process. Global generators are left out."""
    found: dict[int, Any] = {id(each): each for each in (None, *GLOBAL)}
    waiting = list(roots)
    for each in waiting:
        if id(each) not in found:
            found[id(each)] = each
            waiting += _inside(each, wanted)
    return list(found.values())[1 + len(GLOBAL) :]


def _inside(owner: Any, wanted: Callable[[Any], bool] = _is_part) -> Iterator[Any]:
    if isinstance(owner, partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())
    elif inspect.isfunction(owner):
        values = [each.cell_contents for each in owner.__closure__ or () if each != CellType()]  # those that are set
        values += owner.__defaults__ or ()
        yield from filter(wanted, [*values, *map(owner.__globals__.get, _names_in(owner.__code__))])
    elif inspect.ismethod(owner):
        yield owner.__self__
    else:
        if wanted is _may_reach:
            yield from filter(
                inspect.isfunction,
                [each for kind in type(owner).__mro__ if _is_own(kind) for each in vars(kind).values()],
            )
            yield from (each.function for each in chain(owner) if hasattr(each, "function"))
        for name, each in getattr(owner, "__dict__", {}).items():
            if name in INSIDE or wanted(each):
                yield each
            elif isinstance(each, (list, tuple, dict)) and len(each) <= LONGEST:  # as of a ConcatDataset
                yield from filter(wanted, each.values() if isinstance(each, dict) else each)


def _names_in(code: CodeType) -> list[str]:
    """What a function looks up outside, with the comprehensions and functions inside it."""
    return [*code.co_names, *(name for each in code.co_consts if inspect.iscode(each) for name in _names_in(each))]


def chain(dataset: Any) -> list[Any]:
    """What a dataset of `datasets` is made of; nothing of others."""
    found = [each for each in (getattr(dataset, "_ex_iterable", None),) if each is not None]
    for each in found:
        found += [inner for inner in (getattr(each, "ex_iterable", None),) if inner is not None]
        found += getattr(each, "ex_iterables", ())
    return found


def shuffles_of(dataset: Any) -> str | None:
    """A checksum of the generators that shuffle or interleave a stream of `datasets`: without a seed always another."""
    drawn = [state_of(each.generator) for each in chain(dataset) if getattr(each, "generator", None) is not None]
    return hashlib.blake2b(repr(drawn).encode(), digest_size=16).hexdigest() if drawn else None


def generators_of(*roots: Any) -> list[Any]:
    """Those of the parts, and those that functions, methods and objects of the user's in them hold or find."""
    return [each for each in parts_of(*roots, wanted=_may_reach) if isinstance(each, GENERATORS)]


def generators_kept_by(*owners: Any) -> list[Any]:
    """Generators that are attributes of these objects or that their methods find outside, and those that these
    functions find or these methods reach: each once, and no global one. What else the object of a method has, such as
    the generator of a sampler, is left out."""
    named = [each for owner in owners if inspect.ismethod(owner) for each in _reached(owner)]
    whole = [each for each in owners if not inspect.ismethod(each)]
    kinds = dict.fromkeys(kind for owner in whole for kind in type(owner).__mro__ if _is_own(kind))
    methods = [each for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)]
    inside = (each for owner in (*whole, *methods) for each in _inside(owner))
    found = {id(each): each for each in (*inside, *named)}
    return [each for each in found.values() if isinstance(each, GENERATORS) and all(each is not one for one in GLOBAL)]


def _reached(method: Any) -> Iterator[Any]:
    """What a method of the user's, and the methods that it calls, find: attributes of their object, and outside."""
    owner, names = method.__self__, [method.__name__]
    for name in names:
        found = (vars(kind).get(name) for kind in type(owner).__mro__ if _is_own(kind))
        for function in map(inspect.unwrap, filter(inspect.isfunction, found)):
            used = _names_in(function.__code__)
            yield from _inside(function)
            yield from _inside(SimpleNamespace(**{key: vars(owner)[key] for key in used if key in vars(owner)}))
            names += [key for key in used if key not in names]


def _is_own(kind: Any) -> bool:
    """Whether a class or function is of the user's."""
    return str(kind.__module__).partition(".")[0] not in _OTHERS


def own_state(*roots: Any) -> dict[str, Any]:
    """By place and name: the states of generators, and the numbers and strings of parts of the user's classes."""
    found: dict[str, Any] = {}
    for place, each in _places(*roots).items():
        if isinstance(each, GENERATORS):
            found[place] = state_of(each)
        elif _is_own(type(each)):
            values = {**vars(type(each)), **getattr(each, "__dict__", {})}.items()
            plain = ((name, value) for name, value in values if type(value) in (bool, int, float, str))
            found |= {f"{place}.{name}": value for name, value in plain if not name.startswith("__")}
    return found


def _places(*roots: Any) -> dict[str, Any]:
    """The parts by number, and with a `+` the generators that are found beyond them."""
    parts = {str(place): each for place, each in enumerate(parts_of(*roots))}
    known = set(map(id, parts.values()))
    return parts | {f"+{place}": each for place, each in enumerate(generators_of(*roots)) if id(each) not in known}


def changed_state(before: Mapping[str, Any], *roots: Any) -> dict[str, Any]:
    """What of `own_state` is not as it was before."""
    return {name: value for name, value in own_state(*roots).items() if not is_same(value, before.get(name))}


def set_own_state(values: Mapping[str, Any], *roots: Any) -> None:
    known, parts = own_state(*roots), _places(*roots)
    for key in values.keys() & known.keys():
        place, _, name = key.partition(".")
        if name:
            setattr(parts[place], name, values[key])
        else:
            set_state(parts[place], values[key])


def is_same(state: Any, other: Any) -> bool:
    return as_bytes(state) == as_bytes(other)


def as_bytes(state: Any) -> bytes:
    """Of plain values, arrays or a tensor, the same in every process: without references to what is met again."""
    plain: Any = state.numpy() if isinstance(state, torch.Tensor) else state
    return marshal.dumps(plain, 2)


def state_of(generator: Any) -> Any:
    """The state, as values that a checkpoint can have."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        is_tensor = isinstance(state, torch.Tensor)
        generator.set_state(state if is_tensor else torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
