"""What a program would have computed with other values of some tensors, found out in the one call that it gets.

A second call of a user's model or loss would repeat its side effects: counters, running statistics, prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Others = list[Tensor | None]
READS = ("item", "tolist", "numpy", "__float__", "__int__", "__index__")


class Alternatives(TorchFunctionMode):
    """While entered, operations on tensors that depend on the given ones are also computed with their other values.

    Values that Python reads, as for a branch, are the actual ones. Operations that PyTorch does not see, such as
    numpy's, and those that fail with other values, have no alternative. `read` has what the tensors that
    Python has read have in the alternatives.

    Args:
        given: Tensors, each with its other values: one for each alternative.
    """

    def __init__(self, given: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
        super().__init__()
        self.read: list[Others] = []
        self._count = len(given[0][1])
        self._found: dict[int, tuple[Tensor, Others]] = {id(each): (each, list(others)) for each, others in given}

    def of(self, value: Any) -> Others | None:
        """A tensor's values in the alternatives, None where there is none; None for one that depends on nothing."""
        return self._found[id(value)][1] if isinstance(value, Tensor) and id(value) in self._found else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, form = tree_flatten((tuple(args), dict(kwargs)))
        if not any(self.of(each) is not None for each in flat):
            return func(*args, **kwargs)
        for each in _written(func, args, kwargs):
            if self.of(each) is None:
                self._found[id(each)] = each, [each.detach().clone() for _ in range(self._count)]
        others = [self.of(each) for each in flat]
        devices = _drawing_devices(flat)
        before = _generator_states(devices)
        if getattr(func, "__name__", "") in READS:
            self.read += [each for each in others if each is not None]
        result = func(*args, **kwargs)  # first: autocast keeps what it casts, and has to see the graph
        after = _generator_states(devices)
        found = []
        for which in range(self._count):
            _set_generators(devices, before)
            found.append(_computed(func, form, flat, others, which))
        _set_generators(devices, after)
        for place, each in enumerate(tree_leaves(result)):
            if isinstance(each, Tensor):
                self._found[id(each)] = each, [None if leaves is None else leaves[place] for leaves in found]
        return result


def _computed(func: Any, form: Any, flat: list[Any], others: list[Others | None], which: int) -> list[Any] | None:
    """The leaves of the operation's result in one alternative; None where it has none."""
    values = [each if other is None else other[which] for each, other in zip(flat, others, strict=True)]
    if any(value is None and other is not None for value, other in zip(values, others, strict=True)):
        return None
    args, kwargs = tree_unflatten(values, form)
    try:
        with torch.no_grad():
            return tree_leaves(func(*args, **kwargs))
    except Exception:  # of any kind, such as rows that are selected by labels, of which there are none
        return None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes, by the conventions of PyTorch's names."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return [each for each in (*args[: int(in_place)], kwargs.get("out")) if isinstance(each, Tensor)]


def _drawing_devices(flat: list[Any]) -> list[torch.device]:
    """The devices from whose generators an operation on these tensors may draw."""
    found = {each.device for each in flat if isinstance(each, Tensor) and each.device.type not in ("xla", "meta")}
    return sorted(found | {torch.device("cpu")}, key=str)


def _generator_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_device_module(each).get_rng_state(each) if each.type != "cpu" else torch.get_rng_state()
        for each in devices
    ]


def _set_generators(devices: list[torch.device], states: list[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
