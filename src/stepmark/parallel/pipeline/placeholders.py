"""What stands at the places of modules that other stages have.

A model's own forward runs on every stage with the batch's inputs, so masks, positions and rotary embeddings are what
the model computes. Learned modules before the layers give zeros of the right shape; layers before the stage give what
they got; the last of them gives the hidden states that the stage received. The layer after the stage ends the forward
pass there, so that nothing behind it is called.

Where a mixture of experts has a loss over the routers of all layers, their logits travel behind the hidden states, as
further columns, and the last stage finds them all where transformers collects them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.parallel.tensor.autograd_collectives import gather, scatter
from stepmark.parallel.tensor.sequence import SEQUENCE_DIM
from stepmark.runtime.collectives import Collectives


class StageEnd(Exception):
    """Ends the model's forward pass at the stage's last layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Placeholder(nn.Module):
    """Has the plain attributes of the module at whose place it stands; some models read them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and isinstance(value, str | int | float | None):
                setattr(self, name, value)


class SkippedLayer(_Placeholder):
    """A layer of another stage: gives what it got, in the form in which the model's layers return it."""

    def __init__(self, layer: nn.Module, returns: str) -> None:
        super().__init__(layer)
        self._form = returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(_hidden_states(args, kwargs))

    def _returned(self, hidden: Tensor) -> Any:
        """`hidden` as a layer returns it: itself, in a list, or first of a tuple ("tuple2" is one of two)."""
        if self._form == "tensor":
            return hidden
        if self._form == "list":
            return [hidden]
        return (hidden, *(None for _ in range(int(self._form.removeprefix("tuple")) - 1)))


@dataclass(frozen=True)
class RouterColumns:
    """Router logits behind hidden states of `width` columns: `experts` columns for each router. `along`: the ranks that
    share the sequence of the hidden states, but not that of the logits."""

    width: int
    experts: int
    along: Collectives | None = None

    def pack(self, hidden: Tensor) -> Tensor:
        """The hidden states with the logits of all routers so far behind them."""
        logits = [each.reshape(len(hidden), -1, each.shape[-1]) for each in collected_router_logits()]
        if self.along is not None:
            logits = [scatter(each, self.along, SEQUENCE_DIM) for each in logits]
        return torch.cat([hidden, *logits], dim=-1)

    def unpack(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """The hidden states, in their `dtype`; the logits go where transformers collects those of the layers."""
        columns = received.shape[-1] - self.width
        if columns:  # the layers so far may have no routers
            logits = received[..., self.width :]
            if self.along is not None:
                logits = gather(logits, self.along, SEQUENCE_DIM)
            logits = logits.reshape(-1, columns)
            collected_router_logits().extend(logits.split(self.experts, dim=-1))
        return received[..., : self.width].to(dtype)


def collected_router_logits() -> list[Tensor]:
    """The list to which transformers adds the logits of each router, [tokens, experts], in a forward pass whose
    configuration asks for them; an empty one in any other."""
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get() or {}
    return collected.get("router_logits", [])


def collect_router_logits(model: Any) -> None:
    """Makes transformers collect them of all layers of a complete model; alone it finds those of the first call."""
    from transformers.utils import output_capturing

    output_capturing.maybe_install_capturing_hooks(model)


class ReceivingLayer(SkippedLayer):
    """The last layer before a stage: gives the hidden states that the stage has received."""

    received: Any = None

    def __init__(self, layer: nn.Module, returns: str, routers: RouterColumns | None, dtype: torch.dtype) -> None:
        super().__init__(layer, returns)
        self._routers = routers
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self.received()
        return self._returned(received if self._routers is None else self._routers.unpack(received, self._dtype))


class EndingLayer(_Placeholder):
    """The first layer after a stage."""

    def __init__(self, layer: nn.Module, routers: RouterColumns | None) -> None:
        super().__init__(layer)
        self._routers = routers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        raise StageEnd(hidden if self._routers is None else self._routers.pack(hidden))


class SkippedEmbedding(_Placeholder):
    """Zeros in place of embeddings. `like` is a parameter of the stage, whose device they have; and whose dtype, unless
    the table was kept in another one than the layers."""

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        super().__init__(module)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.width = weight.shape[1]
        self._like = lambda: like  # as an attribute it would be a parameter of this module
        self._own_dtype = None if weight.dtype == like.dtype else weight.dtype

    @property
    def _dtype(self) -> torch.dtype:
        return self._own_dtype or self._like().dtype

    @property
    def weight(self) -> Tensor:
        """Without elements, for models that ask for the dtype or the device."""
        return self._like().new_empty((0, self.width), dtype=self._dtype)

    def forward(self, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((*indices.shape, self.width), dtype=self._dtype, device=indices.device)


class SkippedLinear(_Placeholder):
    """Zeros of a projection's shape."""

    def forward(self, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return values.new_zeros((*values.shape[:-1], int(self.out_features)))  # type: ignore[arg-type]


class SkippedModule(_Placeholder):
    """Gives its input: a norm before the layers. Behind the layers it is never called."""

    def forward(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        return values


def skipped(module: nn.Module, like: nn.Parameter) -> nn.Module:
    """The placeholder of a learned module outside the layers; `like` is a parameter of the stage."""
    if isinstance(module, nn.Embedding):
        return SkippedEmbedding(module, like)
    return SkippedLinear(module) if isinstance(module, nn.Linear) else SkippedModule(module)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
