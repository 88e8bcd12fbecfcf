"""Reads pickles of other tools without running any code of theirs.

A small stack machine over the opcodes of `pickletools`. Nothing is imported and nothing is called by name: a class or
function of a pickle is a `Global`, which is accepted if its name is in a table here, and stays a name. Objects become
`PickledObject`s with their attributes, tensors `PickledTensor`s that say where their elements are. Every opcode takes
time and memory in proportion to its bytes, so a malicious file can take no more of either than its size warrants.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from stepmark.checkpoint.format.dtypes import DTYPES
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.sharding.layout import Shape

_SIZED = frozenset({str, bytes, list, tuple, dict, set, frozenset})
_LARGEST_INTEGER = 1 << 1024
_LARGEST_KEY = 1 << 60  # Python's hashes of larger integers collide, by which a dict can be made very slow
_KEY_DEPTH = 3

# torch's storage classes -> safetensors' names of their elements
_STORAGES = {
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
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_OTHER_STORAGES = ("torch.storage.TypedStorage", *UNTYPED)

# Classes whose instances are kept as names and attributes.
_METADATA = "torch.distributed.checkpoint.metadata."
_OBJECTS = frozenset(
    {
        *(
            _METADATA + name
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch_xla.utils.serialization.TensorReference",
        "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "argparse.Namespace",
        "torch.device",
        "datetime.timedelta",
    }
)


@dataclass(frozen=True)
class Global:
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


@dataclass(frozen=True, eq=False)
class PickledStorage:
    """A run of elements in the file: `key` says where; `numel` elements, bytes if `dtype` is None."""

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """A view of a storage, in elements of `dtype`."""

    storage: PickledStorage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape


Persistent = Callable[[Any], PickledStorage]


def read_pickle(file: BinaryIO, persistent: Persistent | None = None) -> Any:
    """The value of the pickle at the file's position; the file is left behind its end.

    Args:
        file: A file whose `read` returns no more than there is, whatever it is asked for.
        persistent: Turns a persistent id into a storage; default: a pickle with one is refused.

    Returns:
        Plain values, `PickledObject`s and `PickledTensor`s.

    Raises:
        CheckpointDamaged: It is malformed.
        CheckpointError: It contains a class or function that no known format has.
    """
    try:
        return _Machine(persistent).run(file)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # pickletools and the opcodes raise many types
        raise CheckpointDamaged(f"its pickle is malformed: {type(error).__name__}: {str(error)[:200]}") from error


class _Machine:
    def __init__(self, persistent: Persistent | None) -> None:
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._position = 0
        self._copied = 0

    def run(self, file: BinaryIO) -> Any:
        actions = _ACTIONS
        for opcode, argument, position in pickletools.genops(file):
            self._position = position or 0
            name = opcode.name
            if name in _PUSHED:
                self._stack.append(_checked(argument))
            elif name == "STOP":
                return self._stack.pop()
            else:
                action = actions.get(name)
                if action is None:
                    raise CheckpointError(f"its pickle has the opcode {name}, which no known format uses")
                action(self, argument)
        raise ValueError("no end")

    def _charge(self, values: Any) -> None:
        """Counts what a call may copy, which has to stay in proportion to the bytes read so far."""
        for value in (values, *values) if type(values) is tuple else ():
            self._copied += len(value) if type(value) in _SIZED else 1
        if self._copied > 16 * self._position + 4096:
            raise ValueError("it copies the same values again and again")

    def _above_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    # Opcodes

    def mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._above_mark()

    def pop_mark(self, _: Any) -> None:
        self._above_mark()

    def dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def none(self, _: Any) -> None:
        self._stack.append(None)

    def true(self, _: Any) -> None:
        self._stack.append(True)

    def false(self, _: Any) -> None:
        self._stack.append(False)

    def empty_list(self, _: Any) -> None:
        self._stack.append([])

    def empty_tuple(self, _: Any) -> None:
        self._stack.append(())

    def empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def empty_set(self, _: Any) -> None:
        self._stack.append(set())

    def make_list(self, _: Any) -> None:
        items = self._above_mark()
        self._stack.append(items)

    def make_tuple(self, _: Any) -> None:
        items = self._above_mark()
        self._stack.append(tuple(items))

    def make_frozenset(self, _: Any) -> None:
        items = self._above_mark()
        self._stack.append(frozenset(map(_key, items)))

    def make_dict(self, _: Any) -> None:
        items = self._above_mark()
        made: dict[Any, Any] = {}
        _set_items(made, items)
        self._stack.append(made)

    def tuple1(self, _: Any) -> None:
        self._make_tuple_of(1)

    def tuple2(self, _: Any) -> None:
        self._make_tuple_of(2)

    def tuple3(self, _: Any) -> None:
        self._make_tuple_of(3)

    def _make_tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise ValueError("the stack is empty")
        self._stack[-count:] = [items]

    def append(self, _: Any) -> None:
        value = self._stack.pop()
        self._list().append(value)

    def appends(self, _: Any) -> None:
        items = self._above_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("not a list")
        return target

    def add_items(self, _: Any) -> None:
        items = self._above_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise TypeError("not a set")
        target.update(map(_key, items))

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _set_items(self._stack[-1], [key, value])

    def set_items(self, _: Any) -> None:
        items = self._above_mark()
        _set_items(self._stack[-1], items)

    def put(self, index: int) -> None:
        self._memo[_key(int(index))] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[int(index)])

    def find(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(_known(f"{module}.{name}"))

    def find_on_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("the name of a class is not a string")
        self._stack.append(_known(f"{module}.{name}"))

    def persistent_id(self, _: Any) -> None:
        if self._persistent is None:
            raise CheckpointError("its pickle refers to data outside itself; this is not a file of a known format")
        self._stack.append(self._persistent(self._stack.pop()))

    def reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._charge(arguments)
        self._stack.append(_call(function, arguments))

    def new_object(self, _: Any) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        self._stack.append(_instance(kind, arguments))

    def build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, PickledObject):
            return  # attributes of an OrderedDict or a tensor, such as a state dict's _metadata
        parts = state if type(state) is tuple else (state,)
        self._charge(parts)
        for part in parts:
            if isinstance(part, dict):
                target.attributes.update({key: value for key, value in part.items() if type(key) is str})


def _checked(value: Any) -> Any:
    if type(value) is int and abs(value) >= _LARGEST_INTEGER:
        raise ValueError("an integer of more than 1024 bits")
    return value


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict:
        raise TypeError("not a dict")
    if len(items) % 2:
        raise ValueError("a key without a value")
    for index in range(0, len(items), 2):
        target[_key(items[index])] = items[index + 1]


def _key(value: Any, depth: int = 0) -> Any:
    """The value, if it is one that formats use as a key and that is quick to hash."""
    kind = type(value)
    if kind in (str, bytes, bool, Global, PickledObject) or value is None:
        return value
    if kind is int and abs(value) < _LARGEST_KEY:
        return value
    if kind is tuple and depth < _KEY_DEPTH and len(value) <= 16:
        for item in value:
            _key(item, depth + 1)
        return value
    raise CheckpointError(f"its pickle has a {kind.__name__} as a key, which no known format has")


def _known(name: str) -> Global:
    """Raises CheckpointError, which names the class, for one that no known format has."""
    short = name.rpartition(".")[2]
    if name in _FUNCTIONS or name in _OBJECTS or storage_dtype(name) is not None or name in _OTHER_STORAGES:
        return Global(name)
    if name.startswith("torch.") and (dtype_of(name) is not None or short == "strided"):
        return Global(name)
    if name in ("torch.nn.parameter.Parameter", "torch.Tensor"):
        return Global(name)
    raise CheckpointError(
        f"its pickle contains {name[:120]}, which is not among the classes of checkpoints; nothing of it was run. Save "
        "tensors and plain values only"
    )


def storage_dtype(name: str) -> str | None:
    """safetensors' name of the elements of one of torch's storage classes, None for another class."""
    head, _, short = name.rpartition(".")
    return _STORAGES.get(short.removesuffix("Storage")) if head in ("torch", "torch.cuda", "torch.storage") else None


def dtype_of(name: str) -> str | None:
    """safetensors' name of one of torch's dtypes, such as `torch.float32`; None for another name."""
    short = name.removeprefix("torch.")
    return next((key for key, (_, torch_name) in DTYPES.items() if torch_name == short), None)


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise TypeError("a call of what is not a function")
    known = _FUNCTIONS.get(function.name)
    return known(*arguments) if known is not None else _instance(function, arguments)


def _instance(kind: Any, arguments: Any) -> Any:
    if not isinstance(kind, Global) or type(arguments) is not tuple:
        raise TypeError("an instance of what is not a class")
    if kind.name in _OBJECTS:
        return PickledObject(kind.name, arguments)
    known = _FUNCTIONS.get(kind.name)
    if known is not None:
        return known(*arguments)
    raise CheckpointError(f"its pickle makes an instance of {kind.name}, which no known format has")


# What the functions and classes in pickles make here


def _dict(items: Any = (), /) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in items.items() if type(items) is dict else items:
        made[_key(key)] = value
    return made


def _default_dict(_: Any = None, items: Any = (), /) -> dict[Any, Any]:
    return _dict(items)


def _set(items: Any = (), /) -> set[Any]:
    return {_key(item) for item in _sequence(items)}


def _sequence(items: Any = (), /) -> list[Any]:
    if type(items) not in (list, tuple, set, frozenset):
        raise TypeError("not a sequence")
    return list(items)


def _size(items: Any, /) -> tuple[int, ...]:
    return natural(items)


def natural(items: Any) -> Shape:
    """A sequence of non-negative integers as a tuple. Raises ValueError for anything else."""
    found = tuple(_sequence(items))
    if any(type(item) is not int or not 0 <= item < 1 << 62 for item in found) or len(found) > 64:
        raise ValueError("not a shape")
    return found


def _rebuilt(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any = None,
    _hooks: Any = None,
    metadata: Any = None,
    *_: Any,
) -> PickledTensor:
    if not isinstance(storage, PickledStorage) or storage.dtype is None:
        raise TypeError("a tensor without a storage")
    _check_view(metadata)
    return _tensor(storage, storage.dtype, offset, size, stride)


def _rebuilt_with_dtype(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
    *_: Any,
) -> PickledTensor:
    _check_view(metadata)
    if not isinstance(storage, PickledStorage) or not isinstance(dtype, Global):
        raise TypeError("a tensor without a storage or dtype")
    name = dtype_of(dtype.name)
    if name is None:
        raise CheckpointError(f"a tensor has the dtype {dtype.name}, which checkpoints cannot hold")
    return _tensor(storage, name, offset, size, stride)


def _check_view(metadata: Any) -> None:
    """Raises CheckpointError for a tensor whose values are not those of its storage."""
    if type(metadata) is dict and (metadata.get("neg") or metadata.get("conj")):
        raise CheckpointError(
            "a tensor is saved as the negative or the complex conjugate of what is stored; save a copy of its own, "
            "with .resolve_neg().resolve_conj()"
        )


def _tensor(storage: PickledStorage, dtype: str, offset: Any, size: Any, stride: Any) -> PickledTensor:
    (begin,) = natural((offset,))
    shape, strides = natural(size), natural(stride)
    if len(shape) != len(strides):
        raise ValueError("a tensor's strides do not fit its shape")
    return PickledTensor(storage, dtype, begin, shape, strides)


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_type(function: Any, _kind: Any, arguments: Any, *_: Any) -> Any:
    return _call(function, arguments)


def _empty_object(kind: Any, *_: Any) -> Any:
    return _instance(kind, ())


def _encode(text: Any, encoding: Any = "latin1", /) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "utf-8"):
        raise TypeError("not a text")
    return text.encode(encoding)


_PREFIX = "torch._utils._rebuild_"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
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
    "copyreg._reconstructor": _empty_object,
    "copy_reg._reconstructor": _empty_object,
    "copyreg.__newobj__": lambda kind, *arguments: _instance(kind, arguments),
    "torch.Size": _size,
    "torch.serialization._get_layout": _first,
    f"{_PREFIX}tensor": _rebuilt,
    f"{_PREFIX}tensor_v2": _rebuilt,
    f"{_PREFIX}tensor_v3": _rebuilt_with_dtype,
    f"{_PREFIX}parameter": _first,
    f"{_PREFIX}parameter_with_state": _first,
    f"{_PREFIX}device_tensor_from_cpu_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}

_PUSHED = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.dup,
    "NONE": _Machine.none,
    "NEWTRUE": _Machine.true,
    "NEWFALSE": _Machine.false,
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_TUPLE": _Machine.empty_tuple,
    "EMPTY_DICT": _Machine.empty_dict,
    "EMPTY_SET": _Machine.empty_set,
    "LIST": _Machine.make_list,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": _Machine.tuple1,
    "TUPLE2": _Machine.tuple2,
    "TUPLE3": _Machine.tuple3,
    "DICT": _Machine.make_dict,
    "FROZENSET": _Machine.make_frozenset,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "ADDITEMS": _Machine.add_items,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.find,
    "STACK_GLOBAL": _Machine.find_on_stack,
    "BINPERSID": _Machine.persistent_id,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object,
    "BUILD": _Machine.build,
}
