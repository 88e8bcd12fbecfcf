"""Conversations and instructions as training samples: the tokenizer's chat template, and loss on the answers alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from stepmark.data.compressed_files import named_read_errors, open_text
from stepmark.data.json_rows import json_rows
from stepmark.data.packing import IGNORED
from stepmark.errors import DataError, UsageError

Message = Mapping[str, Any]

ASSISTANT = "assistant"
# Columns of instruction sets: the question, what belongs to it, the answer.
INSTRUCTIONS = (("prompt", "", "completion"), ("instruction", "input", "output"), ("question", "context", "answer"))

logger = logging.getLogger("stepmark")


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Samples of conversations, tokenized by the tokenizer's chat template: `input_ids` and `labels` [tokens].

    Of a JSON-lines file, or of rows such as those of `datasets`. A row has a list of messages, each with `role` and
    `content`, in `messages_column`; or an instruction, as `prompt` and `completion`, `instruction`, `input` and
    `output`, or `question`, `context` and `answer`, which becomes a user's message and an answer.

    Samples that are longer than `max_length` are cut at their end. Their number, and that of the rows of which no
    target is left, which are left out, is logged and kept.

    Args:
        source: The path of a `.jsonl` or `.json` file, also compressed, or rows.
        tokenizer: A tokenizer with a chat template.
        max_length: Tokens of a sample at most; None: any number.
        assistant_only_loss: Only what the assistant says is a target, its end of turn included. Default: False, every
            token is one.
        messages_column: The column with the messages. Default: `messages`.

    Attributes:
        truncated: Samples that were cut.
        tokens_left_out: Tokens that were cut off.
        rows_left_out: Rows without a target within `max_length`.
        fingerprint: Identifies the samples; a resumed run must have the same ones.

    Raises:
        DataError: A row is not a conversation, or there are none; the message names it.
        UsageError: The tokenizer has no chat template, or one that does not show which tokens are the assistant's.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        max_length: int | None = None,
        assistant_only_loss: bool = False,
        messages_column: str = "messages",
    ) -> None:
        if max_length is not None and max_length < 2:
            raise UsageError(f"max_length: should be at least 2 tokens, and is {max_length}")
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(
                "tokenizer: has no chat template, which says how messages become text; set tokenizer.chat_template"
            )
        self.truncated = self.tokens_left_out = self.rows_left_out = 0
        self._samples: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        hashed = xxhash.xxh3_128()
        rows = 0
        for where, row in _rows(source):
            rows += 1
            messages = _messages(row, messages_column, where)
            ids, targets = _tokenized(tokenizer, messages, assistant_only_loss, where)
            self._add(ids, targets, max_length)
        for arrays in self._samples:
            hashed.update(b"".join(array.tobytes() for array in arrays))
        self.fingerprint = hashed.hexdigest()
        self._report(rows, max_length)

    def _add(self, ids: list[int], targets: list[bool], max_length: int | None) -> None:
        if max_length is not None and len(ids) > max_length:
            self.truncated += 1
            self.tokens_left_out += len(ids) - max_length
            ids, targets = ids[:max_length], targets[:max_length]
        if not any(targets[1:]):  # the first token is not predicted
            self.rows_left_out += 1
            return
        labels = [each if counts else IGNORED for each, counts in zip(ids, targets, strict=True)]
        self._samples.append((np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)))

    def _report(self, rows: int, max_length: int | None) -> None:
        if not self._samples:
            raise DataError(
                f"conversations: none of {rows} rows has a target; pass rows with answers, or a larger max_length"
            )
        if self.truncated:
            logger.warning(
                "conversations: %s of %s were cut to %s tokens, %s tokens were left out",
                self.truncated, rows, max_length, self.tokens_left_out,
            )  # fmt: skip
        if self.rows_left_out:
            logger.warning("conversations: %s of %s have no target and are left out", self.rows_left_out, rows)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = self._samples[index]
        return {"input_ids": torch.from_numpy(ids).long(), "labels": torch.from_numpy(labels).long()}


def _rows(source: Any) -> Iterator[tuple[str, Any]]:
    """Every row with its name for messages."""
    if not isinstance(source, (str, os.PathLike)):
        for number, row in enumerate(source, start=1):
            yield f"row {number}", row
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"conversations: there is no file {path}; name a .jsonl or .json file")
    with named_read_errors(path), open_text(path) as file:
        for number, row in json_rows(file, str(path)):
            yield f"{path}, row {number}", row


def _messages(row: Any, column: str, where: str) -> list[Message]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: should be an object with columns, and is a {type(row).__name__}")
    found = row.get(column)
    if found is None:
        return _instruction(row, column, where)
    messages = list(found) if isinstance(found, (list, tuple)) else []
    if not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise DataError(f"{where}: {column} should be a list of messages with role and content")
    return messages


def _instruction(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    for question, more, answer in INSTRUCTIONS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            asked = "\n\n".join(filter(None, (row[question], row.get(more))))
            return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": row[answer]}]
    known = "; ".join(" and ".join((question, answer)) for question, _, answer in INSTRUCTIONS)
    raise DataError(
        f"{where}: has no {column}, and no instruction ({known}); its columns are {', '.join(map(str, row))}"
    )


def _tokenized(
    tokenizer: Any, messages: list[Message], assistant_only: bool, where: str
) -> tuple[list[int], list[bool]]:
    """The token ids of a conversation, and which of them are targets."""
    if not assistant_only:
        ids = _template(tokenizer, messages)
        return ids, [True] * len(ids)
    if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]
    return _answers_by_prefix(tokenizer, messages, where)


def _answers_by_prefix(tokenizer: Any, messages: list[Message], where: str) -> tuple[list[int], list[bool]]:
    """For templates that do not mark answers: an answer is what its message adds to the conversation before it, with
    the prompt for an answer."""
    ids = _template(tokenizer, messages)
    targets = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _template(tokenizer, messages[:index], add_generation_prompt=True)
        through = _template(tokenizer, messages[: index + 1])
        if ids[: len(through)] != through or through[: len(before)] != before:
            raise UsageError(
                f"assistant_only_loss: the tokenizer's chat template does not show which tokens of {where} are the "
                "assistant's; put {% generation %} … {% endgeneration %} around the answers in it"
            )
        targets[len(before) : len(through)] = [True] * (len(through) - len(before))
    return ids, targets


def _template(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options))
