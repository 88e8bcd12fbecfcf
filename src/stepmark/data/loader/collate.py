"""Samples → one batch.

Without a collator of the user's it is what transformers' Trainer makes of the samples: its tokenizer or feature
extractor pads them, else they are stacked. Stated lengths, and padded labels, are asked for with `PadTo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from stepmark.data.loader.labels import LabelRule
from stepmark.data.tokenize.packing import IGNORED, PackedBlocks
from stepmark.errors import DataError, UsageError

CollateFn = Callable[[list[Any]], Any]
Columns = dict[str, list[Tensor]]  # the rows of each feature

PADDED_BY_TOKENIZERS = frozenset({"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"})
SEQUENCES = PADDED_BY_TOKENIZERS | {"labels", "position_ids"}
LABELS = ("label", "label_ids")  # which become `labels`
FIXED_SHAPES = (
    "batches must keep one shape here: state a length, or a few, that samples are padded to (data_collator=PadTo(128) "
    "for the Trainer, pad_to for a DataLoader)"
)


@dataclass(frozen=True)
class PadTo:
    """A `data_collator` that pads sequences, labels too, to stated lengths, so that a lazy device sees few shapes.

        Trainer(…, data_collator=PadTo([64, 128]))

    `input_ids` and the features with a value for each of them are padded: ids with the pad id, labels with -100, others
    with 0. A batch that is padded gets an `attention_mask` if it has none.

    Args:
        lengths: one length in tokens, or several, of which the smallest that fits is used. Default: None, the longest
            sequence of the batch.
        collate_fn: makes the batch that is padded; default: samples are stacked.
        side: `right` or `left`; default: None, that of the tokenizer, and the right without one.
    """

    lengths: int | Sequence[int] | None = None
    collate_fn: CollateFn | None = None
    side: str | None = None

    def checked_lengths(self) -> tuple[int, ...]:
        """The lengths, ascending; none for the longest of a batch. Raises UsageError for lengths that are not positive,
        an empty list, or an unknown side."""
        if self.side not in (None, "right", "left") or isinstance(self.collate_fn, PadTo):
            raise UsageError(f"{self}: its side should be right or left, and its collate_fn a function")
        if self.lengths is None:
            return ()
        lengths = (self.lengths,) if isinstance(self.lengths, int) else tuple(sorted(set(self.lengths)))
        if not lengths or lengths[0] < 1:
            raise UsageError(f"pad_to must be a positive length, or several, not {self.lengths!r}")
        return lengths


class Collation:
    """How samples become a batch: by the user's function; without one padded, where a `PadTo` asks for that; by
    transformers' DataCollatorWithPadding, where shapes are free and the processing class can pad; else stacked.

    `label` and `label_ids` become `labels`, strings and None are left out, as in transformers' collators. Samples that
    are not mappings are stacked by PyTorch's.

    Args:
        dataset: one of Stepmark's own says how it is padded, where there is no `collator`.
        collator: the user's function, or `PadTo`.
        processing_class: a tokenizer or feature extractor.
        free: batches may differ in shape, so that sequences without a stated length are as long as the longest.
        labels: says whether labels are a sequence of their own; see `LabelRule.own_sequence`.
        pad_token_id: pads `input_ids`, where there is no tokenizer.
        prepare: applied to each sample before.

    Raises:
        UsageError: The `PadTo` is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        collator: CollateFn | PadTo | None,
        processing_class: Any = None,
        *,
        free: bool,
        labels: LabelRule,
        pad_token_id: int = 0,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        chosen = own_padding(dataset, fixed=not free) if collator is None else collator
        self.pads = isinstance(chosen, PadTo)
        stated = chosen if isinstance(chosen, PadTo) else PadTo(collate_fn=chosen)
        self.collate_fn = stated.collate_fn
        make_generator = getattr(chosen, "create_rng", None)
        if make_generator is not None and getattr(chosen, "seed", None) is not None:
            make_generator()  # which transformers' collators do when they are called, other ones in workers
        self.lengths = stated.checked_lengths()
        self.side = stated.side or str(getattr(processing_class, "padding_side", "right"))
        self.pad_token_id = getattr(processing_class, "pad_token_id", None) or pad_token_id
        self.processing_class = processing_class
        self.free = free
        self.own_labels = labels.own_sequence
        self.prepare = prepare

    @property
    def varies(self) -> bool:
        """Whether batches are as long as their longest sample, or as a user's function makes them."""
        by_content = self.collate_fn is not None or self.pads or is_padder(self.processing_class)
        return self.free and not self.lengths and by_content

    def fit(self, length: int) -> int | None:
        """The smallest stated length that is at least `length`; None if there is none."""
        return next((stated for stated in self.lengths if stated >= length), None)

    def __call__(self, samples: Sequence[Any], indices: Sequence[int], length: int | None = None) -> Any:
        """The batch, a dict of tensors [rows, …] where samples are mappings. `indices` are the samples' numbers, for
        messages; `length` is that of sequences where it was decided before.

        Raises DataError if a sample is longer than all stated lengths, or has another shape than the first; UsageError
        if shapes differ where they are fixed.
        """
        samples = samples if self.prepare is None else [self.prepare(each) for each in samples]
        if self.collate_fn is not None:
            batch = self.collate_fn(list(samples))
            if not isinstance(batch, Mapping) or not self.lengths:
                return dict(batch) if isinstance(batch, Mapping) else batch
            rows = {name: list(each) for name, each in batch.items() if isinstance(each, Tensor) and each.ndim > 1}
            return {**batch, **_stacked(self._padded(rows, samples, indices, length))}
        first = vars(samples[0]) if is_dataclass(samples[0]) else samples[0]
        if not isinstance(first, Mapping):
            return default_collate(list(samples))
        mappings = samples if first is samples[0] else [vars(sample) for sample in samples]
        names = [name for name, value in first.items() if value is not None and not isinstance(value, str)]
        features = {name: [sample[name] for sample in mappings] for name in names}
        padder = self.processing_class
        able = not self.pads and self.free and is_padder(padder) and getattr(padder, "pad_token", "") is not None
        if able and padder.model_input_names[0] in features:
            return self._by_processor(features, indices)
        own = [name for name in ("labels", *LABELS) if name in features]  # the first counts, as in transformers
        columns = _tensors({name: each for name, each in features.items() if name not in own[1:]}, indices)
        if self.pads:
            columns |= self._padded(columns, samples, indices, length)
        self._check_shapes(columns, indices)
        return _stacked(columns)

    def _by_processor(self, features: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        from transformers import DataCollatorWithPadding

        rows = [dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True)]
        try:
            batch = DataCollatorWithPadding(self.processing_class)(rows)
        except Exception:
            padded = PADDED_BY_TOKENIZERS.union(self.processing_class.model_input_names[:1])
            others = {name: values for name, values in features.items() if name not in padded}
            self._check_shapes(_tensors(others, indices), indices)
            raise
        name = next((name for name in LABELS if name in features), "labels")
        given = features.get(name, [None])[0]
        return {**batch, **({"labels": _label(batch["labels"], name, given)} if "labels" in batch else {})}

    def _padded(self, columns: Columns, samples: Sequence[Any], indices: Sequence[int], length: int | None) -> Columns:
        """The features that are sequences, with rows of one length."""
        names = self._sequences(columns)
        if not names:
            return {}
        lengths = [max(columns[name][row].shape[0] for name in names) for row in range(len(columns[names[0]]))]
        longest, ragged = max(lengths), min(lengths) < max(lengths)
        if ragged and not self.lengths and not self.free:
            raise UsageError(f"samples have lengths from {min(lengths)} to {longest}, and {FIXED_SHAPES}")
        found = {name: columns[name] for name in names}
        if "input_ids" in found and "attention_mask" not in columns and (self.lengths or ragged):
            found["attention_mask"] = [torch.ones_like(ids, dtype=torch.int64) for ids in found["input_ids"]]
        if self.lengths:
            longest = self._fitting(longest, length, samples, indices)
        return {name: [self._extend(name, row, longest) for row in rows] for name, rows in found.items()}

    def _sequences(self, columns: Columns) -> list[str]:
        """The features to pad: known sequences of integers, and others as long as `input_ids` in every row. Labels are
        integers, and of the tokens or a sequence of their own: others are not of a length that may be changed."""
        ids = [len(row) for row in columns["input_ids"]] if "input_ids" in columns else None
        names = []
        for name, rows in columns.items():
            if any(row.ndim == 0 for row in rows):
                continue
            integers = name in SEQUENCES and rows[0].ndim == 1 and not rows[0].is_floating_point()
            aligned = ids is not None and [len(row) for row in rows] == ids
            if name == "labels":
                is_sequence = integers and (aligned or ids is None or self.own_labels)
            else:
                is_sequence = integers or aligned
            if is_sequence:
                names.append(name)
        return names

    def _extend(self, name: str, row: Tensor, length: int) -> Tensor:
        value = {"labels": IGNORED, "input_ids": self.pad_token_id, "special_tokens_mask": 1}.get(name, 0)
        filler = row.new_full((length - len(row), *row.shape[1:]), value)
        right = self.side == "right" or (name == "labels" and self.own_labels)  # a decoder begins with its first label
        return torch.cat([row, filler] if right else [filler, row]) if len(filler) else row

    def _fitting(self, longest: int, length: int | None, samples: Sequence[Any], indices: Sequence[int]) -> int:
        """The length to pad to: `length` where it was decided before, else the stated one that fits `longest`."""
        target = length if length is not None else self.fit(longest)
        if target is None or target < longest:
            culprits = [index for index, each in zip(indices, samples, strict=False) if sample_length(each) == longest]
            which = f"sample {culprits[0]}" if culprits else f"one of the samples {', '.join(map(str, indices))}"
            stated = ", ".join(map(str, self.lengths)) if target is None else f"{target}, chosen before collating,"
            raise DataError(
                f"{which} has length {longest}, longer than pad_to allows ({stated}); truncate it, or raise pad_to"
            )
        return target

    def _check_shapes(self, columns: Columns, indices: Sequence[int]) -> None:
        """Raises DataError, or UsageError where shapes are fixed, for the first row of another shape than the first."""
        for name, rows in columns.items():
            for row, index in zip(rows, indices, strict=False):
                if row.shape != rows[0].shape:
                    shapes = f"sample {index}: {name} of shape {tuple(row.shape)}, of sample {indices[0]}"
                    if not self.free:
                        raise UsageError(f"{shapes} {tuple(rows[0].shape)}, and {FIXED_SHAPES}")
                    raise DataError(f"{shapes} {tuple(rows[0].shape)}; {self._remedy(name)}")

    def _remedy(self, name: str) -> str:
        if name == "labels":
            return (
                "pass a data_collator that pads labels, such as transformers' DataCollatorForTokenClassification or "
                "DataCollatorForSeq2Seq, or PadTo() where each token has a label"
            )
        if getattr(self.processing_class, "pad_token", "") is None:
            return "the tokenizer cannot pad: set its pad_token, or pass a data_collator"
        return "pass a processing_class that pads it, or a collator, such as PadTo()"


def own_padding(dataset: Any, *, fixed: bool) -> PadTo | None:
    """How a dataset of Stepmark's pads its samples, also where shapes are `fixed`; None for others."""
    if isinstance(dataset, PackedBlocks):
        return PadTo()
    declared: PadTo | None = dataset.own_padding(fixed=fixed) if hasattr(dataset, "own_padding") else None
    return declared


def is_padder(processing_class: Any) -> bool:
    """Whether transformers' Trainer pads samples with it."""
    if processing_class is None:
        return False
    from transformers import PreTrainedTokenizerBase, SequenceFeatureExtractor

    return isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor))


def sample_length(sample: Any) -> int:
    """The length of a sample's sequences before padding; 0 without any."""
    if not isinstance(sample, Mapping):
        return 0
    known = [torch.as_tensor(value) for name, value in sample.items() if name in SEQUENCES and value is not None]
    return max((row.shape[0] for row in known if row.ndim and not row.is_floating_point()), default=0)


def sample_lengths(dataset: Any, column: str, feature: str) -> np.ndarray:
    """The length of each sample, int64: from a column of lengths, or by reading all samples.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        column: The column that holds lengths, of a `datasets.Dataset` that has it.
        feature: The entry of each sample whose length counts otherwise.

    Raises:
        UsageError: A sample has no such entry, or the column does not hold lengths.
    """
    columns = getattr(dataset, "column_names", None) or ()
    if column in columns:
        found = np.asarray(list(dataset[column]))
        if found.ndim == 1 and np.issubdtype(found.dtype, np.integer):
            return found.astype(np.int64)
        raise UsageError(
            f"length_column_name: the column {column!r} should hold whole numbers, and has {found.dtype}; name another"
        )
    in_column = feature in columns
    values = dataset[feature] if in_column else (_entry(dataset[index], feature) for index in range(len(dataset)))
    return np.fromiter(map(len, values), np.int64, len(dataset))


def _entry(sample: Any, feature: str) -> Any:
    if isinstance(sample, Mapping) and feature in sample:
        return sample[feature]
    raise UsageError(
        f"train_sampling_strategy: group_by_length needs samples with {feature!r}, whose length counts, or a column of "
        "lengths that length_column_name names; add one of them, or choose random"
    )


def _tensors(features: Mapping[str, list[Any]], indices: Sequence[int]) -> Columns:
    """Raises DataError for a value that is no tensor."""
    columns: Columns = {}
    for name, values in features.items():
        rows = columns.setdefault("labels" if name in LABELS else name, [])
        for value, index in zip(values, indices, strict=False):
            try:
                rows.append(_label(torch.as_tensor(value), name, value))
            except (TypeError, ValueError, RuntimeError) as error:
                raise DataError(
                    f"sample {index}: {name} cannot be made a tensor ({str(error).strip()}); leave it out, or pass a "
                    "data_collator"
                ) from error
    return columns


def _stacked(columns: Columns) -> dict[str, Tensor]:
    return {name: torch.stack(rows) for name, rows in columns.items()}


def _label(tensor: Tensor, name: str, given: Any) -> Tensor:
    """Numbers of double precision become float32 in labels, and truth values become classes, as in transformers."""
    if name in (*LABELS, "labels") and not isinstance(given, Tensor) and tensor.dtype == torch.float64:
        return tensor.float()
    return tensor.long() if name in LABELS and tensor.dtype == torch.bool else tensor
