"""A graph as StableHLO text: how large it is, and what in it does not suit a compiler for accelerators. A table of the
graphs of a run.

Neuron's operators are as of 2026-11-23. Sources: the table "Supported XLA Operators", last changed in 2023
(awsdocs-neuron.readthedocs-hosted.com, release-notes/archive/neuron-cc/neuron-cc-ops/neuron-cc-ops-xla.html), and the
compiler's error codes NCC_EVRF001, NCC_EVRF004 and NCC_EVRF005 (compiler/error-codes). What the table lacks may work:
AWS's own examples use reduce-scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.trainer.telemetry.progress import aligned

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
    """The size of a graph, read from its text: `operations`, constants apart, and `parameters`, the tensors that it is
    given. `problems`: what a compiler for accelerators rejects, or makes slow, in words; `unlisted`: operations that
    Neuron's published list lacks."""

    operations: int
    parameters: int
    problems: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> GraphText:
        names = _OPERATION.findall(text)
        main = next((line for line in text.splitlines() if "func.func @main" in line), "")
        operations, parameters = sum(name not in _NO_OPERATIONS for name in names), len(_ARGUMENT.findall(main))
        unlisted = tuple(sorted(set(names) - LISTED - REJECTED))
        return cls(operations, parameters, tuple(_problems(text, names)), unlisted)


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
    # A constant that is one value repeated takes no room.
    sizes = {kind: _bytes(kind) for value, kind in _CONSTANT.findall(text) if value[:1] in ('"', "[", "_")}
    large = {kind: size for kind, size in sizes.items() if size > LARGE_CONSTANT}
    found += [f"a constant of {size / 2**20:.1f} MB (tensor<{kind}>)" for kind, size in large.items()]
    found += [f"an operation that Neuron's compiler rejects ({name})" for name in sorted(REJECTED.intersection(names))]
    rejected = [kind.rstrip("<") for kind in REJECTED_TYPES if kind in text]
    return found + [f"a type that Neuron's compiler rejects ({kind})" for kind in rejected]


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
REJECTED = frozenset({"triangular_solve"})  # as its compiler is known to do
REJECTED_TYPES = ("complex<", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2FNUZ")

NEW, CACHED, EXTRACTED, UNKNOWN = "new", "in the cache", "extracted", "compiled"


@dataclass(frozen=True)
class Graph:
    """One graph of a run, made in a `part` of it such as "micro-step". `key`: the hash of its text, which is the same
    on all ranks. `seconds`: the time to compile it, or to read it from the cache. `state`: one of the constants
    above."""

    part: str
    content: GraphText
    key: str
    seconds: float
    state: str


HEAD = ("graph", "operations", "parameters", "seconds", "state")


def describe(
    by_rank: Sequence[Sequence[Graph]],
    folder: str | None,
    *,
    reads_back: bool,
    stages: int = 1,
    for_neuron: bool = False,
) -> str:
    """The graphs of the first rank of each pipeline stage as a table, what is wrong with them, and whether the ranks of
    a stage have the same ones.

    Args:
        by_rank: The graphs of each rank, in the order in which they were made.
        folder: Where they are kept; None: nowhere.
        reads_back: Whether a later process on this device reads what was compiled.
        stages: Stages of the ranks' pipeline, each of as many ranks, which are neighbours.
        for_neuron: Whether the graphs are for Neuron's compiler, or may be later.
    """
    size = len(by_rank) // stages
    lines: list[str] = []
    for stage in range(stages):
        first = stage * size
        graphs = by_rank[first]
        rows = [(graph.part, *_sizes(graph), f"{graph.seconds:.1f}", graph.state) for graph in graphs]
        lines += aligned([HEAD, *rows], right=(1, 2, 3))
        seconds = sum(graph.seconds for graph in graphs)
        ranks = f" on each of {size} ranks" if size > 1 else ""
        place = f" of pipeline stage {stage + 1}" if stages > 1 else ""
        kept = "" if folder is None else f", in {folder}"
        lines.append(f"{len(graphs)} graphs{place}{ranks} in {seconds:.1f} seconds{kept}")
        lines += [f"warning: {graph.part}: has {problem}" for graph in graphs for problem in graph.content.problems]
        keys = [[graph.key for graph in each] for each in by_rank[first : first + size]]
        other = next((first + place for place, each in enumerate(keys) if each != keys[0]), None)
        if other is not None:
            but = "with collectives in the graph the run would hang"
            lines.append(f"warning: rank {other} has other graphs than rank {first}; {but}")
    if for_neuron:
        unknown = sorted({name for graphs in by_rank for graph in graphs for name in graph.content.unlisted})
        if unknown:
            listed = f"`{ASK}` shows the compiler's own"
            lines.append(f"note: Neuron's published list of operators lacks {', '.join(unknown)}; {listed}")
    if not reads_back:
        lines.append(
            "note: XLA's CPU client cannot read compiled graphs back, so a run on it compiles them again; set "
            "compile_cache to see in its metrics that it asks for no others"
        )
    return "\n".join(lines)


def _sizes(graph: Graph) -> tuple[str, str]:
    if not graph.key:  # it ran outside of a step boundary, where its text is not known
        return "?", "?"
    return str(graph.content.operations), str(graph.content.parameters)
