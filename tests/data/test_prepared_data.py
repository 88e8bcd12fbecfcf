"""Documents become blocks without losing a token, once, and a damaged cache is never used."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepmark.config.data_arguments import DataArguments
from stepmark.data.prepared_data import Prepared, choose_block_size, prepare
from stepmark.data.tokenize import token_cache as cache
from stepmark.data.tokenize.encoding import Segment, TextEncoder
from stepmark.data.tokenize.packing import PackedBlocks
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import DataError, UsageError

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
DOCUMENTS = ["first", "", "second é", "third!", "\n"]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    return path


@pytest.fixture
def make(tmp_path: Path, documents: Path) -> Callable[..., Prepared]:
    """Prepares the documents, all for training, in blocks of 8, with a cache of the test's own."""

    def prepared(**fields: Any) -> Prepared:
        fields = {"train_file": str(documents), "block_size": 8, "validation_split_percentage": 0, **fields}
        return prepare(DataArguments(**fields), TOKENIZER, folder=tmp_path / "cache")

    return prepared


def entry_of(prepared: Prepared) -> Path:
    return prepared.train.path.parent


def real_tokens(blocks: PackedBlocks) -> list[int]:
    return [int(label) for block in blocks for label in block["labels"] if label != -100]


def expected_stream(documents: list[str]) -> list[int]:
    return [token for text in documents if text for token in [*text.encode(), END]]


def documents_of(*texts: str) -> list[Segment]:
    return [Segment([text]) for text in texts]


def test_no_token_is_lost_and_the_tail_is_padded(make: Callable[..., Prepared]) -> None:
    blocks = make().train
    assert real_tokens(blocks) == expected_stream(DOCUMENTS)
    assert blocks.tokens == len(expected_stream(DOCUMENTS))
    assert all(block[name].shape == (8,) and block[name].dtype == torch.int64 for block in blocks for name in block)
    for block in blocks:
        padding = block["labels"] == -100
        assert (block["input_ids"][padding] == TOKENIZER.pad_token_id).all()
        assert torch.equal(block["input_ids"][~padding], block["labels"][~padding])
    assert (blocks[len(blocks) - 1]["labels"] == -100).sum() == -blocks.tokens % 8 > 0


def test_blocks_can_be_indexed_like_a_list(make: Callable[..., Prepared]) -> None:
    blocks = make().train
    assert torch.equal(blocks[-1]["labels"], blocks[len(blocks) - 1]["labels"])
    for index in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError):
            blocks[index]


def test_lines_of_a_text_file_have_nothing_between_them(make: Callable[..., Prepared], tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\n\ntwo\nthree\nfour")
    prepared = make(train_file=str(path), validation_split_percentage=40, block_size=4)
    assert prepared.validation is not None
    assert real_tokens(prepared.validation) == [*b"one\n\n", END]
    assert real_tokens(prepared.train) == [*b"two\nthree\nfour", END]


def test_max_samples_are_blocks(make: Callable[..., Prepared]) -> None:
    unlimited, part = (
        make(validation_split_percentage=40),
        make(validation_split_percentage=40, max_train_samples=2, max_eval_samples=1, block_size=4),
    )
    assert unlimited.validation is not None
    assert part.validation is not None
    assert (len(part.train), len(part.validation)) == (2, 1)
    assert real_tokens(part.train) == real_tokens(unlimited.train)[:8]


def test_a_tokenizers_own_special_tokens_are_kept() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", pad)]
    )
    encoder = TextEncoder(tokenizer)
    assert encoder.stream(documents_of("a", "b")).tolist() == [pad, 97, end, pad, 98, end]
    assert encoder.stream([Segment(["a", "b"], False, False)]).tolist() == [97, 98]
    assert encoder.stream([Segment(["a"], ends=False), Segment(["b"], starts=False)]).tolist() == [pad, 97, 98, end]
    assert encoder.content != TextEncoder(TOKENIZER).content


def test_truncation_set_in_a_tokenizer_is_ignored() -> None:
    tokenizer = byte_tokenizer()
    plain = TextEncoder(tokenizer).content
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    encoder = TextEncoder(tokenizer)
    assert encoder.stream(documents_of("abcd")).tolist() == [*b"abcd", END]
    assert encoder.content == plain


@pytest.mark.parametrize("extension", ["jsonl", "txt"])
def test_processes_do_not_change_the_stream(
    make: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    monkeypatch.setattr("stepmark.data.tokenize.encoding.BATCH_CHARACTERS", 20)
    path = tmp_path / f"many.{extension}"
    path.write_text("".join(json.dumps({"text": "x" * (i % 9)}) + "\n" for i in range(50)))
    alone = make(train_file=str(path))
    parallel = make(train_file=str(path), preprocessing_num_workers=2, overwrite_cache=True)
    assert not parallel.cached
    assert real_tokens(parallel.train) == real_tokens(alone.train)
    assert parallel.fingerprint == alone.fingerprint


def test_a_second_call_finds_the_cache(make: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    monkeypatch.setattr("stepmark.data.prepared_data.encode_texts", lambda *_: pytest.fail("tokenized again"))
    second = make()
    assert (first.cached, second.cached) == (False, True)
    assert second.fingerprint == first.fingerprint
    assert real_tokens(second.train) == real_tokens(first.train)
    assert make(block_size=4, max_train_samples=1).cached
    with pytest.raises(pytest.fail.Exception):
        make(overwrite_cache=True)


def test_other_content_is_another_entry(make: Callable[..., Prepared], documents: Path) -> None:
    first = make()
    documents.write_text(documents.read_text().replace("first", "FIRST"))
    second = make()
    assert not second.cached
    assert second.fingerprint != first.fingerprint
    assert not make(validation_split_percentage=40).cached


def test_the_fingerprint_names_what_is_trained_on(make: Callable[..., Prepared]) -> None:
    base = make(validation_split_percentage=40)
    same = [make(validation_split_percentage=40, max_eval_samples=1), make(validation_split_percentage=40)]
    other = [make(validation_split_percentage=40, **change) for change in ({"block_size": 4}, {"max_train_samples": 1})]
    assert {prepared.fingerprint for prepared in same} == {base.fingerprint}
    assert len({prepared.fingerprint for prepared in [base, *other]}) == 3


@pytest.mark.parametrize("name", ["train.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_corrupted_entry_is_rebuilt(make: Callable[..., Prepared], name: str, damage: str) -> None:
    first = make()
    tokens = real_tokens(first.train)
    path = entry_of(first) / name
    data = bytearray(path.read_bytes())
    for position in range(len(data)) if damage == "flip" and name == "train.bin" else (len(data) // 2,):
        changed = bytearray(data)
        changed[position] ^= 4
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(changed if damage == "flip" else data[:position])
        again = make()
        assert not again.cached
        assert real_tokens(again.train) == tokens
    assert make().cached


def test_every_flipped_byte_of_the_meta_data_is_found(make: Callable[..., Prepared]) -> None:
    entry = entry_of(make())
    data = (entry / "meta.json").read_bytes()
    complete = cache.open_entry(entry)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        (entry / "meta.json").write_bytes(changed)
        # White space and the like may change; what is read may not.
        assert cache.open_entry(entry) in (None, complete)


def test_an_interrupted_build_leaves_nothing_in_use(
    make: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stepmark.data.tokenize.token_cache.commit_entry", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    assert list((tmp_path / "cache" / "data").iterdir()) == []
    assert not make().cached


def test_abandoned_folders_are_removed_and_others_kept(tmp_path: Path) -> None:
    dead, live = cache.new_entry(tmp_path), cache.new_entry(tmp_path)
    (dead / "train.bin").write_bytes(b"x")
    (live / "train.bin").write_bytes(b"x")
    long_ago = time.time() - 2 * cache.ABANDONED_AFTER
    for path in (dead / "train.bin", dead, live):
        os.utime(path, (long_ago, long_ago))
    cache.new_entry(tmp_path)
    assert not dead.exists()
    assert live.exists()


def test_two_writers_of_one_entry(tmp_path: Path) -> None:
    folders = [cache.new_entry(tmp_path) for _ in range(2)]
    for folder in folders:
        with cache.TokenFile(folder / "train.bin", np.dtype("<u2")) as file:
            file.append(np.arange(3))
        cache.commit_entry(folder, tmp_path / "entry", {"files": {"train.bin": file.summary}})
    assert cache.open_entry(tmp_path / "entry") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_cache_that_cannot_be_written(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written .*STEPMARK_CACHE"):
        prepare(DataArguments(train_file=str(documents), block_size=8), TOKENIZER, folder=tmp_path / "file")


def test_blocks_can_be_pickled(make: Callable[..., Prepared]) -> None:
    blocks = make().train
    fresh = pickle.dumps(blocks)
    first = blocks[0]
    assert pickle.dumps(blocks) == fresh  # the path, not the tokens
    assert torch.equal(pickle.loads(fresh)[0]["input_ids"], first["input_ids"])


def test_large_vocabularies_need_four_bytes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(70_000)])
    encoder = TextEncoder(tokenizer)
    assert encoder.dtype == np.uint32
    assert encoder.stream(documents_of("<69999>")).tolist() == [70_000 + 257, encoder.suffix[0]]


def test_what_is_read_and_left_out_is_reported(tmp_path: Path) -> None:
    rows = [{"id": 1, "body": "first"}, {"id": 2, "body": None}, {"id": 3}, {"id": 4, "body": ""}, {"body": "second"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.txt").write_text("a text")

    def report(**fields: Any) -> list[str]:
        lines: list[str] = []
        fields = {"train_file": str(tmp_path / "a.jsonl"), "validation_file": str(tmp_path / "b.txt"), **fields}
        prepare(DataArguments(block_size=8, **fields), TOKENIZER, folder=tmp_path / "cache", progress=lines.append)
        return lines

    what = [
        f"train data: column 'body' (not read: id) of train_file {tmp_path}/a.jsonl",
        f"validation data: validation_file {tmp_path}/b.txt",
    ]
    assert report() == [
        *what,
        "tokenized train: 13 tokens in 2 documents; 3 without text left out",
        "tokenized validation: 7 tokens in 1 document",
    ]
    assert report() == [
        *what,
        "cached train: 13 tokens in 2 documents; 3 without text left out",
        "cached validation: 7 tokens in 1 document",
    ]


def test_long_tokenizing_is_reported_with_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepmark.data.prepared_data.SECONDS_A_LINE", 0.0)
    monkeypatch.setattr("stepmark.data.tokenize.encoding.BATCH_CHARACTERS", 1 << 15)
    path = tmp_path / "long.txt"
    path.write_text("a line of text\n" * 100_000)
    lines: list[str] = []
    config = DataArguments(train_file=str(path), validation_split_percentage=0)
    prepare(config, TOKENIZER, folder=tmp_path / "cache", progress=lines.append)
    shown = [re.fullmatch(r"tokenizing train: [\d.]+ million tokens, (\d+)%, \d+ s left", line) for line in lines[1:-1]]
    fractions = [int(match[1]) for match in shown if match]
    assert len(fractions) == len(shown) > 5
    assert fractions == sorted(fractions)
    assert fractions[0] < 40 < fractions[-1]


def test_runs_from_before_can_be_resumed(make: Callable[..., Prepared]) -> None:
    """The fingerprint in their checkpoints is that of the same tokens."""
    assert make().fingerprint == "f745d1558ec2297b9b1ac4ec64d1332c"


def test_the_stream_has_every_character_however_long_the_lines_are(
    make: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepmark.data.tokenize.encoding.BATCH_CHARACTERS", 50)
    monkeypatch.setattr("stepmark.data.sources.sources.LONGEST_LINE", 40)
    texts = ["ab cd é " * 30, "x" * 333, "short\n\n" + " " * 200 + "end\n", "a\n" * 90]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    files = [str(tmp_path / f"{number}.txt") for number in range(len(texts))]
    expected = expected_stream(texts)
    assert real_tokens(make(train_file=files).train) == expected
    assert real_tokens(make(train_file=str(tmp_path / "rows.jsonl")).train) == expected
    assert real_tokens(make(train_file=files, preprocessing_num_workers=2, overwrite_cache=True).train) == expected


LONG_LINE = """
import resource, sys
from pathlib import Path
from stepmark.config.data_arguments import DataArguments
from stepmark.data.prepared_data import prepare
from stepmark.data.tokenize.tokenizer import byte_tokenizer
tokenizer = byte_tokenizer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataArguments(train_file=sys.argv[1]), tokenizer, folder=Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_file_of_one_line_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("word " * 800_000)
    command = [sys.executable, "-c", LONG_LINE, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 200  # MB; this text in one piece takes 500


def test_a_block_longer_than_the_data(make: Callable[..., Prepared]) -> None:
    tokens = len(expected_stream(DOCUMENTS))
    with pytest.raises(DataError, match=rf"block_size 512 .* {tokens} tokens .*set block_size to {tokens} or less"):
        make(block_size=512)
    assert len(make(block_size=tokens).train) == 1


def test_white_space_is_not_text(make: Callable[..., Prepared], tmp_path: Path) -> None:
    for name, content in (("a.txt", " \n\n"), ("a.jsonl", '{"text": null}\n{"text": " "}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="contains no text"):
            make(train_file=str(tmp_path / name))


@pytest.mark.parametrize("processes", [1, 2])
def test_half_a_surrogate_pair_is_named(make: Callable[..., Prepared], tmp_path: Path, processes: int) -> None:
    for text in ("a\\ud800b", "<|pad|>\\ud800"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}')
        with pytest.raises(DataError, match=r"a.jsonl: a text cannot be encoded .*surrogate"):
            make(train_file=str(tmp_path / "a.jsonl"), preprocessing_num_workers=processes)


def test_block_size_of_the_model() -> None:
    assert choose_block_size(None, 10**30) == 1024
    assert choose_block_size(None, 512) == 512
    assert choose_block_size(512, 512) == 512
    with pytest.raises(UsageError, match="block_size 513 is longer than the 512 tokens"):
        choose_block_size(513, 512)
