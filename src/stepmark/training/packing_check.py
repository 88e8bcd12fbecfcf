"""Whether a model computes packed conversations as if each were alone."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.runtime.eager import kept_generators
from stepmark.training.model_labels import unwrapped

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_TOKENS = (5, 6)  # of the two conversations of the trial


def check_packing(model: nn.Module, datasets: Iterable[Any], *, whole: bool) -> None:
    """Raises UsageError unless a causal language model keeps conversations apart that share a block, where one of the
    datasets is `packed`. Draws no random numbers.

    `whole`: the model is complete and may be called, so it is also tried with two short conversations, together and
    each alone.
    """
    length = max((each.block_size for each in datasets if getattr(each, "packed", False)), default=None)
    if length is None:
        return
    inner = unwrapped(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise _refusal(f"{name} takes no position_ids")
    if getattr(config, "_attn_implementation", None) != "sdpa":
        raise UsageError(
            f"packing: {name} computes attention otherwise than by PyTorch's scaled_dot_product_attention; load it "
            'with attn_implementation="sdpa", or set packing: false'
        )
    layers = {str(each) for each in getattr(config, "layer_types", None) or ()}
    if getattr(inner, "_is_stateful", False) or layers - _ATTENTION:
        raise _refusal(f"{name} has layers other than attention, which carry a state from token to token")
    window = _window(config, layers)
    if window is not None and window < length:
        raise _refusal(f"{name} has layers that see {window} tokens, and a block has {length}")
    if whole:
        _try(model, name)


def _window(config: Any, layers: set[str]) -> int | None:
    """Tokens that a layer with a sliding window or chunks sees; None without such a layer."""
    if layers and layers <= {"full_attention"}:
        return None
    sizes = [getattr(config, each, None) for each in ("sliding_window", "attention_chunk_size")]
    if getattr(config, "use_sliding_window", True) is False:
        sizes[0] = None
    return min((each for each in sizes if isinstance(each, int)), default=None)


def _try(model: nn.Module, name: str) -> None:
    """Compares two conversations in one block with each alone."""
    device = next(model.parameters()).device
    embeddings: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(1, sum(_TOKENS) + 1, device=device) % embeddings.num_embeddings
    first, second = ids.split(_TOKENS)
    owner = torch.tensor([0] * _TOKENS[0] + [1] * _TOKENS[1], device=device)
    sees = (owner[:, None] == owner) & torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).tril()
    positions = torch.cat([torch.arange(each, device=device) for each in _TOKENS])
    # A copy with the same weights: what user code counts or keeps in its forward pass stays as it is.
    model = copy.deepcopy(model, {id(each): each for each in model.parameters()}).eval()
    with torch.no_grad(), kept_generators(), contextlib.redirect_stdout(io.StringIO()):
        together = _logits(model, ids, positions, sees[None, None])
        parts = zip((first, second), positions.split(_TOKENS), strict=True)
        alone = torch.cat([_logits(model, part, place, None) for part, place in parts])
    difference = (together - alone).norm() / alone.norm().clamp(min=1e-30)
    allowed = 1e-3 if alone.dtype == torch.float32 else 3e-2
    if not difference < allowed:
        raise _refusal(f"{name} does not keep them apart (its logits differ by {float(difference):.0%})")


def _logits(model: nn.Module, ids: Tensor, positions: Tensor, sees: Tensor | None) -> Tensor:
    outputs = model(input_ids=ids[None], position_ids=positions[None], attention_mask=sees, use_cache=False)
    return outputs.logits[0]


def _refusal(reason: str) -> UsageError:
    return UsageError(f"packing: {reason}, so conversations in one block would see each other; set packing: false")
