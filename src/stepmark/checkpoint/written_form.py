"""How transformers writes a model: the names and layouts of its tensors in files, where memory has others.

Since its fifth release, transformers keeps some tensors joined, transposed or under other names in memory, and undoes
that in `save_pretrained`. It does so here with tensors of the meta device, whose views say what was moved where.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stepmark.sharding.layout import Shape

logger = logging.getLogger("stepmark")

# A view: the name of a tensor, or [what it is a view of, first element, lengths, strides]. That is a name, or what is
# made of several: [shape, [[view, where it begins], ...]].
View = Any
WrittenForm = dict[str, View]

_known: WeakKeyDictionary[nn.Module, tuple[Any, WrittenForm]] = WeakKeyDictionary()


def written_form(module: Any, shapes: Mapping[str, Shape]) -> WrittenForm:
    """What `save_pretrained` writes, by name, where that is not the tensor of this name; None: nothing of this name.

    Args:
        module: A model of transformers; for any other module there is nothing.
        shapes: The global shapes of its tensors.
    """
    model: Any = getattr(module, "transformers_model", module)
    if "transformers" not in sys.modules or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return {}
    key = dict(shapes), getattr(model, "_weight_conversions", None)
    if _known.get(model, (None,))[0] != key:
        try:
            _known[model] = key, _undone(model, shapes)
        except Exception as error:  # of a release whose conversions do something else
            _known[model] = key, {}
            told = "its folders have the names of tensors in memory, not those of save_pretrained, which are unclear"
            logger.warning("%s: %s (%r)", type(model).__name__, told, error)
    return _known[model][1]


def _undone(model: Any, shapes: Mapping[str, Shape]) -> WrittenForm:
    from transformers.core_model_loading import revert_weight_conversion

    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    known = ("config", "base_model_prefix", "_weight_conversions")
    read = {each: getattr(model, each) for each in known if hasattr(model, each)}
    with _Moves() as moves:
        own = {name: moves.source(name, shape) for name, shape in shapes.items() if name not in left_out}
        whole: Any = SimpleNamespace(named_modules=partial(_modules, model), get_parameter=own.__getitem__, **read)
        written = {name: moves.view(tensor) for name, tensor in revert_weight_conversion(whole, own).items()}
    absent = dict.fromkeys(name for name in shapes if name not in written)
    return absent | {name: view for name, view in written.items() if name != view}


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model by name, of the classes that they had before `fully_shard` gave them others."""
    for name, module in model.named_modules():
        kind: Any = own_class(module)
        own: nn.Module = module if kind is type(module) else kind.__new__(kind)
        own.__dict__ = module.__dict__
        yield name, own


def own_class(module: nn.Module) -> type:
    """The class of a module, which `fully_shard` replaces by one of torch's that derives from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


class _Moves(TorchFunctionMode):
    """Inside the block, what torch's functions move of tensors without values is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Tensor, Any]] = {}  # by storage, which lives as long as the tensor

    def source(self, name: str, shape: Shape) -> Tensor:
        return self._keep(torch.empty(shape, device="meta"), name)

    def _keep(self, tensor: Tensor, made: Any) -> Tensor:
        self._made[_storage(tensor)] = tensor, made
        return tensor

    def view(self, tensor: Tensor) -> View:
        """What a tensor is. Raises LookupError where its values have been computed."""
        first, made = self._made[_storage(tensor)]
        if isinstance(made, str) and (first.shape, first.stride()) == (tensor.shape, tensor.stride()):
            return made
        return [made, tensor.storage_offset(), list(tensor.shape), list(tensor.stride())]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and _storage(found) not in self._made:
            if func in (Tensor.reshape, torch.reshape):  # a copy, in the order of the elements
                self._keep(found, [list(args[0].shape), [[self.view(args[0]), [0] * args[0].dim()]]])
            elif func in (torch.cat, torch.stack):
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0)
                parts = args[0] if func is torch.cat else [each.unsqueeze(dim) for each in args[0]]
                self._keep(found, [list(found.shape), list(self._in_a_row(parts, dim % found.dim()))])
        return found

    def _in_a_row(self, parts: Sequence[Tensor], dim: int) -> Iterator[list[Any]]:
        begin = 0
        for part in parts:
            yield [self.view(part), [begin if each == dim else 0 for each in range(part.dim())]]
            begin += part.shape[dim]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
