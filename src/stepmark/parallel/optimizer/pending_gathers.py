"""Parameters whose new values are still on their way from the ranks that have updated them.

ZeRO-1's all-gather overlaps with what follows the step, up to the next forward pass: each parameter is waited for when
its values are used. That is seen in two ways. Until its values are there, a parameter has a class whose functions wait
for them (`__torch_function__`), wherever they are called; and a module that is called waits for its own parameters,
which may go to code that is none of torch's functions.

Neither sees compiled code that is given parameters of other modules, nor the transforms of torch.func, which hide them
in tensors of their own. Models of libraries do no such thing (`of_known_libraries`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

Finish = Callable[[], object]
Use = Callable[[Tensor], None]

LIBRARIES = frozenset({"torch", "transformers", "peft", "stepmark"})

_PROPERTIES = (
    "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse",
    "is_xla", "layout", "names", "ndim", "requires_grad", "shape", "_version",
)  # fmt: skip
_METHODS = ("__hash__", "__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point",
            "nelement", "numel", "requires_grad_", "size", "storage_offset", "stride")  # fmt: skip
WITHOUT_VALUES = frozenset(
    [
        getattr(getattr(Tensor, name), access)
        for name in _PROPERTIES
        for access in ("__get__", "__set__", "__delete__")
        if hasattr(Tensor, name)
    ]
    + [getattr(Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)  # functions that are about something of a tensor other than its values

_uses: dict[int, Callable[[], None]] = {}  # by the id of a parameter whose values are on their way


def of_known_libraries(model: nn.Module) -> bool:
    """Whether no code of the user's, or of a model's author, is in the model."""
    return all(type(module).__module__.partition(".")[0] in LIBRARIES for module in model.modules())


class PendingParameter(nn.Parameter):
    """What a parameter is until its values are there. New ones, such as copies, are parameters like others."""

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if type(each) is PendingParameter:
                _uses[id(each)]()
        return func(*args, **kwargs)


def _mark(parameters: Iterable[Tensor], use: Use) -> None:
    """From now on `use` is called before anything uses the values of one of the parameters."""
    for each in parameters:
        _uses[id(each)] = partial(use, each)
        each.__class__ = PendingParameter


def _unmark(parameters: Iterable[Tensor]) -> None:
    for each in parameters:
        if id(each) in _uses:
            each.__class__ = nn.Parameter
            del _uses[id(each)]


class PendingGathers:
    """What an optimizer's step has left to wait for, in groups of parameters that arrive together.

    Without `defer`, nothing is on its way once the optimizer's step has returned. The first forward pass with it is a
    trial: where a parameter gets a gradient though no use of it was seen, such as in a graph that is replayed, steps
    wait at once. Whatever sets `defer` calls `watch` after each step, before anything else uses parameters.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]] = ()) -> None:
        self._groups = [list(group) for group in groups]  # which keeps ids unique
        self._pending: dict[int, Finish] = {}
        self._lock = threading.RLock()
        self._trial = _Trial()
        self._hook: RemovableHandle | None = None
        self.defer = False  # whether a step may leave something to wait for

    def start(self, started: Mapping[int, Finish]) -> None:
        """Groups are on their way, by number; the functions wait for them."""
        self._pending.update(started)
        self._trial.end()
        if not self.defer or not self._trial.passed:
            self.wait()

    def watch(self) -> None:
        """From now on, what uses parameters waits for their values."""
        for number in list(self._pending):
            if all(type(each) is nn.Parameter for each in self._groups[number]):
                _mark(self._groups[number], partial(self._wait, number))
            else:  # of a class of the user's
                self._wait(number)
        if self._pending and self._hook is None:
            self._hook = register_module_forward_pre_hook(_use_own)

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for everything."""
        with self._lock:
            for number in list(self._pending):
                self._wait(number)
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    @torch.no_grad()
    def _wait(self, number: int, *_: Tensor) -> None:
        with self._lock:
            finish = self._pending.get(number)  # another thread may have waited meanwhile
            if finish is not None:
                # It may use the parameters itself, and is no part of what torch.func transforms.
                with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
                    finish()
                _unmark(self._groups[number])
                del self._pending[number]

    @contextmanager
    def first_use(self) -> Iterator[None]:
        """Around the first forward pass of a step, after which nothing is on its way any more."""
        if self.defer and not self._trial.over and self._groups:
            with self._trial.run([each for group in self._groups for each in group]):
                yield
            return
        yield
        self.wait()


class _Trial:
    """Whether all parameters that get a gradient in a step are seen when they are used."""

    def __init__(self) -> None:
        self.over = False  # whether it has been held
        self._hidden = False
        self._handles: list[RemovableHandle] | None = None

    @property
    def passed(self) -> bool:
        return self.over and not self._hidden

    @contextmanager
    def run(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around the step's first forward pass."""
        self._stop_looking()  # in a step whose gradients overflowed, so that there was no update
        seen: set[int] = set()

        def use(parameter: Tensor) -> None:
            seen.add(id(parameter))
            _unmark([parameter])

        tried = [each for each in parameters if type(each) is nn.Parameter]
        _mark(tried, use)
        handle = register_module_forward_pre_hook(_use_own)
        try:
            yield
        finally:
            handle.remove()
            _unmark(tried)
        unseen = [each for each in tried if each.requires_grad and id(each) not in seen]
        self._handles = [each.register_post_accumulate_grad_hook(self._found) for each in unseen]

    def _found(self, _: Tensor) -> None:
        self._hidden = True

    def end(self) -> None:
        """After the step's backward passes."""
        self.over |= self._handles is not None
        self._stop_looking()

    def _stop_looking(self) -> None:
        for handle in self._handles or ():
            handle.remove()
        self._handles = None


def _use_own(module: nn.Module, _: object) -> None:
    """Before a module is called: its own parameters are used; in place of them it may have been given what was
    made of some parameters (`torch.func.functional_call`)."""
    for each in module._parameters.values():
        if type(each) is PendingParameter:
            _uses[id(each)]()
        elif type(each) is Tensor:
            for use in list(_uses.values()):
                use()
