"""A graph as StableHLO text: how large it is, and what in it does not suit a compiler for accelerators."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stepmark.preflight.precompile.neuron_operators import rejected, unlisted

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
    """What is read from a graph's text.

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
