"""From texts or a user's dataset to batches on the device.

    tokenizer.py   the built-in byte tokenizer, or one of Hugging Face's
    texts.py       the texts of one split
    sources.py     a config → the texts of training and validation
    text_files.py    text, JSON lines, CSV and Parquet files as texts
    stdlib.py      the source of the running Python's standard library as texts
    encoding.py    texts → one stream of token ids on disk
    token_cache.py cache entries that are complete or not used
    packing.py     a token stream as blocks of one length
    prepared_data.py all of the above: a config → training and validation blocks
    mixture.py     samples of several sources, each with its share
    order.py       which sample comes when, on which rank
    batch.py       a loader's output
    labels.py      which inputs are labels, and which labels are targets
    collate.py     samples → one batch, padded to stated lengths
    fetcher.py     one micro-batch, the same in this process and in a worker
    loader.py      the DataLoader, whose position can be saved
    prefetcher.py  its batches on the device, moved there ahead of time

Nothing is imported here, so that importing one module does not import the others.
"""
