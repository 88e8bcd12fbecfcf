"""ZeRO-1 for a loop of one's own: an optimizer that reduces, clips, steps and gathers."""

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
    """`optimizer_class` with its state divided among the data parallel ranks; the arguments are those of torch_xla's
    class of this name.

    `params`: parameters, (name, parameter) pairs, or groups of either; give pairs (`model.named_parameters()`) where
    checkpoints are to be restored by name. `optimizer_dtype`: that of the state, and of master weights where parameters
    have another: torch.float32. `grad_clipping` with `max_norm`: the global 2-norm, over all ranks.
    `use_grad_acc_hook`: gradients are added up in float32 as each backward pass makes them. `higher_cc_precision`: they
    travel in float32, else in the parameters' dtype. `mesh`: all ranks as data parallel where it is not given. Other
    keywords go to `optimizer_class`, or to the groups.

    `step` takes the mean of the ranks' gradients. `param_groups` are the groups that learning rate schedules change;
    their "params" are the flat parts that this rank updates. Raises UsageError for an optimizer that looks at whole
    parameters.
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
            raise UsageError(f"max_norm: {max_norm!r} is no norm to clip to; give one above 0, or grad_clipping=False")
        check_elementwise(optimizer_class)
        mesh = mesh or Mesh.create()
        groups = _named_groups(params)
        make: Callable[..., torch.optim.Optimizer]
        make = lazy_class(optimizer_class) if mesh.runtime.lazy else optimizer_class
        self._sharded = ShardedOptimizer(groups, lambda inner: make(inner, **defaults), mesh)
        self._runtime = mesh.runtime
        self._max_norm = float(max_norm or 0.0) if grad_clipping else 0.0
        self._gradients = self._sharded.gradients(
            mesh, accumulation=2 if use_grad_acc_hook else 1, travel_in_fp32=higher_cc_precision
        )
        self.grad_norm: Tensor | None = None  # before clipping, of the last step; 0-dim, on the device
        super().__init__(self._sharded.parameters, dict(self._sharded.inner.defaults))
        self.param_groups = self._sharded.inner.param_groups
        if use_grad_acc_hook:
            for parameter in self._sharded.parameters:
                parameter.register_post_accumulate_grad_hook(self._gradients.collect_one)

    def last_backward(self) -> None:
        """Says that the next backward pass is the last before `step`: on an eager device gradients then travel while it
        goes on. Nothing else changes; without it they travel in `step`. All ranks say so, or none."""
        (one,) = self._runtime.place([torch.ones(1)])
        self._gradients.last_backward(one.reshape(()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters on all ranks; collective. Returns what `closure` gives, if there is one."""
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
        """Forgets the gradients. `step` does so as well."""
        self._gradients.reset()

    def state_dict(self) -> dict[str, Any]:
        """Not the way to save it: one rank's state dict is a part that fits no other mesh. Raises UsageError."""
        raise UsageError(
            "ZeroRedundancyOptimizer has no state dict of its own; give the optimizer itself to stepmark.Checkpointer, "
            "which saves and restores it on any mesh"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`. Raises UsageError."""
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
        """For `Checkpointer`: takes up what was saved of the groups."""
        self._sharded.load_named_groups(groups)


def _named_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups whose "params" are (name, parameter); parameters without a name are numbered."""
    given = list(params)
    if not given:
        raise UsageError("params: there are none")
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
