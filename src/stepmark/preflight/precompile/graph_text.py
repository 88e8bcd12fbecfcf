"""A graph as StableHLO text: how large it is, and what in it does not suit a compiler for accelerators.

Neuron's operators are as of 2026-11-23. Sources: the table "Supported XLA Operators", last changed in 2023
(awsdocs-neuron.readthedocs-hosted.com, release-notes/archive/neuron-cc/neuron-cc-ops/neuron-cc-ops-xla.html), and the
compiler's error codes NCC_EVRF001, NCC_EVRF004 and NCC_EVRF005 (compiler/error-codes). What the table lacks may work:
AWS's own examples use reduce-scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

LARGE_CONSTANT = 2**20  # bytes
_BITS = re.compile(r"[a-z]+(\d+)")
_OPERATION = re.compile(r'^\s*(?:%[\w:#, ]+ = )?"?(?:stablehlo|chlo|mhlo)\.(\w+)', re.MULTILINE)
_ARGUMENT = re.compile(r"%arg\d+: tensor<")
_TENSOR = re.compile(r"tensor<([^<>]*)>")
_CONSTANT = re.compile(r"stablehlo\.constant dense(?:_resource)?<(.*?)> : tensor<([^<>]*)>")
_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.]+)")
_CALLBACK = re.compile(r"callback|host", re.IGNORECASE)
_NO_OPERATIONS = ("constant", "return")


@dataclass(frozen=True)
class GraphText:
    """The size and the problems of a graph, read from its text.

    Attributes:
        operations: Number of operations, constants apart.
        parameters: Number of tensors that the graph is given.
        problems: What a compiler for accelerators rejects, or makes slow, in words.
        unlisted: Operations that Neuron's published list lacks.
    """

    operations: int
    parameters: int
    problems: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> GraphText:
        names = _OPERATION.findall(text)
        main = next((line for line in text.splitlines() if "func.func @main" in line), "")
        return cls(
            sum(name not in _NO_OPERATIONS for name in names),
            len(_ARGUMENT.findall(main)),
            (*_problems(text, names), *rejected(text, names)),
            unlisted(names),
        )


def _problems(text: str, names: list[str]) -> list[str]:
    found = []
    dynamic = sorted({name for name in names if name.startswith(("dynamic_reshape", "real_dynamic", "set_dimension"))})
    types = set(_TENSOR.findall(text))
    if dynamic or any("?" in kind for kind in types):
        found.append(f"a shape that depends on values{f' ({dynamic[0]})' if dynamic else ''}")
    double = sorted((kind for kind in types if kind == "f64" or kind.endswith("xf64")), key=_elements)
    if double and _elements(double[-1]) > 1:
        found.append(f"64-bit floats (tensor<{double[-1]}>)")
    callbacks = sorted({name for name in _CUSTOM_CALL.findall(text) if _CALLBACK.search(name)})
    found += [f"a call to the host ({name})" for name in callbacks]
    found += [f"a constant of {size / 2**20:.1f} MB (tensor<{kind}>)" for kind, size in _large_constants(text)]
    return found


def _large_constants(text: str) -> list[tuple[str, int]]:
    """Type and bytes of constants that are not one value repeated."""
    sizes = {kind: _bytes(kind) for value, kind in _CONSTANT.findall(text) if value[:1] in ('"', "[", "_")}
    return [(kind, size) for kind, size in sizes.items() if size > LARGE_CONSTANT]


def _elements(kind: str) -> int:
    return math.prod(int(size) for size in kind.split("x")[:-1] if size.isdigit())


def _bytes(kind: str) -> int:
    bits = _BITS.fullmatch(kind.split("x")[-1])
    return _elements(kind) * (int(bits.group(1)) if bits else 32) // 8


ASK = "neuronx-cc list-operators --framework XLA"
_TABLE = """
abs add all_gather all_reduce and atan2 batch_norm_grad batch_norm_inference batch_norm_training bitcast_convert
broadcast broadcast_in_dim ceil clamp compare concatenate constant convert cosine custom_call divide dot dot_general
dynamic_update_slice exponential floor gather get_tuple_element iota log maximum minimum multiply negate not pad power
reduce reshape return reverse rng rng_bit_generator rsqrt scatter select select_and_scatter shift_right_logical sign
sine slice sqrt subtract tanh transpose tuple
"""
LISTED = frozenset(_TABLE.split())  # by their names in StableHLO
REJECTED = frozenset({"triangular_solve"})
REJECTED_TYPES = ("complex<", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2FNUZ")


def unlisted(operations: Iterable[str]) -> tuple[str, ...]:
    """The operations that the published table lacks."""
    return tuple(sorted(set(operations) - LISTED - REJECTED))


def rejected(text: str, operations: Iterable[str]) -> list[str]:
    """The parts of a graph that Neuron's compiler is known to reject, in words."""
    named = [f"an operation that Neuron's compiler rejects ({name})" for name in sorted(REJECTED & set(operations))]
    types = [kind.rstrip("<") for kind in REJECTED_TYPES if kind in text]
    return named + [f"a type that Neuron's compiler rejects ({kind})" for kind in types]


NEW, CACHED, EXTRACTED, UNKNOWN = "new", "in the cache", "extracted", "compiled"


@dataclass(frozen=True)
class Graph:
    """One graph of a run.

    Attributes:
        part: Of the run, such as "micro-step".
        content: Its size and problems.
        key: Hash of its text, which is the same on all ranks.
        seconds: Time to compile it, or to read it from the cache.
        state: One of the constants above.
    """

    part: str
    content: GraphText
    key: str
    seconds: float
    state: str
