"""`model_init`: makes the same model for each run of a Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from stepmark.errors import UsageError
from stepmark.runtime.eager import kept_generators
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.seeds import kept_host_generators


class ModelFactory:
    """Makes a Trainer's model with `model_init`, seeded as in transformers: every call gives the same weights. Global
    random generators are not advanced.

    Args:
        make: `model_init() -> nn.Module`; it may have one parameter, a trial of a hyperparameter search, which is None.
        seed: `seed` of the arguments.
    """

    def __init__(self, make: Callable[..., nn.Module], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._runs = 0

    def first(self) -> nn.Module:
        """A new model. Raises UsageError where the function returns something else."""
        arguments = [None] if inspect.signature(self._make).parameters else []
        with kept_host_generators(), kept_generators():
            set_seed(self._seed)
            made = self._make(*arguments)
        if not isinstance(made, nn.Module):
            raise UsageError(f"model_init: should return an nn.Module, and returned a {type(made).__name__}")
        return made

    def begin_run(self, model: nn.Module, mesh: Mesh) -> None:
        """Gives `model` its first weights again, unless it has not been trained yet.

        Raises:
            UsageError: The model is sharded, so it cannot be made again.
        """
        self._runs += 1
        if self._runs == 1:
            return
        sizes = mesh.tensor_parallel.size, mesh.pipeline.size, mesh.expert_parallel_size
        for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True):
            if size > 1:
                raise UsageError(
                    f"model_init: with {name}_parallel_size, train() can be called once; make a new Trainer"
                )
        with torch.no_grad():
            model.load_state_dict(self.first().state_dict())


def model_of(model: nn.Module | None, make: Callable[..., nn.Module] | None, seed: int) -> tuple[Any, Any]:
    """The given model, or the one that `make` makes and its factory.

    Raises:
        UsageError: Both or neither was given.
    """
    if (model is None) == (make is None):
        raise UsageError("model, model_init: a Trainer needs one of them; pass a model, or a function that makes it")
    if make is None and not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"{model!r:.40}"
        raise UsageError(
            f"model: should be a torch.nn.Module, such as what AutoModelForCausalLM.from_pretrained(…) returns, and is "
            f"{given}"
        )
    if make is None:
        return model, None
    factory = ModelFactory(make, seed)
    return factory.first(), factory
