"""Texts → one stream of token ids.

Every document has the special tokens that its tokenizer adds around a text (such as Llama's begin of text), and ends
with the end-of-sequence token if the tokenizer has one. The segments of a continuous text are concatenated. The stream
does not depend on the number of processes.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from stepmark.data.sources.corpus import Corpus
from stepmark.data.tokenize.segments import Segment, Tally, joined, segment_batches
from stepmark.data.tokenize.tokenizer import END_OF_TEXT, PAD, byte_tokenizer
from stepmark.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextEncoder:
    """Converts texts to ids: `encode` for one batch, the ids before and after a document, and `content`, a checksum
    that identifies the tokenizer."""

    encode: Callable[[list[str]], Sequence[Sequence[int]]]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    dtype: np.dtype[Any]
    content: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
        """The encoder of a tokenizer, with none of the truncation or padding that may be set in it."""
        encode, serialised = _plain_encoder(tokenizer)
        prefix, suffix = _special_tokens_around(tokenizer)
        end = tokenizer.eos_token_id
        if end is not None and suffix[-1:] != (end,):
            suffix = (*suffix, end)
        largest = max([*tokenizer.get_vocab().values(), *prefix, *suffix], default=0)
        dtype = np.dtype("<u2" if largest < 1 << 16 else "<u4")
        content = xxhash.xxh3_128_hexdigest(f"{serialised}\0{prefix}\0{suffix}".encode())
        return cls(encode, prefix, suffix, dtype, content)

    def stream(self, batch: Sequence[Segment]) -> np.ndarray:
        """The ids of a batch, with the special tokens where documents begin and end."""
        segments = joined(batch)
        encoded = self.encode([segment.text for segment in segments])
        parts: list[Sequence[int]] = []
        for segment, ids in zip(segments, encoded, strict=True):
            parts += [self.prefix if segment.starts else (), ids, self.suffix if segment.ends else ()]
        return np.concatenate([self._array(part) for part in parts])

    def _array(self, ids: Sequence[int]) -> np.ndarray:
        if isinstance(ids, bytes):
            return np.frombuffer(ids, np.uint8).astype(self.dtype)
        return np.asarray(ids, dtype=self.dtype)


def encode_texts(
    texts: Corpus, encoder: TextEncoder, processes: int = 1, tally: Tally | None = None
) -> Iterator[np.ndarray]:
    """The token stream of a split, in parts, 1-dimensional and of `encoder.dtype`; `tally` counts what was read.

    Raises DataError if the texts are empty or only white space.
    """
    tally = tally or Tally()
    found_text = False

    def watched() -> Iterator[list[Segment]]:
        nonlocal found_text
        for batch in segment_batches(texts, tally):
            found_text = found_text or any(not segment.text.isspace() for segment in batch)
            yield batch

    yield from _encode_batches(watched(), encoder, processes)
    if not found_text:
        rows = f" in any of its {tally.without_text} rows" if tally.without_text else ""
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
    # The threads of the tokenizers library do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = encoder


def _encode_in_worker(batch: list[Segment]) -> np.ndarray:
    assert _worker is not None
    return _worker.stream(batch)


@dataclass(frozen=True)
class _FastEncoder:
    """A tokenizer of the tokenizers library, which encodes a batch in several threads."""

    tokenizer: Any

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@dataclass(frozen=True)
class _ByteEncoder:
    """The built-in tokenizer: the ids of a text without special tokens are its bytes."""

    complete: _FastEncoder

    def __call__(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Sequence[int]:
        if END_OF_TEXT in text or PAD in text:
            return self.complete([text])[0]
        try:
            return text.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            return self.complete([text])[0]


@dataclass(frozen=True)
class _SlowEncoder:
    """A tokenizer written in Python."""

    tokenizer: Any

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]


def _plain_encoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[list[str]], Sequence[Sequence[int]]], str]:
    """A function from texts to ids, without special tokens, and a string that identifies it."""
    if not tokenizer.is_fast:
        settings = {key: str(value) for key, value in tokenizer.init_kwargs.items() if not key.endswith("_file")}
        return _SlowEncoder(tokenizer), json.dumps(
            [type(tokenizer).__name__, tokenizer.get_vocab(), settings], sort_keys=True
        )
    from tokenizers import Tokenizer

    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    encoder, serialised = _FastEncoder(own), own.to_str()
    if serialised == byte_tokenizer().backend_tokenizer.to_str():
        return _ByteEncoder(encoder), serialised
    return encoder, serialised


def _special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()
