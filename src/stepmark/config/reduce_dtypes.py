"""The types in which data parallel ranks send each other gradients."""

from __future__ import annotations

from stepmark.errors import UsageError

REDUCE_DTYPES = ("float32", "bfloat16")


def check_reduce_dtype(name: str, *, lazy: str | None = None) -> None:
    """Raises UsageError for a type in which gradients cannot be sent, or not by `lazy`, a lazy device's name."""
    if name not in REDUCE_DTYPES:
        raise UsageError(f"reduce_dtype: {name!r} is unknown; choose one of {', '.join(REDUCE_DTYPES)}")
    if lazy is not None and name != "float32":
        raise UsageError(
            f"reduce_dtype: {lazy} adds gradients in the type in which they are sent, so {name} would lose what "
            "float32 sums keep; leave it out"
        )
