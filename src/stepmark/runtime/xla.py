"""PyTorch/XLA: Trainium, TPU and XLA's own CPU client. The only module that imports torch_xla."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepmark.errors import DeviceError
from stepmark.runtime.base import CacheCounters, DeviceMemory, GraphCounters, map_tensors
from stepmark.runtime.neuron.neuron_cache import CacheLookups
from stepmark.runtime.xla_environment import (
    BF16_OVERRIDES,
    BF16_REMEDY,
    XLA_FOLDER,
    check_no_type_override,
    prepare_environment,
    warn_of_unused_accelerator,
)

prepare_environment()
warn_of_unused_accelerator()

import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.debug.metrics as metrics  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402
import torch_xla.utils.checkpoint as xla_checkpoint  # noqa: E402
import torch_xla.utils.dlpack as xla_dlpack  # noqa: E402
from torch_xla._internal import pjrt  # noqa: E402

Dispatch = Callable[[Sequence[int] | None], None]
addressable_devices = xr.addressable_device_count  # in this process


class XlaRuntime:
    """See `Runtime`.

    `dispatch(ranks)` runs one graph, which only these ranks run (None: all of them); replica threads pass one that
    takes turns. Where the ranks are stages of a pipeline, `graph_ranks` are those that run the same graphs as this one.
    """

    name = "xla"
    lazy = True

    def __init__(self, local_rank: int = 0, local_size: int = 1, dispatch: Dispatch | None = None) -> None:
        check_no_type_override()
        if xr.device_type() != "CPU" and local_size > 1:
            pjrt.initialize_multiprocess(local_rank, local_size)
        self.device = torch_xla.device()
        _check_float32(self.device)
        self.host_memory = xr.device_type() == "CPU"
        self.in_graph_collectives = not self.host_memory or xr.world_size() > 1
        self._own_transfers = 0
        self._lookups: CacheLookups | None = None
        self.graph_ranks: Sequence[int] | None = None
        self._dispatch: Dispatch = dispatch or (lambda ranks: torch_xla.sync(wait=False))

    def place(self, batch: Any) -> Any:
        return map_tensors(batch, self._send)

    def _send(self, tensor: Tensor) -> Tensor:
        """Copies the tensor to the device without recording an operation. `tensor.to(device)` first records a tensor of
        zeros, and a sync in another thread may run the graph before the values replace them."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        (sent,) = torch_xla._XLAC._xla_tensors_from_aten([tensor.detach()], [str(self.device)])
        return sent

    def numbers(self, values: Sequence[float]) -> Tensor:
        return self._send(torch.tensor(values, dtype=torch.float32))

    def write(self, target: Tensor, value: Tensor) -> None:
        # Assigning a new device buffer records no operation, so the graphs stay the same.
        target.data = self._send(value.to(dtype=target.dtype))

    def version(self, tensor: Tensor) -> object:
        if tensor.device.type != "xla":  # on the host, such as a dataset's
            return tensor.untyped_storage()._cdata, tensor._version
        return torch_xla._XLAC._xla_get_tensor_id(tensor), torch._functionalize_mutation_counter(tensor)

    def to_host(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        before = _samples("TransferFromDeviceTime")
        fetch = _host_view if self.host_memory and not copy else Tensor.cpu
        fetched = [fetch(tensor.detach()) for tensor in tensors]
        self._own_transfers += _samples("TransferFromDeviceTime") - before
        return fetched

    def step_boundary(self, *, wait: bool = False) -> None:
        self._dispatch(self.graph_ranks)
        if wait:
            xm.wait_device_ops()

    def boundary_among(self, ranks: Sequence[int]) -> None:
        """Runs pending operations as one graph, which is the same on `ranks` and which only they run."""
        self._dispatch(ranks)

    def seed(self, value: int) -> None:
        xm.set_rng_state(value, str(self.device))

    def current_seed(self) -> int:
        return int(xm.get_rng_state(str(self.device))) % 2**63

    def generator_state(self) -> Tensor:
        return torch.tensor([xm.get_rng_state(str(self.device)) % 2**64], dtype=torch.uint64).view(torch.int64)

    def set_generator_state(self, state: Tensor) -> None:
        self.seed(int(state) % 2**64)

    def counters(self) -> GraphCounters | None:
        xm.wait_device_ops()
        return GraphCounters(_samples("CompileTime"), _samples("ExecuteTime"))

    def requested_graphs(self) -> int | None:
        return graph_counts().requested

    def compile_seconds(self) -> float:
        return graph_counts().compile_seconds

    def count_in_neuron_cache(self, folder: Path) -> None:
        """From now on `cache_counters` counts the graphs that Neuron's compiler finds in its cache."""
        if self._lookups is None or self._lookups.folder != folder:
            self._lookups = CacheLookups(folder, graph_counts().compiled)

    def cache_counters(self) -> CacheCounters | None:
        counts = graph_counts()
        if self._lookups is not None:
            return CacheCounters(*self._lookups.count(counts.compiled))
        if XLA_FOLDER not in os.environ:
            return None
        return CacheCounters(counts.hits, counts.missed + counts.unreadable)

    @contextmanager
    def dispatching(self, dispatch: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Inside the block, `dispatch` is called at each step boundary with the function that runs what is pending."""
        run = self._dispatch
        self._dispatch = lambda ranks: dispatch(lambda: run(ranks))
        try:
            yield
        finally:
            self._dispatch = run

    def transfers_to_host(self, *, own: bool = True) -> int | None:
        return _samples("TransferFromDeviceTime") - (0 if own else self._own_transfers)

    def memory(self) -> DeviceMemory | None:
        if self.host_memory:
            return None
        try:
            info: Any = xm.get_memory_info(self.device)
        except RuntimeError:  # a PJRT client without memory statistics
            return None
        return DeviceMemory(info["bytes_used"], info.get("peak_bytes_used"), info.get("bytes_limit"))


def _check_float32(device: torch.device) -> None:
    """Raises DeviceError where float32 tensors are not float32 on the device. torch_xla reads the variables that change
    it once, with the first tensor: it may have read one that the script has unset since. After this it reads none."""
    (tensor,) = torch_xla._XLAC._xla_tensors_from_aten([torch.zeros(1)], [str(device)])
    if " f32[1]" not in torch_xla._XLAC._get_xla_tensors_text([tensor]):
        names = " or ".join(BF16_OVERRIDES)
        raise DeviceError(
            f"device: xla: torch_xla stores float32 tensors as bfloat16, since {names} was set when its first tensor "
            f"was made; {BF16_REMEDY}"
        )


def _host_view(tensor: Tensor) -> Tensor:
    """The device buffer itself where XLA can lend it with the tensor's dtype, otherwise a copy.

    XLA cannot lend bool, empty and 0-dim tensors. A buffer may also have another element type than the tensor, where
    torch_xla was told to compute float32 in bfloat16 or int64 in int32.
    """
    if tensor.dtype == torch.bool or tensor.numel() == 0 or tensor.dim() == 0:
        return tensor.cpu()
    view = torch.utils.dlpack.from_dlpack(xla_dlpack.to_dlpack(tensor))
    return view if view.dtype == tensor.dtype else tensor.cpu()


def _samples(metric: str) -> int:
    data = metrics.metric_data(metric)
    return 0 if data is None else data[0]


@dataclass(frozen=True)
class GraphCounts:
    """Graphs of this process: `compiled` in `compile_seconds`; read from the compile cache (`hits`), not in it
    (`missed`), and in it but `unreadable`, which are compiled."""

    compiled: int
    compile_seconds: float
    hits: int
    missed: int
    unreadable: int

    @property
    def requested(self) -> int:
        """Graphs that this process did not have yet."""
        return self.compiled + self.hits

    @property
    def cached(self) -> int:
        """Graphs that an earlier process had made."""
        return self.hits + self.unreadable


def graph_counts() -> GraphCounts:
    """The counts so far. Waits for nothing: the thread that ends a step compiles."""
    data = metrics.metric_data("CompileTime")
    names = ("PersistentCacheHit", "PersistentCacheMiss", "PersistentCacheDeserializeFailure")
    compiled, nanoseconds = (0, 0.0) if data is None else data[:2]
    return GraphCounts(compiled, nanoseconds / 1e9, *(metrics.counter_value(name) or 0 for name in names))


def host_operations() -> dict[str, int]:
    """How often each operation that torch_xla cannot put into a graph was run on the host, such as `aten::nonzero`.
    Reads of single values are not among them."""
    read = "aten::_local_scalar_dense"
    names = (name for name in metrics.counter_names() if name.startswith("aten::") and name != read)
    return {name: metrics.counter_value(name) or 0 for name in names}


def pending_graph() -> str:
    """The operations that the next step boundary would run, as StableHLO text. Runs nothing."""
    return xm.get_stablehlo()


def keep_graphs(folder: Path) -> bool:
    """Makes torch_xla keep compiled graphs in a folder; False where this process has looked up graphs already, unless
    it keeps them there."""
    if os.environ.get(XLA_FOLDER) == str(folder):
        return True
    if torch_xla._XLAC._xla_computation_cache_is_initialized():
        return False
    xr.initialize_cache(str(folder))
    return True


def versioned_name() -> str:
    """Names the folder of graphs that this torch_xla compiles for this kind of device."""
    return f"xla-{torch_xla.__version__}-{xr.device_type()}".lower()


Groups = list[list[int]] | None  # replica numbers of each group; None: one group of all


def all_reduce_in_graph(tensor: Tensor, op: str, groups: Groups) -> Tensor:
    """The sum ("sum") or maximum ("max") over the replicas of each group, as an operation of the graph."""
    kind = xm.REDUCE_SUM if op == "sum" else xm.REDUCE_MAX
    reduced: Any = xm.all_reduce(kind, tensor, groups=groups, pin_layout=False)  # a list of them for several
    return reduced


def all_gather_in_graph(tensor: Tensor, dim: int, groups: Groups) -> Tensor:
    """The concatenation of the replicas' tensors along `dim`."""
    return xm.all_gather(tensor, dim % tensor.dim(), groups=groups, pin_layout=False)


def reduce_scatter_in_graph(tensor: Tensor, dim: int, size: int, groups: Groups) -> Tensor:
    """This replica's shard along `dim` of the sum; `size` is the size of a group."""
    where: dict[str, Any] = {"scatter_dim": dim % tensor.dim(), "shard_count": size, "groups": groups}
    return xm.reduce_scatter(xm.REDUCE_SUM, tensor, scale=1.0, pin_layout=False, **where)


def graph_world() -> tuple[int, int]:
    """This replica's number and the number of replicas, as PJRT counts them."""
    return xr.global_ordinal(), xr.world_size()


def checkpoint_function() -> Callable[..., Any]:
    """Activation checkpointing for lazy tensors: torch's own crashes on them (aws-neuron-sdk #1317)."""
    return xla_checkpoint.checkpoint


# Operations that torch_xla would run on the host, composed of operations that it compiles; and attention in autocast,
# which torch_xla leaves out of the operations that compute in the lower precision.


def _solve_triangular(
    matrix: Tensor, right: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X of matrix X = right, or of X matrix = right where not `left`; (…, n, n) and (…, n, k) or (…, k, n)."""
    if not left:
        return _solve_triangular(matrix.mT, right.mT, upper=not upper, unitriangular=unitriangular).mT
    return torch.ops.aten.triangular_solve(right, matrix, upper, False, unitriangular)[0]


def _polar(absolute: Tensor, angle: Tensor) -> Tensor:
    """Complex numbers of these absolute values and angles."""
    parts = torch.stack([absolute * torch.cos(angle), absolute * torch.sin(angle)], -1)
    return torch.ops.aten.view_as_complex_copy(parts)


def _attention_in_autocast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In autocast's dtype, as on other devices. Rotary embeddings, which are float32, make query and key float32, and
    attention takes tensors of one dtype only."""
    dtype = torch.get_autocast_dtype("xla")
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    with torch.autocast("xla", enabled=False):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


_operations = torch.library.Library("aten", "IMPL")  # as long as it lives, they are registered
_operations.impl("linalg_solve_triangular", _solve_triangular, "XLA")
_operations.impl("polar", _polar, "XLA")
_operations.impl("scaled_dot_product_attention", _attention_in_autocast, "AutocastXLA")
