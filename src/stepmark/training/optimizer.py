"""Makes the optimizer that a name and options describe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.sections import check_own_tensors
from stepmark.config.optimizers import ADAFACTOR, ADAMW_8BIT, MUON, SGD, WHOLE_PARAMETERS, check_optimizer
from stepmark.errors import UsageError
from stepmark.liveness.host_group import HostGroup
from stepmark.parallel.full_sharding import now
from stepmark.parallel.optimizer.distribute import distribute, sharding_unit
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.optimizer.own_classes import (
    BY_ADAMW,
    BY_MUON,
    EIGHT_BITS,
    FULL_PRECISION,
    LazyAdamW,
    LazySGD,
    MuonAdamW,
    adamw_8bit_class,
)
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import has_fused_kernel
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import local_of
from stepmark.sharding.layout import layout_of
from stepmark.sharding.views import copy_slices

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


def build_optimizer(
    name: str,
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    runtime: Runtime,
    *,
    decay: Callable[[str], bool] = lambda name: True,
    kinds: ParameterKinds | None = None,
    learning_rate: float = 5e-5,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    options: Mapping[str, Any] | None = None,
    sharded_over: Mesh | None = None,
    stages: HostGroup | None = None,
    mesh: Mesh | None = None,
    bucket_elements: int | None = None,
) -> NamedOptimizer:
    """Creates an optimizer over the parameters that require gradients.

    Args:
        name: One of OPTIMIZERS.
        named_parameters: `list(model.named_parameters())`, on the device.
        runtime: The device.
        decay: Whether weight decay applies to the parameter of a name. Default: to all.
        kinds: What the parameters are for, from `parameter_kinds(model)`. `muon` needs it. With
            `adamw_8bit`, embeddings have a state of 32 bits; None: all of at least `min_8bit_size` elements have 8.
        learning_rate: Default 5e-5.
        weight_decay: Default 0.
        betas: Of AdamW.
        epsilon: Of AdamW.
        options: Further arguments of the optimizer: `momentum` and `nesterov` of SGD, `amsgrad` of AdamW,
            `clip_threshold` and `beta1` of Adafactor, `min_8bit_size` of 8-bit AdamW, `momentum`,
            `nesterov`, `ns_steps` and `adjust_lr_fn` of Muon.
        sharded_over: The mesh over whose data parallel ranks the state is sharded (ZeRO-1): by elements, or by whole
            parameters where the optimizer uses these. None: not sharded.
        stages: All ranks, where they hold different parameters: then they agree on the groups, and a rank may have an
            empty one. None: all ranks have all groups.
        mesh: The mesh that the parameters are on. Needed where tensor parallelism has sharded them and the optimizer
            uses whole parameters, which its ranks then bring together. Default: `sharded_over`.
        bucket_elements: How many gradients data parallel ranks send at a time, and with `sharded_over` new values. None
            (the default): by the device.

    Returns:
        The optimizer for `TrainStep` and `Checkpointer`.

    Raises:
        UsageError: The name or an option is unknown, the optimizer's library is not installed, or it needs complete
            parameters, and they are sharded on a lazy device or without `mesh`.
    """
    trained = [(key, parameter) for key, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [item for item in items if decay(item[0]) == decays], "weight_decay": rate, **own}
        for items, own in _by_kind(name, trained, kinds)
        for decays, rate in ((True, weight_decay), (False, 0.0))
    ]
    if runtime.lazy and name in (ADAFACTOR, MUON):
        raise UsageError(f"optim: {name} changes its graph with every step, so {runtime.name} cannot use it; use AdamW")
    if runtime.lazy and name in ADAMW_8BIT:
        raise UsageError(f"optim: {name} has no kernels for {runtime.name}; use AdamW")
    chosen = dict(options or {})
    kind, keywords = optimizer_class(name, runtime, learning_rate, betas, epsilon, chosen)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return kind(groups, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"optim_args: {name} does not accept {chosen}: {error}") from error

    present = [bool(group["params"]) for group in groups]  # on this rank, or with `stages` on any rank
    if stages is not None:
        present = [any(found) for found in zip(*stages.all_gather(present), strict=True)]
    used, mesh = [group for group, there in zip(groups, present, strict=True) if there], mesh or sharded_over
    if mesh is None and name in WHOLE_PARAMETERS and any(layout_of(each) is not None for _, each in named_parameters):
        raise UsageError(
            f"mesh: {name} uses whole parameters, and tensor parallelism has sharded some; pass the mesh, "
            "build_optimizer(…, mesh=mesh)"
        )
    distribution = distribute(
        used,
        kind,
        runtime,
        sharded_over or mesh,
        order=[key for key, _ in named_parameters],
        zero_1=sharded_over is not None,
        bucket_elements=bucket_elements,
    )
    return NamedOptimizer(distribution, used, make, runtime)


def wrap_optimizer(
    given: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], mesh: Mesh, *, bucket_elements: int | None = None
) -> NamedOptimizer:
    """The step's optimizer around one that the user created over the model's parameters; `names` are the model's.
    `bucket_elements`: see `build_optimizer`. Collective.

    Raises UsageError where it holds a parameter that is not in the model; or tensor parallelism has sharded one, and
    the optimizer needs all parameters at once, it is unknown what it needs, or the device is lazy.
    """
    kind, groups = type(given), []
    check_step(kind)
    for group in given.param_groups:
        parameters = [now(parameter) for parameter in group["params"]]
        if any(parameter not in names for parameter in parameters):
            raise UsageError(
                "optimizers: the optimizer holds a parameter that is not in the model, so that no checkpoint would "
                "have it; make its module part of the model (model.criterion = …), or leave it out"
            )
        groups.append({**group, "params": [(names[parameter], parameter) for parameter in parameters]})
    held = [(name, each) for group in groups for name, each in group["params"] if layout_of(each) is not None]
    if held and sharding_unit(kind, "tensor_parallel_size") != "element":
        _check_whole(given, held, mesh.runtime)

    def exchange(own: list[dict[str, Any]]) -> torch.optim.Optimizer:
        before = {names[now(each)]: each for group in given.param_groups for each in group["params"]}
        for group, tensors in zip(given.param_groups, own, strict=True):
            group["params"] = tensors["params"]
        for each in distribution.held:
            state = given.state.pop(before[str(each.key)], None)
            if state is not None:
                given.state[each.tensor] = {key: _part(value, each.tensor) for key, value in state.items()}
        return given

    order = list(names.values())
    distribution = distribute(
        groups, kind, mesh.runtime, mesh, order=order, master_weights=False, bucket_elements=bucket_elements
    )
    updated = set(distribution.names)
    counted = [(name, each) for each, name in names.items() if each.requires_grad or name in updated]
    distribution.names = [name for name, _ in counted]  # a norm is of the model's gradients, as in transformers
    distribution.parameters = [each for _, each in counted]
    divided_by = (name for name, size in mesh.sharing.items() if size > 1)
    distribution.divided_by = next(divided_by, distribution.divided_by)
    own = {name: value for name, value in vars(given).items() if name not in ("state", "param_groups")}
    check_own_tensors(given, own, distribution.divided_by)
    return NamedOptimizer(distribution, groups, exchange, mesh.runtime, given=True)


def _part(value: Any, tensor: Tensor) -> Any:
    """A value of the state of a parameter, for the tensor that holds this rank's part of it."""
    layout, value = layout_of(tensor), local_of(value)
    if layout is None or not isinstance(value, Tensor) or tensor.shape == value.shape or value.shape != layout.shape:
        return value
    part = torch.zeros_like(tensor, dtype=value.dtype, device=value.device)
    copy_slices(value, part, layout)
    return part


def check_step(kind: type[torch.optim.Optimizer]) -> None:
    """Raises UsageError for a class that takes sparse gradients alone, or whose `step` cannot be called without
    arguments, by its signature or what it says of `closure`."""
    if issubclass(kind, torch.optim.SparseAdam):
        raise UsageError("optimizers: SparseAdam takes no dense gradients, as which all are added up; choose Adagrad")
    step = inspect.unwrap(kind.step)
    given = list(inspect.signature(step).parameters.values())[1:]
    needs = any(each.default is each.empty and "VAR_" not in each.kind.name for each in given)
    with suppress(OSError, TypeError):  # of no file
        needs |= bool(re.search(r"assert closure|if (closure is None|not closure):\s+raise", inspect.getsource(step)))
    if needs:
        raise UsageError(
            f"optimizers: {kind.__name__}.step needs a closure, which computes gradients once more; the Trainer passes "
            "none: choose another optimizer, or write a loop of your own around stepmark.Checkpointer"
        )


def _check_whole(given: torch.optim.Optimizer, held: Sequence[tuple[str, nn.Parameter]], runtime: Runtime) -> None:
    """Raises UsageError where an optimizer cannot get the whole parameters in place of the shards that it holds."""
    kind = type(given)
    if runtime.lazy:
        raise UsageError(
            f"optimizers: {kind.__name__} uses complete parameters, and tensor parallelism shards {held[0][0]}; on "
            f"{runtime.name} set tensor_parallel_size to 1, or choose an elementwise optimizer such as AdamW"
        )
    stateful = next((name for name, each in held if given.state.get(each)), None)
    if stateful is not None:
        raise UsageError(
            f"optimizers: {kind.__name__} has a state of {stateful} already, and tensor parallelism shards that; pass "
            "an optimizer that has not taken a step"
        )


def _by_kind(
    name: str, trained: Sequence[tuple[str, nn.Parameter]], kinds: ParameterKinds | None
) -> list[tuple[list[tuple[str, nn.Parameter]], dict[str, Any]]]:
    """The parameters that the optimizer treats alike, and what their groups say of that."""
    if name == MUON and kinds is None:
        raise UsageError("kinds: muon is for the matrices of hidden layers; pass kinds=parameter_kinds(model)")
    if name not in (MUON, *ADAMW_8BIT):
        return [(list(trained), {})]
    kinds = kinds or ParameterKinds()
    special = kinds.hidden_matrices if name == MUON else kinds.embeddings
    others, own = (BY_ADAMW, BY_MUON) if name == MUON else (EIGHT_BITS, FULL_PRECISION)
    chosen = [item for item in trained if item[0] in special]
    return [([item for item in trained if item[0] not in special], others), (chosen, own)]


def optimizer_class(
    name: str,
    runtime: Runtime,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    options: Mapping[str, Any],
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of `build_optimizer`'s optimizer, and its arguments but for the weight decay, which its groups have."""
    check_optimizer(name)
    keywords: dict[str, Any] = {"lr": learning_rate, **options}
    if name == ADAFACTOR:
        from transformers.optimization import Adafactor

        return Adafactor, {"scale_parameter": False, "relative_step": False, **keywords}
    if name == SGD:
        return LazySGD if runtime.lazy else torch.optim.SGD, keywords
    keywords = {"betas": betas, "eps": epsilon, **keywords}
    if name in ADAMW_8BIT:
        return adamw_8bit_class(), keywords
    if name == MUON:
        return MuonAdamW, keywords
    if runtime.lazy:
        return LazyAdamW, keywords
    if name == "adamw_torch_fused" and has_fused_kernel(torch.optim.AdamW, runtime.device):
        keywords["fused"] = True
    return torch.optim.AdamW, keywords
