"""A config → training and validation blocks, tokenized once and cached by content."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.chat_template import ChatTokenizer
from stepmark.data.chat.conversations import SECONDS_A_LINE, Conversations, filler_of, tokenized
from stepmark.data.data_description import describe_source
from stepmark.data.loader.mixture import JoinedSamples, Mixture, limited
from stepmark.data.sources.sources import Splits, open_sources
from stepmark.data.tokenize.encoding import TextEncoder, encode_texts
from stepmark.data.tokenize.packing import PackedBlocks
from stepmark.data.tokenize.token_cache import TokenFile, find_or_write
from stepmark.data.tokenize.tokenized_rows import TokenizedRows, write_rows
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.cache_folder import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2  # of a cache entry; a new number invalidates all entries
FINGERPRINT = 1  # with another number, no earlier run can be resumed
DEFAULT_BLOCK_SIZE = 1024
SPLITS = ("train", "validation")
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

    Cache entries are keyed by the content of the texts and of the tokenizer, not by names or times. Block size and
    numbers of samples are not part of the key: changing them costs nothing. Each source of a mixture has its own entry.
    With `overwrite_cache` the texts are always tokenized again; only one rank should set it, before the others call.

    Args:
        config: The data fields of a recipe.
        tokenizer: Encodes the texts; with `messages_column` it needs a chat template.
        folder: The cache. Default: None, the one of all runs.
        progress: Called with lines about what is read, how far tokenizing is, and what was left out. Default: None.
        may_be_short: Accepts less than one block, for data that is not trained on. Default: False.

    Raises:
        DataError: Data are missing, empty, or less than one block.
        UsageError: Fields are invalid.
    """
    root = (folder or cache_root()) / "data"
    say = progress or (lambda line: None)
    if config.dataset_mixture is None:
        return _prepare_source(config, tokenizer, root, say, may_be_short)
    parts = []
    for number, source in enumerate(config.sources, start=1):
        numbered = partial(lambda number, line: say(f"source {number}: {line}"), number)
        parts.append(_prepare_source(replace(source, max_eval_samples=None), tokenizer, root, numbered, may_be_short))
    train = Mixture([part.train for part in parts], config.weights)
    for line in train.describe():
        say(line)
    validations = [part.validation for part in parts if part.validation is not None]
    validation = limited(validations, config.max_eval_samples) if validations else None
    content = [FINGERPRINT, train.mixture_order.digest, *(part.fingerprint for part in parts)]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    description = {"sources": [part.description or {} for part in parts], "weights": list(config.weights)}
    return Prepared(train, validation, fingerprint, all(part.cached for part in parts), description)


def _prepare_source(
    config: DataArguments, tokenizer: PreTrainedTokenizerBase, root: Path, say: Progress, may_be_short: bool
) -> Prepared:
    """The data of one source, in the cache under `root`."""
    block_size = choose_block_size(config.block_size, tokenizer.model_max_length)
    splits = open_sources(config)
    contents = [(each.where, each.content) for each in splits.train.sources]
    if config.messages_column is not None:
        chats, held_out, cached = _prepare_conversations(config, splits, tokenizer, block_size, root, say)
        description = describe_source(config, block_size, config.validation_split_percentage, contents)
        return Prepared(chats, held_out, chats.fingerprint, cached, description)
    for name, texts in zip(SPLITS, (splits.train, splits.validation), strict=True):
        if texts is not None:
            say(f"{name} data: {texts.reads}")
    encoder = TextEncoder(tokenizer)
    key = f"format={FORMAT} {splits.content} tokenizer={encoder.content}"
    entry = root / xxhash.xxh3_128_hexdigest(key.encode())
    write = partial(_tokenize, splits=splits, encoder=encoder, processes=config.preprocessing_num_workers or 1, say=say)
    meta, cached = find_or_write(entry, write, overwrite=config.overwrite_cache)
    for name in meta["tokens"]:
        say(_describe_split(name, meta, cached=cached))
    tokens = meta["tokens"]["train"]
    if tokens < block_size and not may_be_short:
        raise DataError(
            f"block_size {block_size} is longer than the training data, {tokens} tokens in {splits.train.where};"
            f" set block_size to {tokens} or less, or give more text"
        )

    def blocks(split: str, limit: int | None) -> PackedBlocks:
        path, filler = entry / f"{split}.bin", filler_of(tokenizer)
        return PackedBlocks(path, meta["dtype"], meta["tokens"][split], block_size, filler, limit)

    train = blocks("train", config.max_train_samples)
    validation = blocks("validation", config.max_eval_samples) if "validation" in meta["tokens"] else None
    identity = [FINGERPRINT, meta["files"]["train.bin"]["xxh3"], meta["dtype"], block_size, len(train)]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())
    description = describe_source(config, block_size, splits.held_out, contents)
    return Prepared(train, validation, fingerprint, cached, description)


def _prepare_conversations(
    config: DataArguments, splits: Splits, tokenizer: Any, block_size: int, root: Path, say: Progress
) -> tuple[Conversations, Conversations | None, bool]:
    """Training and validation samples of at most `block_size` tokens, and whether the cache had them. The chat template
    is part of an entry's key, too."""
    assert config.messages_column is not None
    chat = ChatTokenizer(tokenizer, config.messages_column, config.assistant_only_loss)
    sets = {name: rows for name, rows in zip(SPLITS, splits.divided(), strict=True) if rows is not None}
    for name, rows in sets.items():
        say(f"{name} data: conversations of {rows.where}")
    parts = [f"conversations={FORMAT}", *(f"{name}={rows.content}" for name, rows in sets.items())]
    parts += [f"tokenizer={TextEncoder(tokenizer).content}", f"template={tokenizer.chat_template}"]
    parts += [f"column={config.messages_column}", f"answers={config.assistant_only_loss}"]
    entry = root / xxhash.xxh3_128_hexdigest("\0".join(parts).encode())

    def write(folder: Path) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for name, rows in sets.items():
            files |= write_rows(folder, f"{name}-", tokenized(rows.read(), chat))
        return {"format": FORMAT, "files": files}

    def samples(name: str, limit: int | None) -> Conversations:
        rows = TokenizedRows(entry, prefix=f"{name}-")
        made = Conversations(rows, tokenizer, max_length=block_size, packing=config.packing, max_samples=limit)
        say(_describe_conversations(name, made, block_size, cached=cached))
        return made

    _, cached = find_or_write(entry, write, overwrite=config.overwrite_cache)
    train = samples("train", config.max_train_samples)
    return train, samples("validation", config.max_eval_samples) if "validation" in sets else None, cached


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


def _tokenize(folder: Path, splits: Splits, encoder: TextEncoder, processes: int, say: Progress) -> dict[str, Any]:
    """Writes the tokens of all texts into a new entry of the cache; returns its metadata."""
    meta: dict[str, Any] = {"format": FORMAT, "dtype": encoder.dtype.str, "tokens": {}, "read": {}, "files": {}}
    for name, texts in zip(SPLITS, splits.divided(), strict=True):
        if texts is None:
            continue
        tally, began = Counter[str](), time.monotonic()
        said = began
        with TokenFile(folder / f"{name}.bin", encoder.dtype) as file:
            for ids in encode_texts(texts, encoder, processes, tally):
                file.append(ids)
                if (now := time.monotonic()) - said >= SECONDS_A_LINE:
                    said = now
                    left = _left(texts.fraction, now - began)
                    say(f"tokenizing {name}: {file.tokens / 1e6:.1f} million tokens{left}")
        meta["tokens"][name] = file.tokens
        meta["read"][name] = {key: tally[key] for key in ("documents", "without_text")}
        meta["files"][f"{name}.bin"] = file.summary
    return meta


def _left(fraction: float | None, spent: float) -> str:
    """How much is done, and the time that is left after the seconds that this took; nothing where that is unknown."""
    if not fraction:
        return ""
    seconds = spent * max(1 - fraction, 0.0) / fraction
    left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f", {fraction:.0%}, {left} left"


def _describe_split(split: str, meta: dict[str, Any], *, cached: bool) -> str:
    """One line about a tokenized split, from its metadata."""
    read = meta["read"][split]
    tokens, documents, without_text = meta["tokens"][split], read["documents"], read["without_text"]
    amount = f"{tokens / 1e6:.1f} million" if tokens >= 1e6 else f"{tokens:,}"
    line = f"{'cached' if cached else 'tokenized'} {split}: {amount} tokens in {documents:,} document"
    line += "" if documents == 1 else "s"
    return line + (f"; {without_text:,} without text left out" if without_text else "")


def _describe_conversations(name: str, data: Conversations, block_size: int, *, cached: bool) -> str:
    line = f"{'cached' if cached else 'tokenized'} {name}: {data.conversations:,} conversations"
    if data.packed:
        line += f" packed into {len(data):,} blocks of {block_size} tokens"
    return "; ".join([line, *data.changes])
