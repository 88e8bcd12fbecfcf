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
        hidden_matrices: Parameters of two dims that are neither embeddings nor part of the head, which is what a model
            of transformers has outside its base model.
    """

    embeddings: frozenset[str] = frozenset()
    hidden_matrices: frozenset[str] = frozenset()


def parameter_kinds(model: nn.Module) -> ParameterKinds:
    """Finds the kinds of a model's parameters."""
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    outside = tables | _head(model)
    named = list(model.named_parameters())
    return ParameterKinds(
        embeddings=frozenset(name for name, p in named if id(p) in tables),
        hidden_matrices=frozenset(name for name, p in named if p.dim() == 2 and id(p) not in outside),
    )


def _head(model: nn.Module) -> set[int]:
    """The identities of the parameters of the head."""
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    body = set(map(id, base.parameters())) if isinstance(base, nn.Module) else set(map(id, model.parameters()))
    output = getattr(model, "get_output_embeddings", lambda: None)()
    last = set(map(id, output.parameters())) if isinstance(output, nn.Module) else set()
    return last | {id(parameter) for parameter in model.parameters() if id(parameter) not in body}


def decays_by_default(model: nn.Module) -> Callable[[str], bool]:
    """Returns whether weight decay applies to the parameter of a name, as in transformers' Trainer: to all but those
    of `nn.LayerNorm`, and those whose name looks like a bias or a norm (NO_DECAY)."""
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = frozenset(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    return lambda name: name in decayed
