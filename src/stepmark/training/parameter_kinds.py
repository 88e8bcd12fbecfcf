"""What a model's parameters are for, where an optimizer treats them differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

# Patterns of the names, in lower case, of modules and parameters without weight decay.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class ParameterKinds:
    """Names of parameters.

    Attributes:
        embeddings: Tables of `nn.Embedding`, also those that are the head as well.
    """

    embeddings: frozenset[str] = frozenset()


def parameter_kinds(model: nn.Module) -> ParameterKinds:
    """Finds the kinds of a model's parameters."""
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    return ParameterKinds(embeddings=frozenset(name for name, p in model.named_parameters() if id(p) in tables))


def decays_by_default(model: nn.Module) -> Callable[[str], bool]:
    """Returns whether weight decay applies to the parameter of a name, as in transformers' Trainer: to all but those
    of `nn.LayerNorm`, and those whose name looks like a bias or a norm (NO_DECAY)."""
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = frozenset(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    return lambda name: name in decayed
