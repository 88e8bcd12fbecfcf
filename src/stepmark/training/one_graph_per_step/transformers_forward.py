"""Runs transformers' models without reading values, on devices where a read waits.

Models read tensors on the host to choose a path, to warn or to check. On a lazy device each read ends the graph and
waits for the device; and where ranks read different values, their graphs differ and the next collective hangs.
transformers leaves such reads out while a graph is traced, which `is_tracing` says; a forward pass on a lazy device is
such a trace. Attention masks depend on which inputs a batch has, not on their values: there is a mask whenever an
attention mask is given, and rows are separate sequences whenever positions are given.

On an eager accelerator a read lets its queue run empty. There the masks that a batch brings along have been looked at
on the host, so that the paths are those of a read; of others, on devices but CUDA's, there is a mask whenever one is
given, and rows are separate sequences whenever positions are.

transformers' functions are replaced once per process, in every module that has imported them. The replacements differ
only inside `forward_without_reads`, and only for tensors of the device: other users of transformers see no change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stepmark.data.loader.batch import known_to_mask_nothing
from stepmark.training.one_graph_per_step.experts import static_experts_forward

DEFAULT_EXPERTS = "grouped_mm"  # transformers' default implementation of experts
_recording: ContextVar[bool] = ContextVar("recording", default=False)  # a lazy device, or a trace without values
_positions_given: ContextVar[bool] = ContextVar("positions_given", default=True)
_on_accelerator: ContextVar[bool] = ContextVar("on_accelerator", default=False)
_masks_nothing: ContextVar[bool | None] = ContextVar("masks_nothing", default=None)  # None: unknown


@contextlib.contextmanager
def _set(*values: tuple[Any, Any]) -> Iterator[None]:
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def is_recorded(value: Any) -> bool:
    """Whether `value` is a tensor without values, lazy or fake, in a forward pass that this thread records."""
    if not _recording.get() or not isinstance(value, Tensor):
        return False
    return value.device.type == "xla" or isinstance(value, FakeTensor)


def replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    """Sets `name` in all loaded modules of transformers that hold `original`; those loaded later import it from one."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def lazy_forward(inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Around a forward pass with `inputs` on a lazy device."""
    _replace_reads()
    return _set((_recording, True), (_positions_given, "position_ids" in inputs))


def forward_without_reads(inputs: Mapping[str, Any], *, lazy: bool) -> AbstractContextManager[None]:
    """Around a forward pass with `inputs` on a lazy device or an eager one; nothing on the CPU."""
    if lazy:
        return lazy_forward(inputs)
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    if all(value.device.type == "cpu" for value in values if isinstance(value, Tensor)):
        return contextlib.nullcontext()
    _replace_reads()
    masks = {known_to_mask_nothing(value) for name, value in inputs.items() if name.endswith("attention_mask")}
    known = masks.pop() if len(masks) == 1 else None
    return _set((_on_accelerator, True), (_positions_given, "position_ids" in inputs), (_masks_nothing, known))


def _is_there(value: Any) -> bool:
    """Whether `value` is a tensor of the accelerator, in such a forward pass."""
    return _on_accelerator.get() and isinstance(value, Tensor) and value.device.type != "cpu"


def recorded_checkpoint(
    checkpoint: Callable[..., Any], trains: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """A reentrant activation checkpointing function, `checkpoint(function, *args)`, that records `function` when the
    backward pass calls it again, on another thread, as well.

    A reentrant function gives no gradients to a layer none of whose inputs has one, as behind frozen embeddings. Where
    `trains()` says that there are parameters to train, an input then gets a gradient, which is not used.
    """

    def checkpoint_recorded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept anyway, and it would warn
            return function(*args, **options)

        def recorded(*inputs: Any, **more: Any) -> Any:
            with _set((_recording, True)):
                return function(*inputs, **more)

        return checkpoint(recorded, *(_with_gradient(args) if trains() else args), **options)

    return checkpoint_recorded


def capturing_checkpoint(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A reentrant activation checkpointing function, `checkpoint(function, *args)`, through which losses of what
    transformers captures inside of `function`, such as router logits, have gradients.

    Hooks capture it in the first pass, which has no gradients, and what they find in the second is not read. So
    what is captured is given back by the function, too.
    """

    def checkpoint_captured(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from transformers.utils.output_capturing import _active_collector

        captured = _active_collector.get()  # by the model that is called, so far: lists of outputs, by name
        if not captured or not torch.is_grad_enabled():
            return checkpoint(function, *args, **options)
        before = {name: len(values) if isinstance(values, list) else values for name, values in captured.items()}
        names: list[str] = []
        several = False

        def with_captured(*inputs: Any, **more: Any) -> tuple[Any, ...]:
            nonlocal several
            own = {name: [None] * each if isinstance(each, int) else each for name, each in before.items()}
            with _set((_active_collector, own)):
                output = function(*inputs, **more)
            several = isinstance(output, tuple)
            found = list(output) if isinstance(output, tuple) else [output]
            names.clear()
            for name, length in before.items():
                for each in own[name][length:] if isinstance(length, int) else ():
                    same = any(each is other for other in (*inputs, *found))
                    found.append(each.clone() if same and isinstance(each, Tensor) else each)
                    names.append(name)
            return tuple(found)

        (*outputs,) = checkpoint(with_captured, *args, **options)
        for name, each in zip(names, outputs[len(outputs) - len(names) :], strict=True):
            captured[name].append(each)
        outputs = outputs[: len(outputs) - len(names)]
        return tuple(outputs) if several else outputs[0]

    return checkpoint_captured


def _with_gradient(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs, of which one has a gradient if any can."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    first = next((each for each in tensors if each.is_floating_point()), None)
    if first is None or any(each.requires_grad for each in tensors):
        return inputs
    return tuple(each.detach().requires_grad_() if each is first else each for each in inputs)


@functools.cache
def _replace_reads() -> None:
    from transformers import masking_utils
    from transformers.utils import import_utils

    is_tracing = import_utils.is_tracing
    check = import_utils.torch_compilable_check

    @functools.wraps(is_tracing)
    def is_tracing_or_recorded(tensor: Any = None) -> bool:
        # A path is taken without looking at the tensor: the one that is right whatever it holds. On CUDA only where a
        # look would lead to it.
        unread = _is_there(tensor) and (tensor.device.type != "cuda" or _masks_nothing.get() is False)
        return is_recorded(tensor) or unread or is_tracing(tensor)

    @functools.wraps(check)
    def check_unless_recorded(cond: Any, *args: Any, **options: Any) -> None:
        if _recording.get() and callable(cond):
            cond = cond()
        if not is_recorded(cond):
            check(cond, *args, **options)

    find_packed = masking_utils.find_packed_sequence_indices

    def find_packed_if_given(position_ids: Tensor) -> Tensor | None:
        if (is_recorded(position_ids) or _is_there(position_ids)) and not _positions_given.get():
            return None
        return find_packed(position_ids)

    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "create_recurrent_attention_mask"):
        if (original := getattr(masking_utils, name, None)) is not None:
            replace_everywhere(name, original, _with_known_mask(original))
    _warn_once()
    replace_everywhere("is_tracing", is_tracing, is_tracing_or_recorded)
    replace_everywhere("torch_compilable_check", check, check_unless_recorded)
    replace_everywhere("find_packed_sequence_indices", find_packed, find_packed_if_given)
    _replace_experts_function()
    _replace_histogram()


def _with_known_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads whether its mask masks anything; one that is known not to is as good as none."""
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def with_known_mask(*args: Any, **options: Any) -> Any:
        bound = parameters.bind(*args, **options)
        given = bound.arguments
        name = "padding_mask" if "padding_mask" in given else "attention_mask"
        whole = given.get("q_length") == given.get("kv_length") or "q_length" not in given
        if whole and _is_there(given.get(name)) and given[name].ndim == 2 and _masks_nothing.get():
            given[name] = None
        return function(*bound.args, **bound.kwargs)

    return with_known_mask


def _warn_once() -> None:
    """transformers looks for padding in every batch, and warns once; on an accelerator it looks at a model's first."""
    from transformers import PreTrainedModel

    original: Any = PreTrainedModel.warn_if_padding_and_no_attention_mask

    @functools.wraps(original)
    def warn_once(self: Any, input_ids: Any, attention_mask: Any) -> None:
        if not _is_there(input_ids):
            original(self, input_ids, attention_mask)
        elif type(self) not in _looked_at:
            _looked_at.add(type(self))
            with _set((_on_accelerator, False)):
                original(self, input_ids, attention_mask)

    PreTrainedModel.warn_if_padding_and_no_attention_mask = warn_once  # type: ignore[method-assign]


_looked_at: set[type] = set()


def _replace_experts_function() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    original: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[DEFAULT_EXPERTS]

    def grouped_or_static(experts: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        forward = static_experts_forward if is_recorded(hidden_states) else original
        return forward(experts, hidden_states, *args, **options)

    ALL_EXPERTS_FUNCTIONS.register(DEFAULT_EXPERTS, grouped_or_static)


def _replace_histogram() -> None:
    """Losses of routers count how often each expert is chosen; XLA has no histogram, and the host none of integers."""
    original: Any = torch.histc

    @functools.wraps(original)
    def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0, **options: Any) -> Tensor:
        counts = min == 0 and max in (bins - 1, bins) and not input.is_floating_point()
        if not (counts and is_recorded(input)):
            return original(input, bins, min, max, **options)
        return (input.reshape(-1, 1) == torch.arange(bins, device=input.device)).sum(0, dtype=input.dtype)

    torch.histc = histc  # type: ignore[assignment]
