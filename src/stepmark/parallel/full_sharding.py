"""Parameters sharded over the data parallel ranks by torch's `fully_shard` (FSDP2), layer by layer.

torch gathers a layer's parameters before its forward and its backward pass, and frees them afterwards. It calls
`LayerGradients` to reduce the layer's gradients, so that dtypes and sums are those of all other reducers:
see gradients/accumulators.py and docs/decisions/0019-sharded-parameters.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from stepmark.config.full_sharding import LAYERS, FullSharding
from stepmark.errors import UsageError
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.progress import Progress, current
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from stepmark.sharding.dtensor import is_dtensor, local_of, shard_of
from stepmark.sharding.logical_ranks import FIELD, ArrivingSums, LogicalRanks, Turn
from stepmark.sharding.views import flat_bytes, local_shard

_ATTRIBUTE = "_stepmark_layer"  # of a sharded parameter: its LayerGradients
LOSS = "fsdp: the loss uses the model's parameters, which are shards; compute it from its outputs, or use zero_1"
OTHER_LAYERS = (
    "fsdp: the data parallel ranks use other layers or parameters, whose gradients are added in every pass: let every "
    "rank use the same ones, or use zero_1"
)
HOOKS = "which would see none, or a shard; change gradients in on_pre_optimizer_step"
_replaced: Any = WeakTensorKeyDictionary()  # parameters before they were sharded, to those that took their place


DOUBLE = (
    "fsdp: a gradient of a gradient (create_graph=True) needs parameters that torch has freed by then; use zero_1, or "
    "leave fsdp out"
)
GATHERS, REDUCES = "gathers the parameters of", "reduces the gradients of"
KEPT = 1 << 16  # calls, for the words of an error
PIECES, BITS = 3, 12  # of a digest that ranks add up: sums of pieces are exact in float32


class Calls(NamedTuple):
    """What a rank has gathered, reduced and received, in order: the latest of it in words, and a checksum of all."""

    made: Sequence[str]
    checksum: int = 0

    def digest(self) -> list[float]:
        """Numbers that are different where the calls are."""
        return [float(self.checksum >> piece * BITS & (1 << BITS) - 1) for piece in range(PIECES)]

    @property
    def reduces(self) -> bool:
        """Whether gradients of any layer were reduced."""
        return any(each.startswith(REDUCES) for each in self.made)

    def compare(self, host: HostGroup) -> None:
        """Raises UsageError on all ranks where their calls differ. Collective."""
        told = host.all_gather(self.digest())
        if all(each == told[0] for each in told):
            return
        other = next(rank for rank, each in enumerate(told) if each != told[0])
        calls = [host.broadcast(list(self.made), source) for source in (0, other)]
        one, another = next(
            pair for pair in zip_longest(*calls, fillvalue="calls no further layer") if len({*pair}) > 1
        )
        raise UsageError(
            f"fsdp: rank 0 {one} where rank {other} {another}; torch exchanges whatever comes next, so that values of "
            "one would reach the other: let every rank use the same layers in the same order, or use zero_1"
        )


class LayerCalls:
    """Records the calls of a model's layers, of which a loop without our steps may make any number."""

    def __init__(self) -> None:
        self._made: deque[str] = deque(maxlen=KEPT)
        self._checksum = 0
        self._progress: Progress | None = None

    def note(self, words: str) -> None:
        self._made.append(words)
        self._checksum = crc32(words.encode(), self._checksum)

    def begin(self, words: str) -> None:
        """Notes a collective, which a rank that waits in it is said to be in."""
        self.note(words)
        self._progress = current() or self._progress  # backward passes of devices are in threads of their own
        if self._progress is not None:
            self._progress.collective = words

    def take(self) -> Calls:
        """Those since they were taken before."""
        calls = Calls([*self._made], self._checksum)
        self._made.clear()
        self._checksum = 0
        return calls


def compare_calls(model: nn.Module, host: HostGroup) -> None:
    """Raises UsageError where ranks have called other layers of a sharded model since the last step. Collective."""
    sharded = next((each for each in model.parameters() if is_fully_sharded(each)), None)
    if sharded is not None:
        layer_of(sharded).calls.take().compare(host)


class LayerParameters:
    """Gathers a layer's parameters (torch's `AllGather`), between hosts by sends and receives; recorded in `calls`."""

    def __init__(self, axis: GroupCollectives, calls: LayerCalls, name: str, does: str = GATHERS) -> None:
        self._axis = axis
        self.calls = calls
        self._call = f"{does} {name or 'the rest of the model'}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """`input_tensor` is this rank's part of `output_tensor`."""
        self.calls.begin(self._call)
        self._axis.start_gather_in_place(output_tensor)()


class WholeGradients:
    """Adds the gradients of a parameter of the only process, as those of a shard are added."""

    copies = 1

    def __init__(self, calls: LayerCalls) -> None:
        self.calls = calls
        self.dtype = torch.float32
        self.turn: Turn | None = None
        self._sums: ArrivingSums[Tensor] | None = None

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """See `LayerGradients`."""
        assert parameter.grad is not None
        assert self.turn is not None
        if self.turn.place == 0 or self._sums is None:
            self._sums = ArrivingSums(self.turn.ranks.total, Tensor.add_)
        self._sums.arrive(self.turn.hosts[0], parameter.grad.to(self.dtype).float())
        return self._sums.take() if self.turn.last else None

    def pass_ended(self) -> None:
        """See `LayerGradients`."""


class LayerGradients(LayerParameters):
    """Reduce-scatters the gradients of the parameters that torch gathers together (its `ReduceScatter`).

    Outside of a step, as in a loop that reads `parameter.grad`, the result is the mean over the ranks.
    """

    def __init__(self, axis: GroupCollectives, calls: LayerCalls, name: str, copies: int) -> None:
        super().__init__(axis, calls, name, REDUCES)
        self.copies = copies  # the ranks that hold the same shards
        self.dtype = torch.float32  # in which gradients are sent; sums are in float32
        self.turn: Turn | None = None  # of the step whose gradients are summed for a reducer
        self._sums: list[tuple[int, ArrivingSums[Tensor]]] = []  # of each call in a pass, with its size
        self._called = 0  # in this pass
        self._output: Tensor | None = None
        self._taken: set[int] = set()  # the parameters whose part of it was taken

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """`input_tensor`: the gradients' padded shards for each rank of the axis, one rank after the other."""
        self.calls.begin(self._call)
        turn = self.turn
        if turn is None:
            input_tensor.div_(self._axis.size * self.copies)
        if turn is None or not self._sends_parts(turn.ranks, input_tensor.dtype):
            output_tensor.copy_(self._axis.start_reduce_scatter(input_tensor, self.dtype)())
        else:
            sums, hosts = self._sums_of(turn, len(input_tensor)), turn.hosts
            for process, part in self._axis.exchange_shards(input_tensor.to(self.dtype), hosts).items():
                sums.arrive(hosts[process], part.to(output_tensor.dtype, copy=True))
            if turn.last:
                output_tensor.copy_(sums.take())
        self._output = None if turn is None else output_tensor
        self._taken.clear()

    def _sends_parts(self, ranks: LogicalRanks, dtype: torch.dtype) -> bool:
        """Whether this rank adds what it is sent in the order of the logical ranks: a sum of two needs none."""
        two = ranks.total == ranks.processes == 2 and self.dtype == dtype
        return in_order(ranks, self.copies) and not two

    def _sums_of(self, turn: Turn, size: int) -> ArrivingSums[Tensor]:
        """Those of this call, of as many as the layer has in a pass."""
        if turn.place == 0:
            del self._sums[self._called :]
            self._sums.append((size, ArrivingSums(turn.ranks.total, Tensor.add_)))
        self._called += 1
        if [each for each, _ in self._sums[self._called - 1 : self._called]] != [size]:
            raise UsageError(OTHER_LAYERS)
        return self._sums[self._called - 1][1]

    def take(self, parameter: Any) -> Tensor | None:
        """The reduced gradient of a parameter of the last call, in float32, of its local shape; None where those of
        other logical ranks are to come. torch has made its `grad` of the result: a view at the same place, in the
        parameter's dtype."""
        shown, whole = local_of(parameter.grad), self._output
        if whole is None or id(parameter) in self._taken:
            raise UsageError(LOSS)  # another gradient than that of a layer's pass
        if shown.dtype == whole.dtype and shown.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            raise UsageError(LOSS)
        self._taken.add(id(parameter))
        assert self.turn is not None
        if not self.turn.last and in_order(self.turn.ranks, self.copies):
            return None
        begin = shown.storage_offset()
        return whole[begin : begin + shown.numel()].view(shown.shape)

    def pass_ended(self) -> None:
        """A backward pass is over: what comes now is none of its gradients."""
        self._output, self._called = None, 0


def in_order(ranks: LogicalRanks, copies: int) -> bool:
    """Whether each process sends its logical ranks' gradients for ordered sums: not where torch adds several copies."""
    return copies == 1 and (ranks.fixed or ranks.total > ranks.processes)


def layer_of(parameter: Tensor) -> LayerGradients | WholeGradients:
    """What reduces the gradient of a parameter that `shard_fully` or `keep_whole` was given."""
    return getattr(parameter, _ATTRIBUTE)


def reduced_by_pass(parameter: Tensor) -> bool:
    """Whether the gradients of a parameter that one of them was given are added over all ranks in every pass."""
    return hasattr(parameter, _ATTRIBUTE)


def has_full_sharding(model: nn.Module) -> bool:
    """Whether ranks hold shards of any parameter of the model."""
    return any(map(is_fully_sharded, model.parameters()))


def is_fully_sharded(parameter: Tensor) -> bool:
    """Whether `shard_fully` has sharded a parameter."""
    return is_dtensor(parameter) and hasattr(parameter, _ATTRIBUTE)


def has_hooks(parameter: Tensor, own: int = 0) -> bool:
    """Whether a parameter's gradient has hooks besides `own` ones."""
    found: Any = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or len(found or ()) > own


def now(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter that has taken the place of one that was sharded; any other as it is."""
    return _replaced.get(parameter, parameter)


def shard_fully(model: nn.Module, mesh: Mesh, sharding: FullSharding) -> None:
    """Shards the model's parameters in place, on the mesh's device. They become other objects, DTensors. Raises
    UsageError, before anything is changed, where the mesh rules that out, or torch cannot shard the parameters."""
    count = _check_mesh(mesh, sharding)
    layers = _layers(model, sharding.layers)
    _check(model, layers)
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # takes long

    before = dict(model.named_parameters())
    axis, devices = mesh.shard_axes(count)
    for parameter in before.values():
        parameter.data = parameter.data.contiguous()
    sharded: list[tuple[FSDPModule, _Gathered]] = []
    calls, names = LayerCalls(), {module: name for name, module in model.named_modules()}
    for module in [*layers, model]:
        if not any(each.is_meta for each in module.parameters()):
            place_module(module, mesh.runtime)  # a layer at a time; torch cannot move Parameters to a native device
        kind, policy = type(module), MixedPrecisionPolicy(reduce_dtype=torch.float32)
        gathered = _Gathered()
        module.register_forward_hook(gathered.open)
        reshard: Any = sharding.reshard_after_forward
        if module is model:  # the first that the backward pass needs
            reshard = None if reshard else False
        made: Any = fully_shard(module, mesh=devices, reshard_after_forward=reshard, mp_policy=policy)
        for attribute in ("__name__", "__qualname__", "__module__"):  # the model stays what it is called
            setattr(type(made), attribute, getattr(kind, attribute))
        gradients = LayerGradients(axis, calls, names[module], count)
        made.set_custom_all_gather(LayerParameters(axis, calls, names[module]))
        made.set_custom_reduce_scatter(gradients)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        made.register_forward_pre_hook(gathered.begin)
        made.register_forward_hook(_close)
        gathered.places = [
            (f"{names[part]}.{key}".lstrip("."), part._parameters, key, each)
            for part in module.modules()
            for key, each in part._parameters.items()
            if each is not None and not hasattr(each, _ATTRIBUTE)
        ]
        for *_, parameter in gathered.places:
            setattr(parameter, _ATTRIBUTE, gradients)
        sharded.append((made, gathered))
    for name, parameter in model.named_parameters():
        _replaced[before[name]] = parameter
    _take_data_of(type(next(model.parameters())))

    def free() -> None:
        for each, gathered in sharded:
            each.reshard()
            gathered.check()

    # Without a backward pass nothing else frees them, and the next forward pass would use values of before an update.
    in_backward = torch._C._current_graph_task_id  # -1 outside of it; there it frees what it has gathered
    model.register_forward_pre_hook(lambda *_: free() if in_backward() == -1 else None, prepend=True)
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else free())


def keep_whole(model: nn.Module) -> None:
    """What `shard_fully` is on one process: only sums are in the same order."""
    calls = LayerCalls()
    for parameter in model.parameters():
        setattr(parameter, _ATTRIBUTE, WholeGradients(calls))


class _Opened(NamedTuple):
    """A layer's output with the tensors in it that torch would not find; it begins the layer's backward pass with the
    gradient of what it finds. `output` returns the layer's own."""

    tensors: list[Tensor]
    output: Callable[[], Any]


class _Gathered:
    """The parameters of a layer, whose shards do not see what is done to gathered ones."""

    def __init__(self) -> None:
        self.places: list[tuple[str, dict[str, Any], str, Any]] = []  # name, where it is, and as what, sharded
        self._live: list[Any] = []
        self._compared: set[tuple[bool, bool]] = set()  # in which modes values were

    def begin(self, *_: Any) -> None:
        """After torch has gathered them for a forward pass."""
        self._live = [held.get(key) for _, held, key, _ in self.places]

    def check(self) -> None:
        """Raises UsageError where a parameter is not the sharded one any more."""
        for name, held, key, parameter in self.places:
            if held.get(key) is not parameter:
                raise _unseen(name)

    def open(self, module: nn.Module, inputs: Any, output: Any) -> _Opened | None:
        """Before torch's own hook of a layer. Raises UsageError where the layer has written to its parameters, or
        replaced some. In the first pass of each mode values are compared, since torch does not count what is written to
        `parameter.data`."""
        mode = torch.is_grad_enabled(), module.training
        for (name, held, key, parameter), live in zip(self.places, self._live, strict=True):
            known = mode in self._compared or is_dtensor(live) or is_fake(live)
            written = (not is_dtensor(live) and live._version) or not (known or _is_of(live, parameter))
            if written or held.get(key) is not live:
                raise _unseen(name)
        self._compared.add(mode)
        hidden: list[Tensor] = []
        for tensor, inside in _tensors_of(output, inside=False, seen=set()) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(_refuse_double)
                hidden += [tensor] if inside else []
        return _Opened(hidden, lambda: output) if hidden else None


def _unseen(name: str) -> UsageError:
    return UsageError(
        f"fsdp: {name} was replaced, or written to while it was gathered, which its shards do not see; write to it in "
        "on_step_end, or make it a buffer"
    )


def _is_of(gathered: Tensor, parameter: Any) -> bool:
    """Whether this rank's shard is what a gathered parameter has there, bit for bit."""
    shard = shard_of(parameter)
    own = local_shard(gathered.detach(), shard.layout, tuple(shard.tensor.shape))
    return flat_bytes(own).equal(flat_bytes(shard.tensor))


def _close(module: nn.Module, inputs: Any, output: Any) -> Any:
    """After it."""
    return output.output() if isinstance(output, _Opened) else None


def _refuse_double(_: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass: create_graph
        raise UsageError(DOUBLE)


def _tensors_of(value: Any, *, inside: bool, seen: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of an output, and whether each is `inside` an object that is no pytree."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf, inside
        elif id(leaf) not in seen and not isinstance(leaf, (nn.Module, type)):
            seen.add(id(leaf))
            names = (name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ()))
            slots = {name: getattr(leaf, name, None) for name in names if isinstance(name, str)}
            yield from _tensors_of([*slots.values(), *getattr(leaf, "__dict__", {}).values()], inside=True, seen=seen)


def _take_data_of(kind: Any) -> None:
    """Makes `parameter.data = …` of sharded parameters copy the values: torch drops them without a word."""
    if isinstance(vars(kind).get("data"), property):
        return
    data: Any = Tensor.data

    def assign(parameter: Any, value: Tensor) -> None:
        if not hasattr(parameter, _ATTRIBUTE):
            data.__set__(parameter, value)
        elif not is_dtensor(value) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            raise UsageError(
                f"fsdp: data of a parameter: a {type(value).__name__} of shape {list(value.shape)} and {value.dtype} "
                f"cannot be assigned; give it a DTensor of shape {list(parameter.shape)} and {parameter.dtype}"
            )
        else:
            with torch.no_grad():
                parameter.copy_(value)

    kind.data = property(data.__get__, assign)


def replicas(mesh: Mesh, sharding: FullSharding) -> int:
    """In how many groups of ranks the shards of a complete model are."""
    machines = max(1, mesh.data_parallel.size // mesh.context.world.local_size)
    return machines if sharding.replicas is None else sharding.replicas


def _check_mesh(mesh: Mesh, sharding: FullSharding) -> int:
    """The number of replicas. Raises UsageError for a mesh on which parameters cannot be sharded."""
    if mesh.runtime.lazy:
        raise UsageError(
            f"fsdp: {mesh.runtime.name} cannot free parameters within a graph; use zero_1, tensor_parallel_size or "
            "pipeline_parallel_size"
        )
    for name, size in mesh.sharing.items():
        if size > 1:
            raise UsageError(f"fsdp and {name}: both shard parameters; leave one of them out")
    ranks, count = mesh.data_parallel.size, replicas(mesh, sharding)
    if mesh.ranks.given and count > 1:
        raise UsageError(
            f"fsdp_config: dp_replicate_size and {FIELD}: copies of the shards are added in the backend's order; leave "
            "one of them out"
        )
    if ranks % count or count == ranks:
        raise UsageError(
            f"fsdp_config: dp_replicate_size: {count} replicas of two or more ranks each cannot be made of {ranks}; "
            f"choose a smaller divisor of {ranks}"
        )
    return count


def _layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The outermost modules of the named classes; without names, those that transformers recomputes or keeps whole.
    Left out are those that share a parameter with another module: torch would part the two."""
    kinds = set(names) or {"GradientCheckpointingLayer", *(getattr(model, "_no_split_modules", None) or ())}
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if kinds & {each.__name__ for each in type(module).__mro__} and id(module) not in inside | {id(model)}:
            found.append(module)
            inside.update(map(id, module.modules()))
    if names and not found:
        raise UsageError(f"fsdp_config: {LAYERS}: the model has no module of {', '.join(names)}")
    places = model.named_modules(remove_duplicate=False)
    uses = Counter(id(each) for _, part in places for each in part.parameters(recurse=False))
    own = [Counter(id(each) for part in layer.modules() for each in part.parameters(recurse=False)) for layer in found]
    return [
        layer for layer, used in zip(found, own, strict=True) if used and all(uses[key] == used[key] for key in used)
    ]


def _check(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises UsageError for what torch cannot shard, or would do wrongly."""
    config = getattr(model, "config", None)
    sparse = next((name for name, each in model.named_modules() if getattr(each, "sparse", False) is True), None)
    if sparse is not None:
        raise UsageError(f"fsdp: {sparse} has sparse gradients, which torch cannot reduce; leave out sparse=True")
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0.0):
            raise UsageError(f"fsdp: {name} skips other layers on each rank, which all ranks gather; set it to 0")
    inside = {id(part) for layer in layers for part in layer.modules()}
    rest = [part for part in model.modules() if id(part) not in inside]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parts in [*([*layer.modules()] for layer in layers), rest]:
        trained: dict[torch.dtype, str] = {}
        for parameter in (each for part in parts for each in part.parameters(recurse=False)):
            name = names[id(parameter)]
            if parameter.dim() == 0:
                raise UsageError(f"fsdp: {name} has no dim to shard; make it a vector of one element")
            if not parameter.numel():
                raise UsageError(f"fsdp: {name} has no elements to shard; leave it out, or use zero_1")
            if has_hooks(parameter):
                raise UsageError(f"fsdp: {name} has a hook of its gradient, {HOOKS}")
            if not parameter.is_floating_point():
                kind = "a real one (torch.view_as_real)" if parameter.is_complex() else "a buffer"
                raise UsageError(f"fsdp: {name} is {parameter.dtype}, which cannot be sharded; make it {kind}")
            if parameter.requires_grad:
                trained[parameter.dtype] = name
        if len(trained) > 1:
            (one, first), (other, second) = list(trained.items())[:2]
            raise UsageError(f"fsdp: {first} is {one} and {second} {other}, in one layer; give both one dtype")
