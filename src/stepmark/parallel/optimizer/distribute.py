"""Which distribution an optimizer gets: by how much of the model its class needs to update one element, by how its
parameters are sharded, and by `zero_1`.

An elementwise optimizer works on flat shards of parameters. One that needs complete parameters, but each independently
of the others, works on some of the parameters, each of them whole. Any other needs all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import is_fully_sharded, reduced_by_pass
from stepmark.parallel.optimizer.named import Groups, OptimizerSharding
from stepmark.parallel.optimizer.replicated import LocalShards, Replicated
from stepmark.parallel.optimizer.whole_parameters import WholeParameters
from stepmark.parallel.optimizer.zero1_shards import FlatShards
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of

Unit = Literal["element", "parameter"]

_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "LBFGS", "Lamb", "Lars", "LAMB", "LARS", "Muon", "Shampoo", "SOAP", "SparseAdam"}
)
# Full names: classes of these names elsewhere may clip by the norm of all gradients, as LAMB of timm does.
_PER_PARAMETER = frozenset({"torch.optim.Adafactor", "torch.optim.Muon", "transformers.optimization.Adafactor"})
_BITSANDBYTES = "bitsandbytes."
_WITHOUT = {
    "zero_1": "switch zero_1 off",
    "tensor_parallel_size": "set tensor_parallel_size to 1",
    "fsdp": "leave fsdp out",
}


def sharding_unit(kind: type[torch.optim.Optimizer], field: str = "zero_1") -> Unit:
    """By what ZeRO-1 divides this optimizer's work: elements, or whole parameters. `field`: what asks for it, for the
    message.

    The optimizers of `torch.optim` and bitsandbytes are known. Any other class says so itself, with a class attribute
    `elementwise` or `per_parameter`. Raises UsageError where it needs all parameters at once, or what it needs is
    unknown.
    """
    module, name = kind.__module__, kind.__name__
    if getattr(kind, "elementwise", module.startswith("torch.optim.") and name in _ELEMENTWISE):
        return "element"
    if getattr(kind, "per_parameter", f"{module}.{name}" in _PER_PARAMETER or module.startswith(_BITSANDBYTES)):
        return "parameter"
    remedy = (
        "set `per_parameter = True` in the class if it updates every parameter from its own gradient and state alone, "
        f"or `elementwise = True` if it does so for every element; otherwise {_WITHOUT[field]}"
    )
    # States of 8 bits are scaled in blocks of elements, those of derived classes too.
    in_blocks = any(base.__module__.startswith(_BITSANDBYTES) for base in kind.__mro__)
    if in_blocks or hasattr(kind, "elementwise") or {base.__name__ for base in kind.__mro__} & _NOT_ELEMENTWISE:
        raise UsageError(f"{field}: {name} uses complete parameters, perhaps all of them at once; {remedy}")
    raise UsageError(f"{field}: it is unknown what {name} needs to update an element; {remedy}")


def distribute(
    groups: Groups,
    kind: type[torch.optim.Optimizer],
    runtime: Runtime,
    mesh: Mesh | None,
    *,
    order: Sequence[str] | None = None,
    zero_1: bool = False,
    master_weights: bool = True,
    bucket_elements: int | None = None,
) -> OptimizerSharding:
    """The tensors that an optimizer of the class `kind` updates on this rank. Collective.

    Args:
        groups, order, bucket_elements: See `OptimizerSharding`.
        mesh: The mesh that the parameters are on. None: without `zero_1`, and where none of them is sharded.
        zero_1: Divide the state over the data parallel ranks.
        master_weights: Update fp32 copies of parameters of another dtype. ZeRO-1 by elements does so in any case.

    Raises UsageError as `sharding_unit` where parameters are sharded, and where they would have to be whole and cannot.
    """
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    fully = any(map(is_fully_sharded, parameters))
    hosted = mesh is not None and mesh.ranks.total > 1 and any(map(reduced_by_pass, parameters))
    if fully and zero_1:
        raise UsageError("zero_1 and fsdp: sharded parameters have sharded states already; leave zero_1 out")
    if (fully or hosted) and sharding_unit(kind, "fsdp") != "element":  # one process of several ranks may become more
        raise UsageError(f"fsdp: {kind.__name__} uses complete parameters, and would see shards; use zero_1 instead")
    if fully:
        return LocalShards(groups, runtime, order=order, master_weights=master_weights)
    field = "zero_1" if zero_1 else "tensor_parallel_size"
    sharded = any(layout_of(each) is not None for each in parameters)
    if (zero_1 or sharded) and sharding_unit(kind, field) == "parameter":
        assert mesh is not None
        if runtime.lazy:
            raise UsageError(
                f"zero_1: {kind.__name__} uses complete parameters, which each belong to one rank, and the ranks of "
                f"{runtime.name} run one graph; choose an elementwise optimizer, or switch zero_1 off"
            )
        return WholeParameters(
            groups,
            mesh,
            order=order,
            zero_1=zero_1,
            elementwise_group=getattr(kind, "elementwise_group", lambda group: False),
            master_weights=master_weights,
            bucket_elements=bucket_elements,
        )
    if zero_1:
        assert mesh is not None
        return FlatShards(groups, mesh, bucket_elements=bucket_elements)
    return Replicated(groups, runtime, order=order, master_weights=master_weights, bucket_elements=bucket_elements)
