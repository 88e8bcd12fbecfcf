"""A config → samples of conversations, tokenized once and cached by content."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.chat_template import ChatTokenizer
from stepmark.data.chat.conversations import Conversations, filler_of, tokenized
from stepmark.data.sources.corpus import Corpus
from stepmark.data.sources.sources import Splits
from stepmark.data.tokenize.encoding import TextEncoder
from stepmark.data.tokenize.token_cache import find_or_write
from stepmark.data.tokenize.tokenized_rows import TokenizedRows, write_rows

FORMAT = 2  # of a cache entry; a new number invalidates all entries


def prepare_conversations(
    config: DataArguments, splits: Splits, tokenizer: Any, block_size: int, root: Path, say: Callable[[str], None]
) -> tuple[Conversations, Conversations | None, bool]:
    """Training and validation samples of at most `block_size` tokens, and whether the cache in `root` had them.

    Cache entries are keyed by the content of the rows, of the tokenizer and of its chat template. Every rank may call
    it; with `overwrite_cache` one has to before the others.

    Raises DataError for missing or empty data, and UsageError for invalid fields or a tokenizer without a template.
    """
    assert config.messages_column is not None
    chat = ChatTokenizer(tokenizer, config.messages_column, config.assistant_only_loss)
    train, validation = splits.divided()
    sets = {"train": train, **({} if validation is None else {"validation": validation})}
    for name, rows in sets.items():
        say(f"{name} data: conversations of {rows.where}")
    entry = root / _key(sets, tokenizer, config)
    _, cached = find_or_write(entry, partial(_tokenize, sets=sets, chat=chat), overwrite=config.overwrite_cache)
    limits = {"train": config.max_train_samples, "validation": config.max_eval_samples}

    def samples(name: str) -> Conversations:
        rows = TokenizedRows(entry, prefix=f"{name}-")
        made = Conversations.of_rows(rows, block_size, config.packing, filler_of(tokenizer), limits[name])
        say(_described(name, made, block_size, cached=cached))
        return made

    return samples("train"), samples("validation") if validation is not None else None, cached


def _key(sets: dict[str, Corpus], tokenizer: Any, config: DataArguments) -> str:
    parts = [f"conversations={FORMAT}", *(f"{name}={rows.content}" for name, rows in sets.items())]
    parts += [f"tokenizer={TextEncoder.of(tokenizer).content}", f"template={tokenizer.chat_template}"]
    parts += [f"column={config.messages_column}", f"answers={config.assistant_only_loss}"]
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def _tokenize(folder: Path, sets: dict[str, Corpus], chat: ChatTokenizer) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name, rows in sets.items():
        files |= write_rows(folder, f"{name}-", tokenized(rows.read(), chat))
    return {"format": FORMAT, "files": files}


def _described(name: str, data: Conversations, block_size: int, *, cached: bool) -> str:
    line = f"{'cached' if cached else 'tokenized'} {name}: {data.conversations:,} conversations"
    if data.packed:
        line += f" packed into {len(data):,} blocks of {block_size} tokens"
    if data.truncated:
        line += f"; {data.truncated:,} cut to {block_size} tokens, {data.tokens_left_out:,} tokens left out"
    if data.rows_left_out:
        line += f"; {data.rows_left_out:,} without a target left out"
    return line
