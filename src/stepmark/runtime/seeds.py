"""Seeds for the parts of a run that draw random numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stepmark.runtime.base import Runtime


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63), a hash of all parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(runtime: Runtime, value: int) -> None:
    """Seeds all global generators: the device's, torch's of the host, and Python's and numpy's, from which some models
    draw, such as the masks of Wav2Vec2."""
    runtime.seed(value)
    torch.default_generator.manual_seed(value)  # again on eager devices, whose seed is the host's too
    random.seed(value)
    np.random.seed(value % 2**32)


@contextmanager
def kept_host_generators() -> Iterator[None]:
    """Afterwards, Python's and numpy's global generators are where they were: data may be drawn from them."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
