"""ZeRO-1 for custom training loops: an optimizer that reduces, clips, updates and gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.optim.elementwise import check_elementwise
from stepmark.optim.lazy_optimizers import lazy_class
from stepmark.parallel.gradients import scale_to
from stepmark.parallel.zero.sharded_optimizer import ShardedOptimizer
from stepmark.runtime.mesh import Mesh


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Shards the state of an elementwise optimizer over the data parallel ranks (ZeRO-1).

    Takes the arguments of torch_xla's class of the same name. `step` reduces the gradients to their mean over the
    ranks, clips, updates this rank's shard and gathers the new parameters on all ranks. `param_groups` are the groups
    that learning rate schedules change; their "params" are the flat shards that this rank updates.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either. Pass pairs (`model.named_parameters()`) to
            restore checkpoints by name.
        optimizer_class: A class of `torch.optim`, or any other with the class attribute `elementwise = True`.
        optimizer_dtype: Type of the state, and of the master weights of parameters of another type: `torch.float32`,
            which is the default, is the only one.
        grad_clipping: Clip the 2-norm of the gradient over all ranks to `max_norm`. Default True.
        max_norm: Norm to clip to, above 0. Default 1.0.
        use_grad_acc_hook: Accumulate gradients in float32 as each backward pass computes them. Default False.
        higher_cc_precision: Send gradients in float32 rather than in the parameters' type. Default False.
        mesh: The mesh from `Mesh.create`; default: all ranks are data parallel.
        **defaults: Arguments of `optimizer_class`, such as `lr`.

    Attributes:
        grad_norm: 2-norm of the last step's gradient before clipping, a 0-dim tensor on the device; None before the
            first step.

    Raises:
        UsageError: The optimizer is not elementwise, or an argument is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = 1.0,
        use_grad_acc_hook: bool = False,
        higher_cc_precision: bool = False,
        *,
        mesh: Mesh | None = None,
        **defaults: Any,
    ) -> None:
        if optimizer_dtype not in (None, torch.float32):
            raise UsageError(f"optimizer_dtype: {optimizer_dtype} is not supported; the state is kept in torch.float32")
        if grad_clipping and not (max_norm is not None and max_norm > 0):
            raise UsageError(f"max_norm: {max_norm!r} is not above 0; pass a positive norm, or grad_clipping=False")
        check_elementwise(optimizer_class)
        mesh = mesh or Mesh.create()
        groups = _named_groups(params)
        make: Callable[..., torch.optim.Optimizer]
        make = lazy_class(optimizer_class) if mesh.runtime.lazy else optimizer_class
        self._sharded = ShardedOptimizer(groups, lambda inner: make(inner, **defaults), mesh)
        self._runtime = mesh.runtime
        self._max_norm = float(max_norm or 0.0) if grad_clipping else 0.0
        self._gradients = self._sharded.gradients(
            mesh, accumulation=2 if use_grad_acc_hook else 1, reduce_in_fp32=higher_cc_precision
        )
        self.grad_norm: Tensor | None = None
        super().__init__(self._sharded.parameters, dict(self._sharded.inner.defaults))
        self.param_groups = self._sharded.inner.param_groups
        if use_grad_acc_hook:
            for parameter in self._sharded.parameters:
                parameter.register_post_accumulate_grad_hook(self._gradients.collect_one)

    def last_backward(self) -> None:
        """Announces the last backward pass before `step`, so that communication overlaps with it on an eager device.

        Optional, but all ranks must call it or none. Without it gradients are sent in `step`.
        """
        (one,) = self._runtime.place([torch.ones(1)])
        self._gradients.last_backward(one.reshape(()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters on all ranks. Collective.

        Args:
            closure: Computes the loss and its gradients again, as in `torch.optim`. Default None.

        Returns:
            What `closure` returned, None without one.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._gradients.collect()
        one, zero = self._runtime.place([torch.ones(1), torch.zeros(1)])
        reduced = self._gradients.reduce(zero.reshape(()), one.reshape(()))
        scale_to(reduced.gradients, reduced.norm, self._max_norm)
        self.grad_norm = reduced.norm
        self._sharded.set_gradients(reduced.gradients)
        self._sharded.step()
        self._sharded.set_gradients([None] * len(reduced.gradients))
        self._gradients.reset()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. `step` does so as well."""
        self._gradients.reset()

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: one rank's state dict would be a shard that fits no other mesh."""
        raise UsageError(
            "ZeroRedundancyOptimizer has no state dict; pass the optimizer itself to stepmark.Checkpointer, "
            "which saves and restores it on any mesh"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UsageError, like `state_dict`."""
        self.state_dict()

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        return self._sharded.state_bytes()

    def ensure_state(self) -> None:
        """Creates the state, so that it can be restored in place; `Checkpointer.restore` calls it."""
        self._sharded.ensure_state()

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to this rank's slices of its state, for `Checkpointer`."""
        return self._sharded.named_state()

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' hyperparameters, with parameter names, for `Checkpointer`."""
        return self._sharded.named_groups()

    def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
        """Restores the groups' saved learning rates, for `Checkpointer`."""
        self._sharded.load_named_groups(groups)


def _named_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups whose "params" are (name, parameter); parameters without a name are numbered."""
    given = list(params)
    if not given:
        raise UsageError("params: no parameters given")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    named, count = [], 0
    for group in groups:
        pairs = []
        for item in _as_list(group["params"]):
            pairs.append(item if isinstance(item, tuple) else (f"parameter.{count}", item))
            count += 1
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        if trained:
            named.append({**group, "params": trained})
    if not named:
        raise UsageError("params: none of them requires a gradient")
    return named


def _as_list(params: Any) -> Sequence[Any]:
    return [params] if isinstance(params, nn.Parameter) else list(params)
