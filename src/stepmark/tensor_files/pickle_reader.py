"""Reads pickles of other tools without running any code of theirs.

The stack machine is Python's own, in Python: `pickle._Unpickler`, with the opcodes that checkpoints have. Nothing is
imported: a class or function of a pickle is a `PickledName`, which is accepted if a table here has it, and stays a
name. Objects become `PickledObject`s with their attributes, tensors `StoredArray`s that say where their elements are.
Every opcode takes time and memory in proportion to its bytes. The machine in C cannot promise that: it hashes whatever
a file has as a key, of which some take forever and others end the process, and allocates what a file says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from struct import unpack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from stepmark.checkpoint.format.dtypes import dtype_name, item_size
from stepmark.checkpoint.format.tensor_file import natural_numbers
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import StoredArray

_PREFIX = "torch._utils._rebuild_"
_SIZED = frozenset({str, bytes, list, tuple, dict, set, frozenset})
_LARGEST_KEY = 1 << 60  # Python's hashes of larger integers collide, by which a dict can be made very slow
_KEY_DEPTH = 3

# torch's storage classes, without "Storage" -> safetensors' names of their elements
STORAGES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
    "ComplexFloat": "C64",
}
_UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_NAMES = {*_UNTYPED, "torch.storage.TypedStorage", "torch.nn.parameter.Parameter", "torch.Tensor", "torch.strided"}

# Classes whose instances are kept as names and attributes, by their modules
_OBJECTS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch_xla.utils.serialization": "TensorReference",
    "neuronx_distributed.trainer.checkpoint": "_InternalTensorReference",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath",
    "argparse": "Namespace",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "torch": "device",
    "datetime": "timedelta",
}


@dataclass(frozen=True)
class PickledName:
    """A class or function, by its full name."""

    name: str


@dataclass(eq=False)
class PickledObject:
    """An instance of a class of another tool: what it was made from, and its attributes."""

    kind: str
    args: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """An attribute. Raises CheckpointDamaged where it has none of that name."""
        if name not in self.attributes:
            raise CheckpointDamaged(f"a {self.kind} has no {name}")
        return self.attributes[name]


class StorageBytes(NamedTuple):
    """Where the bytes of one of torch's storages are; `dtype` None: of no type."""

    path: Path
    begin: int
    size: int
    dtype: str | None


Locate = Callable[[str, str | None], StorageBytes]


def read_pickle(data: bytes, locate: Locate | None = None) -> Any:
    """The value of a pickle: plain values, `PickledObject`s, and `StoredArray`s in place of tensors.

    `locate` says where the storage of a key is, with the type that is given; without it a pickle with one is refused.
    Raises CheckpointDamaged where it is malformed, and CheckpointError where it contains a class or function that no
    known format has.
    """
    try:
        return _Machine(data, locate).run()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # the opcodes raise many types
        raise CheckpointDamaged(f"its pickle is malformed: {type(error).__name__}: {str(error)[:200]}") from error


class _Machine(pickle._Unpickler):
    if TYPE_CHECKING:  # the parts of Python's own unpickler in Python
        stack: list[Any]
        metastack: list[list[Any]]
        memo: dict[int, Any]
        append: Callable[[Any], None]
        read: Callable[[int], bytes]
        readline: Callable[[], bytes]
        dispatch: ClassVar[dict[int, Callable[[Any], None]]]

        def pop_mark(self) -> list[Any]: ...

    def __init__(self, data: bytes, locate: Locate | None) -> None:
        self._file = file = io.BytesIO(data)
        super().__init__(file)
        self.read, self.readline = file.read, file.readline
        self._locate = locate
        self._copied = 0

    def run(self) -> Any:
        """As `load` does, without its way through frames."""
        self.stack, self.metastack, self.memo = [], [], {}
        self.append = self.stack.append
        read, opcodes = self.read, _OPCODES
        try:
            while key := read(1):
                opcode = opcodes.get(key[0])
                if opcode is None:
                    raise CheckpointError(f"its pickle has the opcode {key!r}, which no known format uses")
                opcode(self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise EOFError("no end")

    def _charge(self, values: Any) -> None:
        """Counts what a call may copy, which has to stay in proportion to the bytes read so far."""
        for value in (values, *values) if type(values) is tuple else ():
            self._copied += len(value) if type(value) in _SIZED else 1
        if self._copied > 16 * self._file.tell() + 4096:
            raise ValueError("it copies the same values again and again")

    def find_class(self, module: str, name: str) -> Any:
        return _known(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> StorageBytes:
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise ValueError("an unknown persistent id")
        _, kind, key, _, numel = identity[:5]
        if type(key) is not str or type(numel) is not int or numel < 0:
            raise ValueError("an unknown persistent id")
        if len(identity) == 6 and identity[5] is not None:
            raise CheckpointError("it has views of storages as torch wrote them before version 0.4; save it again")
        if self._locate is None:
            raise CheckpointError("its pickle refers to data outside itself; this is not a file of a known format")
        if type(kind) is not PickledName:
            raise ValueError("an unknown persistent id")
        dtype = storage_dtype(kind.name)
        if dtype is None and kind.name not in _UNTYPED:
            raise CheckpointError(f"it has a tensor of {kind.name}, which checkpoints cannot hold")
        return self._locate(key, dtype)

    # Opcodes of which Python's own hash, call or allocate what the file says

    def frame(self) -> None:
        self.read(8)

    def byte_array(self) -> None:
        (size,) = unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    def make_dict(self) -> None:
        self.append(_set_items({}, self.pop_mark()))

    def make_frozenset(self) -> None:
        self.append(frozenset(map(_key, self.pop_mark())))

    def add_items(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError("not a set")
        target.update(map(_key, items))

    def set_item(self) -> None:
        items = [self.stack.pop(-2), self.stack.pop()]
        _set_items(self.stack[-1], items)

    def set_items(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack[-1]
        self._charge(arguments)
        self.stack[-1] = _made(kind, arguments)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, PickledObject):
            return  # attributes of an OrderedDict or a tensor, such as a state dict's _metadata
        parts = state if type(state) is tuple else (state,)
        self._charge(parts)
        for part in parts:
            if isinstance(part, dict):
                target.attributes.update({key: value for key, value in part.items() if type(key) is str})


def _set_items(target: Any, items: list[Any]) -> Any:
    if type(target) is not dict:
        raise TypeError("not a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key if type(key) is str else _key(key)] = value
    return target


def _key(value: Any, depth: int = 0) -> Any:
    """The value, if it is one that formats use as a key and that is quick to hash."""
    kind = type(value)
    if kind in (str, bytes, bool, PickledName, PickledObject) or value is None:
        return value
    if kind is int and abs(value) < _LARGEST_KEY:
        return value
    if kind is tuple and depth < _KEY_DEPTH and len(value) <= 16:
        for item in value:
            _key(item, depth + 1)
        return value
    raise CheckpointError(f"its pickle has a {kind.__name__} as a key, which no known format has")


@cache
def _known(name: str) -> PickledName:
    """Raises CheckpointError, which names the class, for one that no known format has."""
    dtype = name.startswith("torch.") and dtype_name(name) is not None
    if dtype or name in _FUNCTIONS or name in _NAMES or storage_dtype(name) is not None:
        return PickledName(name)
    raise CheckpointError(
        f"its pickle contains {name[:120]}, which is not among the classes of checkpoints; nothing of it was run. Save "
        "tensors and plain values only"
    )


@cache
def storage_dtype(name: str) -> str | None:
    """safetensors' name of the elements of one of torch's storage classes, None for another class."""
    head, _, short = name.rpartition(".")
    return STORAGES.get(short.removesuffix("Storage")) if head in ("torch", "torch.cuda", "torch.storage") else None


def _made(kind: Any, arguments: Any) -> Any:
    """What a class or function of another tool stands for, made from its arguments."""
    if not isinstance(kind, PickledName) or type(arguments) is not tuple:
        raise TypeError("a call of what is no class or function")
    known = _FUNCTIONS.get(kind.name)
    if known is None:
        raise CheckpointError(f"its pickle makes an instance of {kind.name}, which no known format has")
    return known(*arguments)


# What the functions and classes in pickles make here


def _dict(items: Any = (), /) -> dict[Any, Any]:
    return {_key(key): value for key, value in (items.items() if type(items) is dict else items)}


def _set(items: Any = (), /) -> set[Any]:
    return {_key(item) for item in _sequence(items)}


def _sequence(items: Any = (), /) -> list[Any]:
    if type(items) not in (list, tuple, set, frozenset):
        raise TypeError("not a sequence")
    return list(items)


def natural(items: Any) -> Shape:
    """A sequence of non-negative integers as a tuple. Raises ValueError for anything else."""
    return natural_numbers(_sequence(items))


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredArray:
    """`rest`: whether it needs a gradient, hooks, and whether its values are those of its storage."""
    if not isinstance(storage, StorageBytes) or storage.dtype is None:
        raise TypeError("a tensor without a storage")
    metadata = rest[2] if len(rest) > 2 else None
    if type(metadata) is dict and (metadata.get("neg") or metadata.get("conj")):
        raise CheckpointError(
            "a tensor is saved as the negative or the complex conjugate of what is stored; save a copy of its own, "
            "with .resolve_neg().resolve_conj()"
        )
    (begin,), shape, strides = natural((offset,)), natural(size), natural(stride)
    if len(shape) != len(strides):
        raise ValueError("a tensor's strides do not fit its shape")
    element = item_size(storage.dtype)
    array = StoredArray(storage.path, storage.begin + begin * element, storage.dtype, shape, strides)
    if begin * element + array.span() > storage.size:
        raise CheckpointDamaged(f"a tensor of shape {list(shape)} exceeds its storage of {storage.size} bytes")
    if array.numel * element > storage.size:
        raise CheckpointDamaged(f"a tensor of shape {list(shape)} repeats elements; save it contiguous")
    return array


def _rebuilt_with_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> StoredArray:
    if not isinstance(storage, StorageBytes) or not isinstance(dtype, PickledName):
        raise TypeError("a tensor without a storage or dtype")
    name = dtype_name(dtype.name)
    if name is None:
        raise CheckpointError(f"a tensor has the dtype {dtype.name}, which checkpoints cannot hold")
    return _rebuilt(storage._replace(dtype=name), offset, size, stride, grad, hooks, *rest)


def _first(value: Any, *_: Any) -> Any:
    return value


def _encode(text: Any, encoding: Any = "latin1", /) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "utf-8"):
        raise TypeError("not a text")
    return text.encode(encoding)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module}.{name}": lambda *arguments, kind=f"{module}.{name}": PickledObject(kind, arguments)
    for module, names in _OBJECTS.items()
    for name in names.split()
} | {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda _=None, items=(): _dict(items),
    "collections.Counter": _dict,
    "builtins.dict": _dict,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.list": _sequence,
    "builtins.tuple": lambda items=(): tuple(_sequence(items)),
    "__builtin__.set": _set,
    "__builtin__.frozenset": _set,
    "builtins.complex": lambda real, imaginary: (real, imaginary),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": lambda kind, *_: _made(kind, ()),
    "copy_reg._reconstructor": lambda kind, *_: _made(kind, ()),
    "copyreg.__newobj__": lambda kind, *arguments: _made(kind, arguments),
    "torch.Size": natural,
    "torch.serialization._get_layout": _first,
    f"{_PREFIX}tensor": _rebuilt,
    f"{_PREFIX}tensor_v2": _rebuilt,
    f"{_PREFIX}tensor_v3": _rebuilt_with_dtype,
    f"{_PREFIX}parameter": _first,
    f"{_PREFIX}parameter_with_state": _first,
    f"{_PREFIX}device_tensor_from_cpu_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": lambda function, _, arguments, *rest: _made(function, arguments),
}


_KEPT = (
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES "
    "BINBYTES8 EMPTY_LIST EMPTY_TUPLE EMPTY_DICT EMPTY_SET LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS PUT BINPUT "
    "LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID"
)

_OPCODES = {getattr(pickle, name)[0]: _Machine.dispatch[getattr(pickle, name)[0]] for name in _KEPT.split()} | {
    pickle.FRAME[0]: _Machine.frame,
    pickle.BYTEARRAY8[0]: _Machine.byte_array,
    pickle.DICT[0]: _Machine.make_dict,
    pickle.FROZENSET[0]: _Machine.make_frozenset,
    pickle.ADDITEMS[0]: _Machine.add_items,
    pickle.SETITEM[0]: _Machine.set_item,
    pickle.SETITEMS[0]: _Machine.set_items,
    pickle.REDUCE[0]: _Machine.make,
    pickle.NEWOBJ[0]: _Machine.make,
    pickle.BUILD[0]: _Machine.build,
}
