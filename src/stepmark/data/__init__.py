"""From texts or a user's dataset to batches on the device.

    config.py      which data, how long its blocks are: the recipe's data fields
    tokenizer.py   the built-in byte tokenizer, or one of Hugging Face's
    texts.py       the texts of one split
    sources.py     a config → the texts of training and validation
    files.py       text, JSON lines, CSV and Parquet files as texts
    stdlib.py      the source of the running Python's standard library as texts
    encoding.py    texts → one stream of token ids on disk
    cache.py       cache entries that are whole or not used
    packing.py     a token stream as blocks of one length
    prepared.py    all of the above: a config → training and validation blocks
    order.py       which sample comes when, on which rank
    batch.py       what a loader yields
    collate.py     samples → one batch, padded to stated lengths
    fetching.py    one micro-batch, the same in this process and in a worker
    loader.py      the DataLoader, whose position can be saved
    feed.py        its batches on the device, moved there ahead of time

Nothing is imported here, so that a part costs only what it needs.
"""
