"""Conversations and instructions as training samples, padded or packed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from stepmark.data.chat.chat_template import ChatTokenizer
from stepmark.data.loader.collate import PadTo
from stepmark.data.sources.tables import table_rows, without_fillings
from stepmark.data.tokenize.packing import IGNORED, pack
from stepmark.data.tokenize.tokenized_rows import TokenizedRows
from stepmark.errors import DataError, UsageError

SECONDS_A_LINE = 10.0

logger = logging.getLogger("stepmark")


class Conversations(Dataset[dict[str, Tensor]]):
    """Samples of conversations, tokenized by the tokenizer's chat template: `input_ids` and `labels` [tokens].

    Rows come from a JSON Lines file, a list or a `datasets.Dataset`. A row has a list of messages, each with `role` and
    `content` (or ShareGPT's `from` and `value`), in `messages_column` or `conversations`; or an instruction, as
    `prompt` and `completion`, `instruction`, `input` and `output`, or `question`, `context` and `answer`, which becomes
    a user's message and an answer. Its `tools` and `chat_template_kwargs` are passed to the template. A message with
    `weight: 0` has no loss.

    Samples longer than `max_length` are truncated, and rows without a remaining target are left out; both are counted
    and logged.

    With `packing` a sample is a block of `max_length` tokens that holds several conversations, without attention
    across them: `position_ids` [tokens] restart at 0 in each, `attention_mask` (bool, [1, tokens, tokens]) is true
    where a token attends to another, and the first token of each is no target. The model must use PyTorch's
    scaled_dot_product_attention, which the Trainer checks.

    Args:
        source: The path of a `.jsonl` or `.json` file, also compressed, or rows; also rows that are tokenized.
        tokenizer: A tokenizer with a chat template.
        max_length: Maximum number of tokens of a sample. Default: None, no limit.
        assistant_only_loss: Computes the loss on assistant messages only, including their end of turn. Default:
            False, on all tokens.
        messages_column: The column with the messages. Default: `messages`.
        packing: Packs several conversations into one sample, which needs `max_length`. Default: False.
        max_samples: Keeps the first ones. Default: None, all.

    Attributes:
        truncated: Number of truncated conversations.
        tokens_left_out: Number of tokens cut off.
        rows_left_out: Number of rows without a target within `max_length`.
        packed: Whether conversations are packed.
        block_size: `max_length`, else the length of the longest.
        conversations: Number of conversations in all samples.
        fingerprint: Identifies the samples; a resumed run must have the same ones.
        sample_columns: How rows become samples, for evaluations elsewhere.

    Raises:
        DataError: A row is not a conversation, has what the template does not use, or there are none; the message
            names it.
        UsageError: The tokenizer has no chat template, or one that does not show which tokens are the assistant's.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | TokenizedRows,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        assistant_only_loss: bool = False,
        messages_column: str = "messages",
        packing: bool = False,
        max_samples: int | None = None,
    ) -> None:
        if isinstance(source, TokenizedRows):
            rows = source
        else:
            if max_length is not None and max_length < 2:
                raise UsageError(f"max_length: should be at least 2 tokens, and is {max_length}")
            if packing and max_length is None:
                raise UsageError("packing and max_length: packing needs the length of its blocks; set max_length")
            chat = ChatTokenizer(tokenizer, messages_column, assistant_only_loss)
            rows = TokenizedRows.of(tokenized(_rows(source), chat))
        self._source, self._length, self._filler, self.packed = rows, max_length, filler_of(tokenizer), packing
        self.block_size = longest = rows.longest if max_length is None else max_length
        self.sample_columns = {
            "messages_column": messages_column, "assistant_only_loss": assistant_only_loss, "packing": packing
        }  # fmt: skip
        lengths = rows.lengths
        self.truncated = int((lengths > longest).sum())
        self.tokens_left_out = int((lengths - longest).clip(min=0).sum())
        kept = rows.with_targets(longest)
        self.rows_left_out = len(rows) - len(kept)
        if not len(kept):
            within = "" if longest is None else f" within {longest} tokens"
            raise DataError(
                f"conversations: none of {len(rows)} rows has a target{within}; pass rows with answers, or a larger "
                "block_size (max_length)"
            )
        self._samples: list[list[int]] = [[int(row)] for row in kept]
        if packing:
            cut = lengths[kept].clip(max=longest).tolist()
            self._samples = [[int(kept[index]) for index in block] for block in pack(cut, longest)]
        self._samples = self._samples[:max_samples]
        self.conversations = sum(len(sample) for sample in self._samples)
        self.fingerprint = self._hashed()
        if rows is not source and self.changes:
            logger.warning("conversations: of %s, %s", len(rows), "; ".join(self.changes))

    def own_padding(self, *, fixed: bool) -> PadTo:
        """Pads to the longest of a batch, and to `block_size` where shapes are `fixed`; blocks are of one length."""
        return PadTo(self.block_size if fixed and not self.packed else None, side="right")

    def _hashed(self) -> str:
        hashed = xxhash.xxh3_128()
        for sample in self._samples:
            for array in chain.from_iterable(self._row(row) for row in sample):
                hashed.update(array.astype(np.int32).tobytes())
            if self.packed:
                hashed.update(b"|")
        return hashed.hexdigest()

    @property
    def changes(self) -> list[str]:
        """How many conversations were cut, and how many left out, in words; nothing where none was."""
        cut = f"{self.truncated:,} cut to {self.block_size} tokens, {self.tokens_left_out:,} tokens left out"
        without = f"{self.rows_left_out:,} without a target left out"
        return [*([cut] if self.truncated else []), *([without] if self.rows_left_out else [])]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [self._row(row) for row in self._samples[index]]
        if not self.packed:
            ids, labels = parts[0]
            return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        assert self._length is not None
        return block_of(parts, self._length, self._filler)

    def rows_of(self, index: int) -> list[int]:
        """The rows of the source, from 0, that a sample is made of."""
        return self._samples[index]

    def tokens_in(self, index: int) -> int:
        """Tokens of a sample, padding apart."""
        return sum(len(self._row(row)[0]) for row in self._samples[index])

    def _row(self, row: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """int64 ids and labels of a conversation, cut to the maximal length."""
        ids, targets = self._source.row(row)
        ids = ids[: self._length].astype(np.int64)
        return ids, np.where(targets[: self._length], ids, IGNORED)


def block_of(
    parts: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], length: int, filler: int
) -> dict[str, Tensor]:
    """Conversations, as ids and labels, in one block of `length` tokens; the rest of it is padding."""
    missing = length - sum(len(ids) for ids, _ in parts)
    padding = [(np.full(missing, filler), np.full(missing, IGNORED))] if missing else []
    pieces = [*parts, *padding]
    ids, labels = (torch.from_numpy(np.concatenate(each)) for each in zip(*pieces, strict=True))
    sizes = torch.tensor([len(piece) for piece, _ in pieces])
    starts = sizes.cumsum(0) - sizes
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    positions = torch.arange(length)
    labels[starts] = IGNORED  # each would be predicted from the conversation before it
    sees = (owner[:, None] == owner[None, :]) & (positions[:, None] >= positions[None, :])
    return {"input_ids": ids, "labels": labels, "position_ids": positions - starts[owner], "attention_mask": sees[None]}


def tokenized(rows: Iterable[tuple[str, Any]], chat: ChatTokenizer) -> Iterator[tuple[list[int], list[bool]]]:
    """The rows' ids and targets; progress is logged every ten seconds, and at the end what nothing has read."""
    said = time.monotonic()
    for number, (where, row) in enumerate(rows, start=1):
        if time.monotonic() - said > SECONDS_A_LINE:
            said = time.monotonic()
            logger.info("conversations: %s rows are tokenized", number - 1)
        yield chat(row, where)
    if chat.unread:
        told = ", ".join(
            f"{key} ({count} rows)" for key, count in sorted(chat.unread.items(), key=lambda each: (-each[1], each[0]))
        )
        logger.warning("conversations: nothing reads %s", told)
        chat.unread.clear()


def filler_of(tokenizer: Any) -> int:
    """The token that pads blocks."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return 0 if found is None else int(found)


def _rows(source: Any) -> Iterator[tuple[str, Any]]:
    """Every row with its name for messages."""
    if not isinstance(source, (str, os.PathLike)):
        rows = map(without_fillings, source) if hasattr(source, "features") else source
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"conversations: there is no file {path}; name a .jsonl or .json file")
    yield from table_rows(path)
