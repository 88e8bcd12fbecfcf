"""Samples → one batch, with sequences padded to stated lengths.

A batch has one length for all its sequences: `input_ids` and the features that belong to them. Labels are padded with
-100, ids with the pad id, everything else with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from stepmark.data.packing import IGNORED
from stepmark.errors import DataError, UsageError

SEQUENCES = frozenset(
    {"input_ids", "attention_mask", "labels", "token_type_ids", "position_ids", "special_tokens_mask"}
)
LABELS = ("label", "label_ids")  # which become `labels`
FIXED_SHAPES = (
    "batches must keep one shape here: state a length, or a few, that samples are padded to (data_collator=PadTo(128) "
    "for the Trainer, pad_to for a DataLoader)"
)


@dataclass(frozen=True)
class Padding:
    """The lengths that sequences may have, ascending, and the id to pad `input_ids` with. Without stated lengths a
    batch is as long as its longest sample, which only a `free` shape allows."""

    lengths: tuple[int, ...] = ()
    pad_token_id: int = 0
    free: bool = True

    @classmethod
    def of(cls, pad_to: int | Sequence[int] | None, pad_token_id: int, free: bool) -> Padding:
        """Raises UsageError for lengths that are not positive, and for an empty list of them."""
        if pad_to is None:
            return cls((), pad_token_id, free)
        lengths = (pad_to,) if isinstance(pad_to, int) else tuple(sorted(set(pad_to)))
        if not lengths or lengths[0] < 1:
            raise UsageError(f"pad_to must be a positive length, or several, not {pad_to!r}")
        return cls(lengths, pad_token_id, free)

    def fit(self, length: int) -> int | None:
        """The smallest stated length that is at least `length`; None if there is none."""
        return next((stated for stated in self.lengths if stated >= length), None)

    def value(self, name: str) -> int:
        """The padding value of a feature."""
        return {"labels": IGNORED, "input_ids": self.pad_token_id, "special_tokens_mask": 1}.get(name, 0)


@dataclass(frozen=True)
class PadTo:
    """A `data_collator` that pads sequences to stated lengths, so that a lazy device sees few shapes.

        Trainer(…, data_collator=PadTo([64, 128]))

    Args:
        lengths: one length in tokens, or several, of which the smallest that fits is used.
        collate_fn: makes the batch that is padded; default: samples are stacked.
    """

    lengths: int | Sequence[int]
    collate_fn: Callable[[list[Any]], Any] | None = None


def collate(samples: Sequence[Any], indices: Sequence[int], padding: Padding, length: int | None = None) -> Any:
    """The default collator: samples that are mappings become a dict of tensors [rows, …], sequences padded to `length`,
    else to the stated length that fits, else to the longest of the batch. Strings and None are left out, and `label` is
    renamed `labels`, as in transformers' default collator. Other samples are stacked by PyTorch's default collator.

    `indices` are the samples' numbers, for messages. Raises DataError if a sample is longer than all stated lengths,
    UsageError if lengths differ where shapes are fixed.
    """
    if not isinstance(samples[0], Mapping):
        return default_collate(list(samples))
    columns = {
        "labels" if name in LABELS else name: [_label(sample[name], name) for sample in samples]
        for name, value in samples[0].items()
        if value is not None and not isinstance(value, str)
    }
    names = sequence_names(columns)
    if not names:
        return {name: torch.stack(rows) for name, rows in columns.items()}
    longest = [max(columns[name][row].shape[0] for name in names) for row in range(len(samples))]
    target = max(longest)
    if padding.lengths:
        target = _fitting(target, length, padding, indices[longest.index(target)])
    elif min(longest) < target and not padding.free:
        raise UsageError(f"samples have lengths from {min(longest)} to {target}, and {FIXED_SHAPES}")
    if "input_ids" in columns and "attention_mask" not in columns and (padding.lengths or min(longest) < target):
        columns["attention_mask"] = [torch.ones_like(ids, dtype=torch.int64) for ids in columns["input_ids"]]
        names = [*names, "attention_mask"]
    for name in names:
        columns[name] = [_extend(row, 0, target, padding.value(name)) for row in columns[name]]
    return {name: torch.stack(rows) for name, rows in columns.items()}


def pad_collated(inputs: Any, indices: Sequence[int], padding: Padding, length: int | None = None) -> Any:
    """The output of a user's collator, as a plain dict if it is a mapping, with its sequences [rows, L, …] padded as in
    `collate`. Raises DataError where L is longer than all stated lengths."""
    if not isinstance(inputs, Mapping):
        return inputs
    batch = dict(inputs)
    if not padding.lengths:
        return batch
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1}
    names = [name for name in tensors if name in SEQUENCES and not tensors[name].is_floating_point()]
    if not names:
        return batch
    width = max(tensors[name].shape[1] for name in names)
    names += [name for name in tensors if name not in names and tensors[name].shape[1] == width]
    target = _fitting(width, length, padding, *indices)
    if "input_ids" in names and "attention_mask" not in batch:
        batch["attention_mask"] = tensors["attention_mask"] = torch.ones_like(batch["input_ids"], dtype=torch.int64)
        names.append("attention_mask")
    for name in names:
        batch[name] = _extend(tensors[name], 1, target, padding.value(name))
    return batch


def sample_length(sample: Any) -> int:
    """The length of a sample's sequences before padding; 0 without any."""
    if not isinstance(sample, Mapping):
        return 0
    known = [_tensor(value) for name, value in sample.items() if name in SEQUENCES and value is not None]
    return max((row.shape[0] for row in known if row.ndim and not row.is_floating_point()), default=0)


def sequence_names(columns: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """The features that are padded, given the rows of each: those known to be sequences of integers, those as long
    as `input_ids` in every row, and those whose lengths differ among the rows."""
    ids = [row.shape[0] for row in columns["input_ids"]] if "input_ids" in columns else None
    names = []
    for name, rows in columns.items():
        if any(row.ndim == 0 for row in rows):
            continue
        lengths = [row.shape[0] for row in rows]
        known = name in SEQUENCES and rows[0].ndim == 1 and not rows[0].is_floating_point()
        if known or lengths == ids or len(set(lengths)) > 1:
            names.append(name)
    return names


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _label(value: Any, name: str) -> Tensor:
    """A feature as a tensor. Numbers of double precision become float32 in labels, and truth values become classes, as
    in transformers."""
    tensor = _tensor(value)
    if name in (*LABELS, "labels") and not isinstance(value, Tensor) and tensor.dtype == torch.float64:
        return tensor.float()
    return tensor.long() if name in LABELS and tensor.dtype == torch.bool else tensor


def _fitting(longest: int, length: int | None, padding: Padding, *indices: int) -> int:
    """The length to pad to: `length` where it was decided before, else the stated one that fits `longest`."""
    target = length if length is not None else padding.fit(longest)
    if target is None or target < longest:
        which = f"sample {indices[0]}" if len(indices) == 1 else f"one of the samples {', '.join(map(str, indices))}"
        stated = ", ".join(map(str, padding.lengths)) if target is None else f"{target}, chosen before collating,"
        raise DataError(
            f"{which} has length {longest}, longer than pad_to allows ({stated}); truncate it, or raise pad_to"
        )
    return target


def _extend(tensor: Tensor, dim: int, length: int, value: int) -> Tensor:
    """`tensor` made `length` long in dimension `dim` with `value` at its end."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)
