"""Which tensors of a PeftModel its adapter consists of, and which ones its frozen base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def adapter_tensors(model: Any, adapter_name: str) -> dict[str, tuple[str, Tensor]]:
    """The live tensors that peft saves of an adapter: name in its file to name in the model and tensor. The name in the
    model is empty for a tensor that peft computes."""
    from peft import get_peft_model_state_dict

    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter_name)
    return {name: (names.get(id(tensor), ""), tensor) for name, tensor in saved.items()}


def base_tensors(model: Any, own: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model that are not the adapter's, by name. `own`: the names of the adapter's in the model."""
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name not in own and isinstance(tensor, Tensor):
            yield name, tensor
