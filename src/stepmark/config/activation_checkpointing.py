"""The options of activation checkpointing, with the names of `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepmark.config.yaml_file import parse_options
from stepmark.errors import UsageError

FIELD = "gradient_checkpointing_kwargs"
REENTRANT = "use_reentrant"
CHOICES: dict[str, tuple[Any, ...]] = {
    REENTRANT: (True, False),
    "preserve_rng_state": (True, False),
    "determinism_check": ("default", "none"),
    "debug": (True, False),
}
ON_LAZY_DEVICES = (REENTRANT, "preserve_rng_state")


def checkpointing_options(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """`gradient_checkpointing_kwargs` as a mapping. Raises UsageError for text, options or values that are wrong."""
    options = parse_options(FIELD, given)
    for name, value in options.items():
        if name not in CHOICES:
            raise UsageError(f"{FIELD}: {name!r} is not supported; it has {', '.join(CHOICES)}")
        if value not in CHOICES[name]:
            raise UsageError(f"{FIELD}: {name} should be {CHOICES[name][0]} or {CHOICES[name][1]}, and is {value!r}")
    return options


def for_device(options: Mapping[str, Any], *, lazy: bool) -> dict[str, Any]:
    """What the checkpointing function of a device gets. Raises UsageError where a lazy device lacks an option."""
    if not lazy:
        return {REENTRANT: False, **options}
    for name in options:
        if name not in ON_LAZY_DEVICES:
            raise UsageError(f"{FIELD}: lazy devices lack {name}; leave it out")
    return {**options, REENTRANT: True}  # torch_xla's function, which is reentrant
