"""What is called when autograd has made a parameter's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from stepmark.errors import UsageError

_holders: Any = WeakTensorKeyDictionary()  # by parameter: a weak reference to the hooks that take its gradient


class GradientHooks:
    """Calls `arrived(owner, index)` when autograd has made the gradient of the parameter with that index, after all
    hooks of the user's, which may change it.

    The owner takes the gradient away, so that only one can have hooks of a parameter: the last one that was made. They
    end with `close`, or with the owner.

    Attributes:
        taken: Whether another owner has the gradients now.
    """

    def __init__(
        self, owner: object, parameters: Sequence[nn.Parameter], arrived: Callable[[Any, int], object]
    ) -> None:
        self.taken = False
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(owner)
        for index, parameter in enumerate(parameters):
            before = _holders.get(parameter)
            holder = before() if before is not None else None
            if holder is not None:
                holder.close()
                holder.taken = True
            _holders[parameter] = weakref.ref(self)
            self._handles.append(parameter.register_post_accumulate_grad_hook(_hook(me, index, arrived)))
        weakref.finalize(self, _remove, self._handles)

    def close(self) -> None:
        """Nothing is called from now on."""
        _remove(self._handles)
        self._handles.clear()

    def come_last(self) -> None:
        """Moves behind hooks that the user has registered in the meantime."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd does not see what move_to_end does

    def check(self) -> None:
        """Raises UsageError where another owner has the gradients."""
        if self.taken:
            raise UsageError(
                "another optimizer was made over parameters of this one, and it gets their gradients; step that one, "
                "or make this one anew"
            )


def _hook(owner: Callable[[], Any], index: int, arrived: Callable[[Any, int], object]) -> Callable[[object], None]:
    def hook(_: object) -> None:  # what it is called with may be the result of a hook of the user's
        there = owner()
        if there is not None:
            arrived(there, index)

    return hook


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
