"""A config → training and validation blocks, tokenized once and cached by content."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.conversations import Conversations
from stepmark.data.chat.prepared_conversations import prepare_conversations
from stepmark.data.data_description import describe_mixture, describe_source
from stepmark.data.loader.mixture import JoinedSamples, Mixture, limited
from stepmark.data.sources.corpus import Corpus
from stepmark.data.sources.sources import Sources, open_sources
from stepmark.data.tokenize.encoding import Tally, TextEncoder, encode_texts
from stepmark.data.tokenize.packing import PackedBlocks
from stepmark.data.tokenize.token_cache import TokenFile, commit_entry, open_entry, writing_entry
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.cache_folder import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2  # of a cache entry; a new number invalidates all entries
FINGERPRINT = 1  # with another number, no earlier run can be resumed
DEFAULT_BLOCK_SIZE = 1024
SECONDS_A_LINE = 10.0  # of progress
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Data ready to train on.

    `fingerprint` identifies the training data: the tokens, the block size and the number of blocks. A resumed run must
    have the same one. `cached`: the tokens were already in the cache. With `messages_column` the samples are
    conversations, with `dataset_mixture` those of all sources. `description`: what the training data are made of.
    """

    train: PackedBlocks | Conversations | Mixture
    validation: PackedBlocks | Conversations | JoinedSamples | None
    fingerprint: str
    cached: bool
    description: Mapping[str, Any] | None = None


def prepare(
    config: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
    may_be_short: bool = False,
) -> Prepared:
    """Training and validation blocks of `config`, tokenized unless the cache (or `folder` in its place) has them.

    The key of the cache is the content of the texts and of the tokenizer, not names or times, and neither block size
    nor numbers of samples: those cost nothing to change. With `overwrite_cache` the texts are always
    tokenized again; only one rank should set it, and the others call this function after it. `progress` is called with
    a line of text: what is read, how far tokenizing is, and what was left out. Each source of a mixture has an entry of
    its own in the cache.
    `may_be_short`: accept less than one block, for data that is not trained on.

    Raises DataError for missing or empty data, or less than one block, and UsageError for invalid fields.
    """
    root = (folder or cache_root()) / "data"
    say = progress or _silent
    if config.dataset_mixture is None:
        return _prepare_source(config, tokenizer, root, say, may_be_short)
    parts = [
        _prepare_source(replace(source, max_eval_samples=None), tokenizer, root, _numbered(number, say), may_be_short)
        for number, source in enumerate(config.sources, start=1)
    ]
    train = Mixture([part.train for part in parts], config.weights)
    for line in train.describe():
        say(line)
    validations = [part.validation for part in parts if part.validation is not None]
    validation = limited(validations, config.max_eval_samples) if validations else None
    content = [FINGERPRINT, train.mixture_order.digest, *(part.fingerprint for part in parts)]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    description = describe_mixture([part.description or {} for part in parts], config.weights)
    return Prepared(train, validation, fingerprint, all(part.cached for part in parts), description)


def _numbered(number: int, say: Progress) -> Progress:
    return lambda line: say(f"source {number}: {line}")


def _prepare_source(
    config: DataArguments, tokenizer: PreTrainedTokenizerBase, root: Path, say: Progress, may_be_short: bool
) -> Prepared:
    """The data of one source, in the cache under `root`."""
    block_size = choose_block_size(config.block_size, tokenizer.model_max_length)
    if config.messages_column is not None:
        chats, held_out, cached, contents = prepare_conversations(config, tokenizer, block_size, root, say)
        description = describe_source(config, block_size, config.validation_split_percentage, contents)
        return Prepared(chats, held_out, chats.fingerprint, cached, description)
    encoder = TextEncoder.of(tokenizer)
    sources = open_sources(config)
    entry = root / _key(sources, encoder)
    meta = None if config.overwrite_cache else open_entry(entry)
    cached = meta is not None
    for name, texts in (("train", sources.train), ("validation", sources.validation)):
        if texts is not None:
            say(f"{name} data: {texts.reads}")
    if meta is None:
        meta = _build(entry, sources, encoder, config.preprocessing_num_workers or 1, say)
    for name in meta["tokens"]:
        say(_describe_split(name, meta, cached=cached))

    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    filler = 0 if padding is None else padding

    def blocks(split: str, limit: int | None) -> PackedBlocks:
        return PackedBlocks(entry / f"{split}.bin", meta["dtype"], meta["tokens"][split], block_size, filler, limit)

    if not may_be_short:
        _check_length(meta["tokens"]["train"], block_size, sources)
    train = blocks("train", config.max_train_samples)
    validation = blocks("validation", config.max_eval_samples) if "validation" in meta["tokens"] else None
    contents = [(each.where, each.content) for each in sources.train.sources]
    description = describe_source(config, block_size, sources.held_out, contents)
    return Prepared(train, validation, _fingerprint(meta, train), cached, description)


def choose_block_size(wanted: int | None, longest: int) -> int:
    """Tokens in a block: `wanted`, else 1024 or what the tokenizer's model takes, if that is less.

    Raises UsageError for more than the model takes.
    """
    if wanted is None:
        return min(DEFAULT_BLOCK_SIZE, longest)
    if wanted > longest:
        raise UsageError(
            f"block_size {wanted} is longer than the {longest} tokens that the tokenizer's model takes; lower it"
        )
    return wanted


def _key(sources: Sources, encoder: TextEncoder) -> str:
    return xxhash.xxh3_128_hexdigest(f"format={FORMAT} {sources.content} tokenizer={encoder.content}".encode())


def _build(entry: Path, sources: Sources, encoder: TextEncoder, processes: int, progress: Progress) -> dict[str, Any]:
    """Tokenizes all texts into a new entry; returns its metadata."""
    meta: dict[str, Any] = {"format": FORMAT, "dtype": encoder.dtype.str, "tokens": {}, "read": {}, "files": {}}
    with writing_entry(entry) as folder:
        train, validation = sources.divided()
        for name, texts in (("train", train), ("validation", validation)):
            if texts is not None:
                tally = Tally()
                with TokenFile(folder / f"{name}.bin", encoder.dtype) as file:
                    shown = _TokenizingProgress(name, texts, progress)
                    for ids in encode_texts(texts, encoder, processes, tally):
                        file.append(ids)
                        shown.at(file.tokens)
                meta["tokens"][name] = file.tokens
                meta["read"][name] = asdict(tally)
                meta["files"][f"{name}.bin"] = file.summary
        commit_entry(folder, entry, meta)
    return meta


def _check_length(tokens: int, block_size: int, sources: Sources) -> None:
    if tokens < block_size:
        raise DataError(
            f"block_size {block_size} is longer than the training data, {tokens} tokens in {sources.train.where};"
            f" set block_size to {tokens} or less, or give more text"
        )


def _fingerprint(meta: dict[str, Any], train: PackedBlocks) -> str:
    content = [FINGERPRINT, meta["files"]["train.bin"]["xxh3"], meta["dtype"], train.block_size, len(train)]
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def _silent(line: str) -> None:
    """Ignores progress."""


class _TokenizingProgress:
    """Reports one split through `say` from time to time."""

    def __init__(self, split: str, texts: Corpus, say: Callable[[str], None]) -> None:
        self._split, self._texts, self._say = split, texts, say
        self._began = self._said = time.monotonic()

    def at(self, tokens: int) -> None:
        """This many tokens are written."""
        now = time.monotonic()
        if now - self._said < SECONDS_A_LINE:
            return
        self._said = now
        fraction = self._texts.fraction
        left = f", {fraction:.0%}, {_duration(self._seconds_left(fraction))} left" if fraction else ""
        self._say(f"tokenizing {self._split}: {tokens / 1e6:.1f} million tokens{left}")

    def _seconds_left(self, fraction: float) -> float:
        return (time.monotonic() - self._began) * max(1 - fraction, 0.0) / fraction


def _describe_split(split: str, meta: dict[str, Any], *, cached: bool) -> str:
    """One line about a tokenized split, from its metadata."""
    read = meta["read"][split]
    tokens, documents, without_text = meta["tokens"][split], read["documents"], read["without_text"]
    line = (
        f"{'cached' if cached else 'tokenized'} {split}: {_amount(tokens)} tokens in"
        f" {documents:,} document{'' if documents == 1 else 's'}"
    )
    if without_text:
        line += f"; {without_text:,} without text left out"
    return line


def _amount(count: int) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
