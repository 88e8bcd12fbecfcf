"""What AWS publishes about the operations that Neuron's compiler takes.

As of 2026-11-23. Sources: the table "Supported XLA Operators", which was last changed in 2023
(awsdocs-neuron.readthedocs-hosted.com, release-notes/archive/neuron-cc/neuron-cc-ops/neuron-cc-ops-xla.html), and the
compiler's error codes NCC_EVRF001, NCC_EVRF004 and NCC_EVRF005 (compiler/error-codes). What the table lacks may work:
AWS's own examples use reduce-scatter. `neuronx-cc list-operators --framework XLA` lists what an installed compiler
takes.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    """What in a graph the compiler is known to reject, in words."""
    named = [f"an operation that Neuron's compiler rejects ({name})" for name in sorted(REJECTED & set(operations))]
    types = [kind.rstrip("<") for kind in REJECTED_TYPES if kind in text]
    return named + [f"a type that Neuron's compiler rejects ({kind})" for kind in types]
