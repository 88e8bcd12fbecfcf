"""ZeRO-1 for custom training loops: an optimizer that reduces, clips, updates and gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.config.training_fields import DEVICES
from stepmark.errors import UsageError
from stepmark.filesystem.error_advice import explained
from stepmark.parallel.gradients.arithmetic import scale_to
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.distribute import distribute, sharding_unit
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.optimizer.own_classes import lazy_class
from stepmark.parallel.optimizer.whole_parameters import WholeParameters
from stepmark.runtime.eager import has_fused_kernel
from stepmark.runtime.mesh import DATA, TENSOR, Mesh
from stepmark.sharding.logical_ranks import FIELD

DEFAULT_MAX_NORM = 1.0
_MIB = 2**20
_FLOAT32_BYTES = 4
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_WAYS_TO_COMPUTE = ("fused", "foreach", "differentiable", "capturable")


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Shards the state of an optimizer over the data parallel ranks (ZeRO-1): by elements, or by whole parameters.

    A replacement for torch_xla's class of the same name: it accepts the same arguments, all after `optimizer_class` by
    name only. `step` reduces the gradients to their mean over the ranks, clips, updates this rank's shard, gathers the
    new parameters on all ranks, and ends the step on a lazy device. `param_groups` are the groups that learning rate
    schedules change; their "params" are the shards of parameters, or the parameters, that this rank updates. A
    parameter that took no part in the loss on any rank is left as it is, as in torch.

    Args:
        params: Parameters on their device, (name, parameter) pairs, or groups of either. Pass pairs
            (`model.named_parameters()`) to restore checkpoints by name.
        optimizer_class: A class of `torch.optim` or `bitsandbytes.optim`, Adafactor of transformers, or any other that
            says what it needs by a class attribute: `elementwise = True` where every element is updated independently
            (its flat shards are divided), or `per_parameter = True` where every parameter is, such as by its norm
            (whole parameters are divided; eager devices only).
        optimizer_dtype: dtype of the state, and of the master weights of parameters of another dtype: `torch.float32`,
            which is the default, is the only one.
        grad_clipping: Clip the 2-norm of the gradient over all ranks to `max_norm`. Default True.
        max_norm: Norm to clip to, above 0. Default None: 1.0.
        pin_layout: Accepted for compatibility: collectives never pin a layout. Default True.
        sharding_groups: The ranks in groups over which the state is sharded. They must be the data parallel groups of
            `mesh`, which are the default.
        grad_norm_groups: The ranks in further groups over which the norm is summed. They must be the tensor parallel
            groups of `mesh`, over which it is summed anyway. Default None.
        lazy_init: Leave the parameters unchanged until `init_zero` is called. Default False.
        bucket_cap_mb_all_gather: Size limit of a bucket, in MiB of float32; a larger parameter gets a separate bucket.
            Gradients and parameters have the same buckets, so the smaller limit applies to both; where whole parameters
            are divided, it limits what a rank sends of them at a time. Default 0: chosen by the device.
        bucket_cap_mb_reduce_scatter: See `bucket_cap_mb_all_gather`. Default 0.
        coalesce_cc: Accepted for compatibility with earlier versions: tensors are always sent in buckets. Default
            False.
        use_grad_acc_hook: Accumulate gradients in float32 as each backward pass computes them, and send them in
            float32. Default False.
        save_master_weights: Accepted for compatibility: master weights are always saved. Default False.
        higher_cc_precision: Send gradients in float32 rather than in the parameters' dtype. Default False.
        mesh: The mesh from `Mesh.create`. Default: all ranks are data parallel, on the parameters' device.
        **defaults: Arguments of `optimizer_class`, such as `lr`.

    Attributes:
        grad_norm: 2-norm of the last step's gradient before clipping, a 0-dim tensor on the device; None before the
            first step.

    Raises:
        UsageError: The optimizer needs all parameters at once, or it is unknown what it needs; an argument is not
            supported; or the parameters are not on the mesh's device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Sequence[Sequence[int]] | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        coalesce_cc: bool = False,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        mesh: Mesh | None = None,
        **defaults: Any,
    ) -> None:
        if optimizer_dtype not in (None, torch.float32):
            raise UsageError(
                f"optimizer_dtype: {optimizer_dtype} is not supported; leave it out: the state and the master weights "
                "are torch.float32, whatever the parameters' dtype"
            )
        max_norm = DEFAULT_MAX_NORM if max_norm is None else max_norm
        if grad_clipping and not max_norm > 0:
            raise UsageError(f"max_norm: {max_norm!r} is not above 0; pass a positive norm, or grad_clipping=False")
        sharding_unit(optimizer_class)  # refused before anything is done
        self._optimizer_class = optimizer_class
        self._arguments = dict(defaults)
        self._mesh = mesh
        self._sharding_groups, self._grad_norm_groups = sharding_groups, grad_norm_groups
        self._bucket_elements = _bucket_elements(bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter)
        self._max_norm = float(max_norm) if grad_clipping else 0.0
        self._accumulate_in_fp32 = use_grad_acc_hook
        self._reduce_in_fp32 = higher_cc_precision or use_grad_acc_hook
        self._live: tuple[NamedOptimizer, GradientReducer, Mesh] | None = None
        self.grad_norm: Tensor | None = None
        with explained(lambda error: UsageError(f"params: {error}"), (TypeError, ValueError)):
            super().__init__(_groups(params), defaults)
        if not lazy_init:
            self.init_zero()

    def init_zero(self) -> None:
        """Shards the parameters and creates the state; only needed after `lazy_init=True`. Collective.

        Raises:
            UsageError: It was called before, or see the class.
        """
        if self._live is not None:
            raise UsageError("init_zero: the optimizer is initialized already; call it once, after lazy_init=True")
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        self._frozen = [parameter for parameter in given if not parameter.requires_grad]
        groups = _named_groups(self.param_groups)
        parameters = [parameter for group in groups for _, parameter in group["params"]]
        kind_of_device = parameters[0].device.type
        mesh = self._mesh or Mesh.create(device=kind_of_device if kind_of_device in DEVICES else "auto")
        _check_device(parameters, mesh)
        if mesh.ranks.total != mesh.ranks.processes:
            raise UsageError(
                f"ZeroRedundancyOptimizer: {FIELD} is {mesh.ranks.total}, and a process that hosts several logical "
                "ranks runs their backward passes in an order that only the Trainer and recipes have; leave it out"
            )
        _check_groups("sharding_groups", self._sharding_groups, mesh.grid.groups(DATA), "data parallel")
        _check_groups("grad_norm_groups", self._grad_norm_groups, mesh.grid.groups(TENSOR), "tensor parallel")
        kind: Callable[..., torch.optim.Optimizer]
        kind = lazy_class(self._optimizer_class) if mesh.runtime.lazy else self._optimizer_class
        arguments = _fused_unless_chosen(kind, mesh.runtime.device, self._arguments)

        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            name = self._optimizer_class.__name__
            with explained(lambda error: UsageError(f"{name}: {error}"), (TypeError, ValueError)):
                return kind(groups, **arguments)

        divided = distribute(
            groups, self._optimizer_class, mesh.runtime, mesh, zero_1=True, bucket_elements=self._bucket_elements
        )
        sharded = NamedOptimizer(divided, groups, make, mesh.runtime, given=True)
        gradients = sharded.gradients(
            mesh,
            accumulation=2 if self._accumulate_in_fp32 else 1,
            reduce_dtype=torch.float32 if isinstance(divided, WholeParameters) or self._reduce_in_fp32 else None,
            on_arrival=self._accumulate_in_fp32,
        )
        self.defaults = dict(sharded.inner.defaults)
        self.param_groups = sharded.inner.param_groups
        self._live = sharded, gradients, mesh

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group before the parameters are sharded.

        Args:
            param_group: As in the constructor.

        Raises:
            UsageError: The parameters are sharded already: their buckets and gradient buffers are laid out.
        """
        if self._live is not None:
            raise UsageError(
                "add_param_group: the parameters are sharded already, and a new group would train on gradients that "
                "were not reduced; pass all groups to the constructor, or add them between lazy_init=True and "
                "init_zero()"
            )
        super().add_param_group(param_group)

    @property
    def named_optimizer(self) -> NamedOptimizer:
        """This rank's shards by the names of parameters, for `Checkpointer`."""
        return self._initialized()[0]

    def _initialized(self) -> tuple[NamedOptimizer, GradientReducer, Mesh]:
        if self._live is None:
            raise UsageError("ZeroRedundancyOptimizer: lazy_init=True was given; call init_zero() first")
        return self._live

    def last_backward(self) -> None:
        """Announces the last backward pass before `step`, so that communication overlaps with it on an eager device.

        Optional, but all ranks must call it or none. Without it gradients are sent in `step`.
        """
        _, gradients, _ = self._initialized()
        gradients.last_backward()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters on all ranks. Collective. On a lazy device it ends the step: everything recorded so
        far runs as one graph.

        Args:
            closure: Computes the loss and its gradients again, as in `torch.optim`. Default None.

        Returns:
            What `closure` returned, None without one.

        Raises:
            UsageError: A parameter was frozen, or unfrozen, after the parameters were sharded.
        """
        sharded, gradients, mesh = self._initialized()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "step: a parameter that was frozen when the optimizer was made requires a gradient now, and would not "
                "be trained; make the optimizer anew"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients.collect()
        one, zero = mesh.runtime.place([torch.ones(1), torch.zeros(1)])
        reduced = gradients.reduce(zero.reshape(()), one.reshape(())).divided_by(mesh.data_parallel.size)
        scale_to(reduced.gradients, reduced.norm, self._max_norm)
        self.grad_norm = reduced.norm
        sharded.set_gradients(reduced.gradients, reduced.used)
        sharded.step()
        sharded.set_gradients([None] * len(reduced.gradients))
        gradients.reset()
        mesh.runtime.step_boundary()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. `step` does so as well."""
        if self._live is None:
            super().zero_grad(set_to_none)
        else:
            self._live[1].reset()

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, master weights included, as references.

        It fits only the same rank of the same mesh. `stepmark.Checkpointer`, given the optimizer itself, saves and
        restores it on any mesh.
        """
        return self.named_optimizer.local_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned on this rank, in place. Load the model's state first.

        Raises:
            UsageError: It was made on another rank, on another mesh, or of other parameters.
        """
        self.named_optimizer.load_local_state(state_dict)

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        return self.named_optimizer.state_bytes()


def _fused_unless_chosen(kind: Any, device: torch.device, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's arguments, with `fused=True` where this class has a fused kernel on the device and the arguments
    say nothing about how to compute. Results differ from those of the other ways by rounding."""
    chosen = any(arguments.get(choice) is not None for choice in _WAYS_TO_COMPUTE)
    if kind in _FUSED and not chosen and has_fused_kernel(kind, device):
        return {**arguments, "fused": True}
    return dict(arguments)


def _bucket_elements(*caps: float) -> int | None:
    """Elements in a bucket that exceeds none of the limits (MiB; 0: no limit); None without a limit."""
    if any(cap < 0 for cap in caps):
        raise UsageError(f"bucket_cap_mb: {min(caps)} is below 0; pass a size in MiB, or 0 for the default")
    limits = [cap for cap in caps if cap]
    return max(int(min(limits) * _MIB) // _FLOAT32_BYTES, 1) if limits else None


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if not given:
        raise UsageError("params: no parameters given")
    return [dict(group) for group in given] if isinstance(given[0], dict) else [{"params": given}]


def _named_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """torch's groups with (name, parameter) as "params", of those that require a gradient; unnamed ones get numbers."""
    named, count = [], 0
    for group in groups:
        parameters = group["params"]
        names = group.get("param_names") or [f"parameter.{count + index}" for index in range(len(parameters))]
        count += len(parameters)
        trained = [pair for pair in zip(names, parameters, strict=True) if pair[1].requires_grad]
        if trained:
            named.append({key: value for key, value in group.items() if key != "param_names"} | {"params": trained})
    if not named:
        raise UsageError("params: none of them requires a gradient")
    return named


def _check_device(parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
    own = mesh.runtime.device
    other = next((parameter.device for parameter in parameters if parameter.device != own), None)
    if other is not None:
        raise UsageError(
            f"params: a parameter is on {other}, and the mesh's device is {own}; move the model there first "
            "(stepmark.place_module), or create the mesh with the model's device"
        )


def _check_groups(name: str, given: Sequence[Sequence[int]] | None, own: list[list[int]], axis: str) -> None:
    """Checks that groups of ranks that the user passed are those of the mesh."""
    if given is not None and sorted(sorted(group) for group in given) != sorted(own):
        raise UsageError(
            f"{name}: {[list(group) for group in given]} are not the mesh's {axis} groups, {own}; leave it out, and "
            "lay out the ranks with mesh=Mesh.create(tensor_parallel_size=…)"
        )
