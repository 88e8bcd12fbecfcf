"""Texts → one stream of token ids.

Every document has the special tokens that its tokenizer adds around a text (such as Llama's begin of text), and ends
with the end-of-sequence token if the tokenizer has one. The segments of a continuous text are concatenated. The stream
does not depend on the number of processes.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from multiprocessing import get_all_start_methods, get_context
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from stepmark.data.sources.corpus import Corpus
from stepmark.data.tokenize.tokenizer import END_OF_TEXT, PAD, byte_tokenizer
from stepmark.errors import DataError
from stepmark.liveness.process_exit import end_with_parent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1 << 18


@dataclass
class Segment:
    """Text of one document that is encoded together, in pieces, and whether it begins and ends the document."""

    pieces: list[str]
    starts: bool = True
    ends: bool = True


class TextEncoder:
    """Converts texts to ids by a tokenizer, with none of the truncation or padding that may be set in it.

    `encode` is for one batch; `prefix` and `suffix` are the ids before and after a document; `content` is a checksum
    that identifies the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encode, serialised = _plain_encoder(tokenizer)
        self.prefix, self.suffix = _special_tokens_around(tokenizer)
        end = tokenizer.eos_token_id
        if end is not None and self.suffix[-1:] != (end,):
            self.suffix = (*self.suffix, end)
        largest = max([*tokenizer.get_vocab().values(), *self.prefix, *self.suffix], default=0)
        self.dtype = np.dtype("<u2" if largest < 1 << 16 else "<u4")
        self.content = xxhash.xxh3_128_hexdigest(f"{serialised}\0{self.prefix}\0{self.suffix}".encode())

    def stream(self, batch: Sequence[Segment]) -> np.ndarray:
        """The ids of a batch, with the special tokens where documents begin and end."""
        encoded = self.encode(["".join(segment.pieces) for segment in batch])
        parts: list[Sequence[int]] = []
        for segment, ids in zip(batch, encoded, strict=True):
            parts += [self.prefix if segment.starts else (), ids, self.suffix if segment.ends else ()]
        return np.concatenate([self._array(part) for part in parts])

    def _array(self, ids: Sequence[int]) -> np.ndarray:
        if isinstance(ids, bytes):
            return np.frombuffer(ids, np.uint8).astype(self.dtype)
        return np.asarray(ids, dtype=self.dtype)


def encode_texts(texts: Corpus, encoder: TextEncoder, processes: int, tally: Counter[str]) -> Iterator[np.ndarray]:
    """The token stream of a split, in parts, 1-dimensional and of `encoder.dtype`. `tally` counts what was read:
    `documents` with text, rows `without_text`, which leave nothing to train on, and segments with `words`.

    Raises DataError if the texts are empty or only white space, or one of them is not Unicode.
    """
    try:
        yield from _encode_batches(segment_batches(texts, tally), encoder, processes)
    except (TypeError, UnicodeEncodeError) as error:  # of the tokenizers library, and of Python
        raise DataError(
            f"{texts.where}: a text cannot be encoded ({error}); remove halves of surrogate pairs, \\ud800 to \\udfff"
        ) from error
    if not tally["words"]:
        rows = f" in any of its {tally['without_text']} rows" if tally["without_text"] else ""
        raise DataError(f"{texts.where} contains no text{rows}; give data with text in it")


def _encode_batches(batches: Iterator[list[Segment]], encoder: TextEncoder, processes: int) -> Iterator[np.ndarray]:
    if processes == 1:
        for batch in batches:
            yield encoder.stream(batch)
        return
    # Forked where possible: nothing is imported again, and a script needs no `if __name__ == "__main__"`.
    context = get_context("fork" if "fork" in get_all_start_methods() else None)
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(encoder,))
    waiting: deque[Future[np.ndarray]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenization process ended unexpectedly, out of memory perhaps; lower preprocessing_num_workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: TextEncoder | None = None


def _start_worker(encoder: TextEncoder) -> None:
    global _worker
    end_with_parent()
    # The threads of the tokenizers library do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = encoder


def _encode_in_worker(batch: list[Segment]) -> np.ndarray:
    assert _worker is not None
    return _worker.stream(batch)


def segment_batches(corpus: Corpus, tally: Counter[str]) -> Iterator[list[Segment]]:
    """The corpus in lists of about `BATCH_CHARACTERS` characters, at most twice that; counted in `tally`."""
    batch: list[Segment] = []
    characters = 0
    for document in _documents(corpus, tally):
        segment = None
        for piece in document:
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
            if segment is None or not batch:
                segment = Segment([], starts=segment is None, ends=False)
                batch.append(segment)
            segment.pieces.append(piece)
            characters += len(piece)
            tally["words"] += not piece.isspace()
        if segment is not None:
            segment.ends = True
    if batch:
        yield batch


def _documents(corpus: Corpus, tally: Counter[str]) -> Iterator[Iterator[str]]:
    """The pieces of each document."""
    for index, parts in groupby(corpus.numbered(), key=itemgetter(0)):
        texts = (text for _, text in parts)
        if corpus.sources[index].continuous:
            tally["documents"] += 1
            yield (piece for text in texts if text for piece in cut(text))
            continue
        for text in texts:
            tally["documents" if text else "without_text"] += 1
            if text:
                yield cut(text)


def cut(text: str) -> Iterator[str]:
    """The text in pieces of at most `BATCH_CHARACTERS`, cut before a space or line end where there is one."""
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        limit = start + BATCH_CHARACTERS
        stop = max(text.rfind(" ", start + 1, limit), text.rfind("\n", start + 1, limit))
        stop = limit if stop == -1 else stop
        yield text[start:stop]
        start = stop
    yield text[start:]


def _encode_fast(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """By a tokenizer of the tokenizers library, which encodes a batch in several threads."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _encode_bytes(tokenizer: Any, texts: Sequence[str]) -> list[Sequence[int]]:
    """By the built-in tokenizer: the ids of a text without special tokens are its bytes."""
    return [
        _encode_fast(tokenizer, [text])[0] if END_OF_TEXT in text or PAD in text else text.encode() for text in texts
    ]


def _encode_slowly(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """By a tokenizer written in Python."""
    return [tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]


def _plain_encoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[list[str]], Sequence[Sequence[int]]], str]:
    """A function from texts to ids, without special tokens, and a string that identifies it."""
    if not tokenizer.is_fast:
        settings = {key: str(value) for key, value in tokenizer.init_kwargs.items() if not key.endswith("_file")}
        return partial(_encode_slowly, tokenizer), json.dumps(
            [type(tokenizer).__name__, tokenizer.get_vocab(), settings], sort_keys=True
        )
    from tokenizers import Tokenizer

    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    serialised = own.to_str()
    is_bytes = serialised == byte_tokenizer().backend_tokenizer.to_str()
    return partial(_encode_bytes if is_bytes else _encode_fast, own), serialised


def _special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()
