"""Which inputs of a batch are labels, and how many of them are targets of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stepmark.data.tokenize.packing import IGNORED
from stepmark.errors import DataError

POSITIONS = ("start_positions", "end_positions")
SEQUENCES = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class LabelRule:
    """How a model's loss uses its labels.

    Args:
        names: the inputs that are labels, in the order of `label_ids`.
        causal_shift: whether position t predicts label t + 1, so that the first label of each row is not a target.
        ignored: the label that is not a target.
        by_sample: the loss is a mean over samples, even where a sample has many labels (CTC).
        skips_ignored: a row whose labels are all `ignored` contributes nothing, to the loss or to other state.
        own_sequence: labels are a separate sequence, as in encoder-decoder models. Otherwise several labels of a sample
            are those of its tokens, or of several tasks.
        vocabulary: number of tokens that `input_ids` may name. None: unknown.
    """

    names: tuple[str, ...] = ("labels",)
    causal_shift: bool = False
    ignored: int = IGNORED
    by_sample: bool = False
    skips_ignored: bool = True
    own_sequence: bool = False
    vocabulary: int | None = None

    def present(self, inputs: Any) -> dict[str, Any]:
        """The labels of a batch, by name."""
        if not isinstance(inputs, Mapping):
            return {}
        return {name: inputs[name] for name in self.names if inputs.get(name) is not None}

    def integers(self, inputs: Any) -> dict[str, Tensor]:
        """The labels that are signed integers with a row for each sample, which can therefore be `ignored`."""
        if not isinstance(inputs, Mapping):
            return {}
        names = dict.fromkeys((*self.names, "shift_labels"))
        return {name: inputs[name] for name in names if _is_integer(inputs.get(name))}

    def count(self, inputs: Any) -> int | None:
        """The targets among the labels; None where samples are counted. DataError for tokens that the model lacks."""
        self._check_tokens(inputs)
        if self.by_sample:
            return None
        integers = self.integers(inputs)
        if "shift_labels" in integers:  # shifted by the collator, as packed sequences are
            return int((integers["shift_labels"] != self.ignored).sum())
        if "labels" in integers:
            counted = integers["labels"] != self.ignored
            return int((counted[..., 1:] if self.causal_shift and counted.ndim > 1 else counted).sum())
        if POSITIONS[0] in integers:  # of answers, of which those that begin outside the sequence are ignored
            positions, length = integers[POSITIONS[0]], _sequence_length(inputs)
            return (positions if length is None else positions[positions < length]).numel()
        return None

    def _check_tokens(self, inputs: Any) -> None:
        if self.vocabulary is None or not isinstance(inputs, Mapping):
            return
        remedy = "use the model's own tokenizer, or call model.resize_token_embeddings"
        for name in ("input_ids", *(("labels", "shift_labels") if self.causal_shift else ())):
            tokens: Any = inputs.get(name)
            if not _is_integer(tokens) or tokens.device.type != "cpu":
                continue
            values = tokens.numpy()  # which costs no operation
            if name != "input_ids":
                values, remedy = values[values != self.ignored], f"what is no target is {self.ignored}"
            for token in map(int, (values.min(), values.max()) if values.size else ()):
                if not 0 <= token < self.vocabulary:
                    raise DataError(f"{name}: {token} is outside the model's vocabulary of {self.vocabulary}; {remedy}")

    def can_ignore_rows(self, inputs: Any, rows: int) -> bool:
        """Whether `without` can exclude rows from the loss: only where all labels are integers, and the batch has one
        row for each of the `rows` samples."""
        if not self.skips_ignored or self.by_sample:
            return False
        integers = self.integers(inputs)
        if not integers or not integers.keys() >= self.present(inputs).keys():
            return False
        by_row = [*integers.values(), *(inputs[name] for name in SEQUENCES if isinstance(inputs.get(name), Tensor))]
        if any(len(each) != rows for each in by_row):
            return False
        return _sequence_length(inputs) is not None or not any(name in POSITIONS for name in integers)

    def without(self, inputs: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """`inputs` with the labels of all rows after the first `rows` ignored."""
        masked = {}
        for name, labels in self.integers(inputs).items():
            value = _sequence_length(inputs) if name in POSITIONS else self.ignored
            if value is not None:
                masked[name] = labels.clone()  # may be the same tensor as input_ids
                masked[name][rows:] = value
        return {**inputs, **masked}


def _is_integer(labels: Any) -> bool:
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        return False
    return labels.dtype.is_signed and not labels.dtype.is_floating_point and not labels.dtype.is_complex


def _sequence_length(inputs: Mapping[str, Any]) -> int | None:
    for name in SEQUENCES:
        if isinstance(inputs.get(name), Tensor):
            return int(inputs[name].shape[1])
    return None
