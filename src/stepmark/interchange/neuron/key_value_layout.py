"""How neuronx-distributed and optimum-neuron cut a model over tensor parallel ranks, and permute key/value heads.

A rank's tensor becomes parts of one or more tensors with Hugging Face's names. All cuts of one tensor are along one
dim: a `Move` says which rows (or columns) of which rank become which rows of which tensor, and `unsharded` puts these
together. Where key/value heads are replicated, because there are fewer than ranks, the order of heads is undone: see
`HeadLayout`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, moved

TILED, BLOCKED, NATURAL, WIDE = "tiled", "blocked", "natural", "wide"
_NAME = re.compile(
    r"(?P<prefix>(?:.*\.)?)(?P<module>(?!lora_[AB]\.|base_layer\.)[^.]+)\.(?P<base>base_layer\.)?(?:(?P<lora>lora_[AB])\.)?"
    r"(?P<kind>weight|bias)(?:_(?P<part>qkv|[qkv]))?\Z"
)
_COLUMN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj", "embed_tokens", "lm_head"}
ROW = {"o_proj", "down_proj"}
_MEMBERS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


@dataclass(frozen=True)
class HeadLayout:
    """Attention heads, and how they lie on the ranks.

    `queries` and `keys` are the model's own numbers, `copies` how often each key/value head is stored, and `size` a
    head's rows. With "tiled" copies, as on trn1, the stored key heads are 0 to `keys` - 1 again and again, and the
    query heads are stored so that each meets its own; with "blocked" ones, as on trn2, neighbours are equal, and with
    "natural" copies are tiled, and queries in order.
    """

    queries: int
    keys: int
    copies: int
    size: int
    arrangement: str = TILED

    def query_order(self) -> list[int]:
        """The query head at each stored position."""
        group, copies = self.queries // self.keys, self.copies
        if copies == 1 or self.arrangement in (BLOCKED, NATURAL, WIDE):
            return list(range(self.queries))
        part = group // copies
        return [h * group + r * part + t for r in range(copies) for h in range(self.keys) for t in range(part)]

    def key_order(self) -> list[int]:
        """The key/value head at each stored position; those that come again are replicas."""
        stored = range(self.keys * self.copies)
        if self.arrangement == WIDE:
            return list(stored)
        return [p // self.copies if self.arrangement == BLOCKED else p % self.keys for p in stored]


@dataclass(frozen=True)
class Move:
    """Elements [start, start + length) along `dim` of a rank's tensor become those from `at` on of `name`."""

    name: str
    rank: int
    dim: int
    start: int
    length: int
    at: int
    replica: bool = False


def moves_of(
    name: str, shapes: Sequence[Shape], heads: HeadLayout | None, dim: int | str | None = "name"
) -> list[Move]:
    """Where the parts of the tensor parallel ranks' tensors of these shapes, stored under a name, belong.

    `heads` is None where the checkpoint has no attention heads that are cut. `dim` is that along which the tensor is
    cut, None if every rank has all of it; by default what the name says. Raises CheckpointMismatch where the shapes do
    not fit the name.
    """
    match = _NAME.match(name)
    if match is None:
        return _replicated([name], shapes) if not isinstance(dim, int) else joined(name, shapes, dim)
    prefix, module, part = match["prefix"], match["module"], match["part"]
    tail = f"{match['base'] or ''}{(match['lora'] + '.') if match['lora'] else ''}{match['kind']}"
    if "expert_mlps." in prefix and len(shapes[0]) != 3:
        raise CheckpointMismatch(f"tensor {name!r} is {list(shapes[0])}; of fused experts, only weights are known")
    members = [module] if len(shapes[0]) == 3 and module == "gate_up_proj" else members_of(module, part)
    names = [f"{prefix}{member}.{tail}" for member in members]
    if module in ROW:  # cut along the dim of its inputs; those of o_proj are query heads
        if match["lora"] == "lora_B" or match["kind"] == "bias":
            return _replicated(names, shapes)
        in_heads = module == "o_proj" and len(shapes[0]) != 3
        return _heads_of(names[0], shapes, heads if in_heads else None, "q_proj", 1)
    if match["lora"] == "lora_A" or (module not in _COLUMN and not isinstance(dim, int)):
        return _replicated(names, shapes)
    if len(shapes[0]) == 3:
        return _halves(names * 2, shapes, 2) if module == "gate_up_proj" else joined(names[0], shapes, 2)
    if module == "gate_up_proj":
        return _halves(names, shapes, 0)
    if module == "qkv_proj" and part in (None, "qkv"):
        return _fused(names, shapes, heads, part)
    if module == "qkv_proj":
        return _heads_of(names[0], shapes, heads, members[0])
    return joined(names[0], shapes, dim if isinstance(dim, int) else 0)


def members_of(module: str, part: str | None = None) -> list[str]:
    """Hugging Face's modules in a fused one, or in a `part` of its name such as "q"; of any other the module itself."""
    if module == "qkv_proj":
        return [_MEMBERS[one] for one in (part or "qkv")]
    return ["gate_proj", "up_proj"] if module == "gate_up_proj" else [module]


def _replicated(names: Sequence[str], shapes: Sequence[Shape]) -> list[Move]:
    """Every rank has all of it."""
    length = shapes[0][0] if shapes[0] else 1
    return [Move(name, rank, 0, 0, length, 0, replica=rank > 0) for name in names for rank in range(len(shapes))]


def joined(name: str, shapes: Sequence[Shape], dim: int) -> list[Move]:
    """The ranks' tensors follow each other along a dim."""
    moves, at = [], 0
    for rank, shape in enumerate(shapes):
        if len(shape) <= dim:
            raise CheckpointMismatch(f"tensor {name!r} is {list(shape)}, and should be cut along dim {dim}")
        moves.append(Move(name, rank, dim, 0, shape[dim], at))
        at += shape[dim]
    return moves


def _halves(names: Sequence[str], shapes: Sequence[Shape], dim: int) -> list[Move]:
    """Each rank has its part of both tensors, one after the other; of equal names, in one tensor."""
    half = shapes[0][dim] // 2
    if any(shape[dim] != 2 * half for shape in shapes):
        raise CheckpointMismatch(f"tensor {names[0]!r} is fused, and {shapes[0][dim]} rows cannot be two equal parts")
    shift = half * len(shapes) if names[0] == names[1] else 0
    return [
        Move(name, rank, dim, number * half, half, rank * half + number * shift)
        for number, name in enumerate(names)
        for rank in range(len(shapes))
    ]


def _heads_of(name: str, shapes: Sequence[Shape], heads: HeadLayout | None, member: str, dim: int = 0) -> list[Move]:
    if heads is None or heads.copies == 1:
        return joined(name, shapes, dim)
    order = heads.query_order() if member == "q_proj" else heads.key_order()
    return _by_head(name, shapes, dim, heads.size, order)


def _fused(names: Sequence[str], shapes: Sequence[Shape], heads: HeadLayout | None, part: str | None) -> list[Move]:
    """Each rank has its query, key and value rows one after the other."""
    rows, ranks = shapes[0][0], len(shapes)
    if heads is None and part is None:
        query = key = rows // 3
    elif heads is None:
        raise CheckpointMismatch(f"tensor {names[0]!r} is fused, and the number of heads is unknown")
    else:
        query = heads.queries * heads.size // ranks
        key = heads.keys * heads.copies * heads.size // ranks
    if query + 2 * key != rows:
        raise CheckpointMismatch(f"tensor {names[0]!r} has {rows} rows on a rank, which do not fit the config's heads")
    moves = []
    for name, start, length in zip(names, (0, query, query + key), (query, key, key), strict=True):
        inner = [(length, *shape[1:]) for shape in shapes]
        found = _heads_of(name, inner, heads, "q_proj" if ".q_proj." in f".{name}" else "k_proj")
        moves += [Move(m.name, m.rank, m.dim, m.start + start, m.length, m.at, m.replica) for m in found]
    return moves


def _by_head(name: str, shapes: Sequence[Shape], dim: int, size: int, order: Sequence[int]) -> list[Move]:
    """Head by head, since they are stored in another order; heads that come again are replicas."""
    per_rank, remainder = divmod(shapes[0][dim], size)
    if remainder or per_rank * len(shapes) != len(order) or any(shape[dim] != shapes[0][dim] for shape in shapes):
        raise CheckpointMismatch(
            f"tensor {name!r} has {shapes[0][dim]} rows on a rank, which do not fit {len(order)} heads of {size}"
        )
    moves: list[Move] = []
    seen: set[int] = set()
    for position, head in enumerate(order):
        rank, inside = divmod(position, per_rank)
        moves.append(Move(name, rank, dim, inside * size, size, head * size, head in seen))
        seen.add(head)
    return moves


def unsharded(locals_: Sequence[GlobalTensor], moves: Sequence[Move]) -> dict[str, GlobalTensor]:
    """The global tensors that the ranks' tensors, which may be in several pieces themselves, are parts of.

    Raises CheckpointDamaged where the ranks' tensors have different types.
    """
    dtypes = {tensor.source_dtype for tensor in locals_}
    if len(dtypes) != 1:
        raise CheckpointDamaged(f"{locals_[0].where} is {' and '.join(sorted(dtypes))} on different ranks")
    found: dict[str, GlobalTensor] = {}
    by_name: dict[str, list[Move]] = {}
    for move in moves:
        by_name.setdefault(move.name, []).append(move)
    for name, own in by_name.items():
        local, dim = locals_[0], own[0].dim
        if not local.shape:
            pieces, replicas = local.pieces, tuple(piece for other in locals_[1:] for piece in other.pieces)
            found[name] = GlobalTensor(local.name, local.dtype, (), pieces, replicas, local.rounds)
            continue
        size = max(move.at + move.length for move in own)
        shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
        taken = [piece for move in own if not move.replica for piece in _moved(locals_[move.rank].pieces, local, move)]
        again = [piece for move in own if move.replica for piece in _moved(locals_[move.rank].pieces, local, move)]
        again += [piece for move in own for piece in _moved(locals_[move.rank].replicas, local, move)]
        found[name] = GlobalTensor(local.name, local.dtype, shape, tuple(taken), tuple(again), local.rounds)
    return found


def _moved(pieces: Sequence[Piece], local: GlobalTensor, move: Move) -> list[Piece]:
    offsets = [0] * len(local.shape)
    offsets[move.dim] = move.at
    return moved(pieces, local.range_along(move.dim, move.start, move.length), tuple(offsets))
