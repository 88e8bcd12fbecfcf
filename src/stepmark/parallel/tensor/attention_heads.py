"""Which attention heads a tensor parallel rank holds, where key/value heads may be fewer than ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.adapted_layers import base_of

KEYS_AND_VALUES = ("k_proj", "v_proj", "key_proj", "value_proj", "key", "value", "k", "v")
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("split_size", "embed_dim", "hidden_size", "all_head_size", "inner_dim")


@dataclass(frozen=True)
class Heads:
    """Query and key/value heads of a complete attention module, and the number of ranks that share them.

    Where there are fewer key/value heads than ranks, neighbouring ranks hold a replica of the head that their queries
    need. `latent`: of multi-head latent attention, in which keys and values have as many heads as queries.
    """

    queries: int
    keys_and_values: int
    ranks: int
    latent: bool = False

    def copies(self, child: str) -> int:
        """How many neighbouring ranks hold the same shard of a projection."""
        return max(self.ranks // self.keys_and_values, 1) if child in KEYS_AND_VALUES else 1

    def adapt(self, module: Any) -> None:
        """Sets the module's own head counts and widths to those of this rank."""
        queries = self.queries // self.ranks
        keys_and_values = max(self.keys_and_values // self.ranks, 1)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = queries // keys_and_values
        counts = [(name, self.queries, queries) for name in QUERY_COUNTS]
        counts += [(name, self.keys_and_values, keys_and_values) for name in KEY_VALUE_COUNTS]
        for name, complete, own in counts:
            if getattr(module, name, None) == complete:
                setattr(module, name, own)
        for name in () if self.latent else WIDTHS:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // self.ranks)


def heads_of(name: str, module: nn.Module, config: Any, ranks: int) -> Heads | None:
    """The heads of an attention module; None for others. Raises UsageError where `ranks` cannot share them equally."""
    width = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    children = dict(module.named_children())
    latent = "kv_b_proj" in children
    if not isinstance(width, int) and not latent:
        return None
    config = getattr(module, "config", config)
    keys = next((base_of(children[child]) for child in KEYS_AND_VALUES if child in children), None)
    queries = _first(module, QUERY_COUNTS) or _first(config, QUERY_COUNTS)
    keys_and_values = queries if latent else _first(config, KEY_VALUE_COUNTS) or queries
    if isinstance(keys, nn.Linear) and isinstance(width, int) and not latent:
        keys_and_values = keys.out_features // width
        groups = getattr(module, "num_key_value_groups", None)
        queries = keys_and_values * groups if isinstance(groups, int) else queries
    if not queries or not keys_and_values:
        return None
    if queries % ranks or (keys_and_values % ranks and ranks % keys_and_values):
        raise UsageError(
            f"tensor_parallel_size: {name} has {queries} heads and {keys_and_values} key/value heads, which {ranks} "
            "ranks cannot share equally; choose a divisor of the heads that divides the key/value heads or is a "
            "multiple of them"
        )
    return Heads(queries, keys_and_values, ranks, latent)


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(owner, name, None), int)), None)
