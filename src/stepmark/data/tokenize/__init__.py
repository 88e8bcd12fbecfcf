"""Texts as token ids: the tokenizer, the cache of streams on disk, blocks and packed samples."""
