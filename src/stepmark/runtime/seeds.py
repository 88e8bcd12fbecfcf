"""Seeds for the parts of a run that draw random numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stepmark.runtime.base import Runtime

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63), a hash of all parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed(generator: Any, word: np.ndarray) -> None:
    """Seeds one of `GENERATORS` with a word, uint64 [1]."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(int(word[0])).state
    elif isinstance(generator, torch.Generator):  # not torch.manual_seed, which seeds those of accelerators as well
        generator.manual_seed(int(word[0]))
    else:
        generator.seed(word.view(np.uint32) if isinstance(generator, np.random.RandomState) else int(word[0]))


def seed_generators(runtime: Runtime, value: int, own: Iterable[Any] = ()) -> None:
    """Seeds all global generators: the device's, torch's of the host, and Python's and numpy's, from which some models
    draw, such as the masks of Wav2Vec2. And the user's `own`."""
    runtime.seed(value)
    torch.default_generator.manual_seed(value)  # again on eager devices, whose seed is the host's too
    random.seed(value)
    np.random.seed(value % 2**32)
    for place, each in enumerate(own):
        seed(each, np.array([derive_seed(value, place)], np.uint64))


@contextmanager
def kept_host_generators() -> Iterator[None]:
    """Afterwards, Python's and numpy's global generators are where they were: data may be drawn from them."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
