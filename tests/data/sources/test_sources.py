"""Texts of every kind of source, and one clear error for each thing that can be wrong with it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import csv, parquet

from stepmark.config.data_arguments import DataArguments
from stepmark.data.sources.sources import open_sources, stdlib_texts, validation_members
from stepmark.errors import DataError, StepmarkError, UsageError

ROWS = ['one, "two"\nthree', "", "é 😀", "007"]


def texts_of(train_file: Path, **fields: object) -> tuple[list[str | None], list[str | None] | None]:
    return divided(DataArguments(train_file=str(train_file), **fields))  # type: ignore[arg-type]


def divided(config: DataArguments) -> tuple[list[str | None], list[str | None] | None]:
    train, validation = open_sources(config).divided()
    return list(train.read()), None if validation is None else list(validation.read())


def write_rows(path: Path, rows: Sequence[str], column: str = "text") -> Path:
    """The rows in a file of the kind that its extension says, with a column of numbers before them."""
    table = pyarrow.table({"number": list(range(len(rows))), column: list(rows)})
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path)
        case ".csv":
            csv.write_csv(table, path)
        case ".jsonl":
            path.write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
        case ".json":
            path.write_text(json.dumps(table.to_pylist(), indent=1))
    return path


@pytest.mark.parametrize("extension", ["parquet", "csv", "jsonl", "json"])
@pytest.mark.parametrize("column", ["text", "body"])
def test_rows_are_documents(tmp_path: Path, extension: str, column: str) -> None:
    path = write_rows(tmp_path / f"rows.{extension}", ROWS, column)
    assert texts_of(path, validation_split_percentage=0) == (ROWS, None)
    assert texts_of(path, validation_split_percentage=50, text_column=column) == (ROWS[2:], ROWS[:2])


def test_lines_of_a_text_file_keep_their_newlines(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes("a\r\n\n b\u2028c\nd".encode())
    assert texts_of(path, validation_split_percentage=0) == (["a\r\n", "\n", " b\u2028c\n", "d"], None)
    assert open_sources(DataArguments(train_file=str(path))).train.sources[0].continuous


def test_validation_is_the_first_percent_and_at_least_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [str(i) for i in range(40)])
    train, validation = texts_of(path)
    assert validation == ["0", "1"]
    assert train == [str(i) for i in range(2, 40)]
    assert texts_of(path, validation_split_percentage=1)[1] == ["0"]


def test_a_validation_file_is_used_completely(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", ["a", "b"])
    other = write_rows(tmp_path / "validation.csv", ["c", "d"])
    assert texts_of(path, validation_file=str(other)) == (["a", "b"], ["c", "d"])


def test_content_follows_the_bytes_and_not_the_name(tmp_path: Path) -> None:
    def content(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return open_sources(DataArguments(train_file=str(tmp_path / name))).content

    assert content("a.txt", "one\ntwo\n") == content("b.txt", "one\ntwo\n")
    assert content("a.txt", "one\ntwo\n") != content("a.txt", "one\ntwO\n")


def test_the_standard_library_is_divided_by_file(tmp_path: Path) -> None:
    names = ["a.py", "b.py", "package/c.py", "d.py", "test/e.py", "site-packages/f.py", "package/tests/g.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    train, validation = stdlib_texts(25, tmp_path)
    assert validation is not None
    assert list(train.read()) == ["a.py", "b.py", "d.py"]
    assert list(validation.read()) == ["package/c.py"]
    assert stdlib_texts(0, tmp_path)[1] is None
    with pytest.raises(DataError, match="too few"):
        stdlib_texts(5, tmp_path / "package")


def test_the_running_python_has_a_standard_library() -> None:
    train, validation = divided(DataArguments(dataset_name="python-stdlib"))
    assert validation is not None
    assert sum(map(len, filter(None, train))) > 1_000_000
    assert len(validation) / (len(train) + len(validation)) == pytest.approx(0.05, abs=0.01)


def test_validation_files_are_spread_evenly() -> None:
    assert validation_members(40, 5) == {19, 39}
    assert validation_members(3, 1) == {2}
    assert validation_members(3, 0) == set()


@pytest.mark.parametrize(
    ("content", "name", "kind", "message"),
    [
        (None, "a.txt", UsageError, "train_file: file .* does not exist"),
        (b"", "a.txt", DataError, "is empty"),
        (b"a", "a.docx", UsageError, r"a format that is not read; supported are \.txt, \.json"),
        (b"a\tb\n", "a.tsv", UsageError, "a.tsv has a format that is not read"),
        (b"a", "a.tar.gz", UsageError, "a.tar.gz has a format that is not read"),
        (b"a\0b", "a.py", UsageError, "a.py is a binary file, not text"),
        (gzip.compress(b"\0"), "a.xyz.gz", UsageError, "a.xyz.gz is a binary file, not text"),
        (b"", "a.py", DataError, "a.py is empty"),
        (
            b'{"text": "a"}\n{"text": "b"}\n',
            "part-00000",
            UsageError,
            "part-00000 holds JSON lines.* rename it to .jsonl",
        ),
        (b'{"text": "' + b"a" * 9000 + b'"}\n', "part-0", UsageError, "part-0 holds JSON lines"),
        (gzip.compress(b'{"text": "a"}'), "a.log.gz", UsageError, "a.log.gz holds JSON lines"),
        (b"a\n\xe9\n", "a.py", DataError, "a.py: line 2 is not UTF-8"),
        (b"\xff\xfe", "a.txt", DataError, "a.txt: line 1 is not UTF-8"),
        (b"a\nb\n" + b"c" * 3_000_000 + b"\xe9\n", "a.txt", DataError, "a.txt: line 3 is not UTF-8"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl", DataError, "a.jsonl: line 2 is not UTF-8"),
        (b"text\na\n\xe9\n", "a.csv", DataError, "a.csv: line 3 is not UTF-8"),
        (b"a\n\xc3", "a.txt", DataError, "a.txt: line 2 is not UTF-8"),
        (b"not compressed", "a.txt.gz", DataError, "a.txt.gz cannot be read"),
        (b"not compressed", "a.jsonl.xz", DataError, "a.jsonl.xz cannot be read"),
        (b"not compressed", "a.csv.zst", DataError, "a.csv.zst cannot be read"),
        (gzip.compress(b"text" * 9, mtime=0)[:-9], "a.txt.gz", DataError, "a.txt.gz cannot be read"),
        (b"a", "a.parquet.gz", UsageError, "compressed"),
        (b"\n\n", "a.jsonl", DataError, "contains no text"),
        (b'[{"text": "a"}, {"text": "b"', "a.json", DataError, "row 2: not valid JSON"),
        (b'[{"text": "a"} {"text": "b"}]', "a.json", DataError, "row 2: not valid JSON"),
        (
            b'[{"text": "a"}] {"text": "b"}',
            "a.json",
            DataError,
            r"row 2: not valid JSON \(Text after the end of the list\);",
        ),
        (b'{"a": "x", "b": "y", "c": 1}', "a.json", UsageError, "2 columns of strings.*text_column to one of a, b"),
        (b"a,b,c\nx,y,1\n", "a.csv", UsageError, "2 columns of strings.*text_column to one of a, b"),
        (b'{"a": 1}\n{"a": 2, "b": "x", "c": "y"}', "a.jsonl", UsageError, "text_column to one of b, c"),
        (b'{"text": "a"}\nnonsense', "a.jsonl", DataError, r"row 2: not valid JSON \(Expecting value, column 1\)"),
        (b'{"text": "a"}\n{"text": "b"\n', "a.jsonl", DataError, r"row 2: .*\(Expecting ',' delimiter, column 13\)"),
        (b'{"text": "a"}\n["b"]', "a.jsonl", DataError, "row 2: not a JSON object"),
        (b'{"text": "a"}\n{"text": 3}', "a.json", DataError, "row 2: column 'text' holds int, not text"),
        (b'{"a": 1, "b": 2}', "a.json", UsageError, "no column of strings; its columns are a, b"),
        (b"a,b\n1,2\n", "a.csv", UsageError, "no column of strings; its columns are a, b"),
        (b"a,b\n1,2,3\n", "a.csv", DataError, "a.csv cannot be read .*Expected 2 columns"),
        (b"not at all", "a.parquet", DataError, "a.parquet cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, name: str, kind: type[StepmarkError], message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=message) as caught:
        texts_of(tmp_path / name, validation_split_percentage=0)
    assert "\n" not in str(caught.value)


def compressed(path: Path, data: bytes) -> Path:
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(data))
        case ".bz2":
            path.write_bytes(bz2.compress(data))
        case ".xz":
            path.write_bytes(lzma.compress(data))
        case ".zst":
            with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
                file.write(data)
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_are_read_like_others(tmp_path: Path, kind: str, compression: str) -> None:
    rows = [f"row {number} é" for number in range(9000)]
    path = tmp_path / "rows.txt"
    if kind == "txt":
        path.write_text("".join(f"{row}\n" for row in rows))
    else:
        path = write_rows(tmp_path / f"rows.{kind}", rows)
    packed = compressed(tmp_path / f"{path.name}{compression}", path.read_bytes())
    assert texts_of(packed) == texts_of(path)
    corpus = open_sources(DataArguments(train_file=str(packed))).train
    assert corpus.fraction == 0
    assert len(list(corpus.read())) == 9000
    assert corpus.fraction == 1


def test_a_list_of_many_parts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepmark.data.sources.tables.PART", 7)
    rows = [{"text": "a [b], {c}"}, {"text": "\u2028 é"}, {"text": ""}]
    for number, text in enumerate((json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False) + "\n \n")):
        (tmp_path / f"{number}.json").write_text(text)
        assert texts_of(tmp_path / f"{number}.json", validation_split_percentage=0)[0] == [r["text"] for r in rows]


@pytest.mark.parametrize("extension", ["txt", "jsonl", "json"])
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_files_are_read_a_part_at_a_time(tmp_path: Path, extension: str, compression: str) -> None:
    """Also a list, or a text, of a single line."""
    texts = [f"{number:06}{random.Random(number).randbytes(500).hex()}" for number in range(8000)]
    written = {
        "txt": " ".join(texts),
        "jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
        "json": json.dumps([{"text": text} for text in texts]),
    }[extension].encode()
    path = tmp_path / f"rows.{extension}{compression}"
    path.write_bytes(gzip.compress(written, compresslevel=1) if compression else written)
    corpus = open_sources(DataArguments(train_file=str(path))).train
    parts = corpus.read()
    assert next(parts)
    assert corpus.fraction is not None
    assert 0 < corpus.fraction < 0.7
    assert sum(1 for _ in parts) > 20
    assert corpus.fraction == 1


class TestSeveralFiles:
    """Files, folders and patterns, one after the other."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "data"
        (folder / "inner").mkdir(parents=True)
        (folder / "b.txt").write_text("b1\nb2\n")
        write_rows(folder / "a.jsonl", ["a1", "a2"])
        compressed(folder / "inner" / "c.txt.gz", b"c1\n")
        (folder / "notes.md").write_text("not read")
        (folder / ".hidden.txt").write_text("not read")
        return folder

    def texts(self, given: str | list[str], **fields: Any) -> Any:
        return divided(DataArguments(train_file=given, **{"validation_split_percentage": 0, **fields}))

    def test_a_folder_is_read_in_the_order_of_names(self, folder: Path) -> None:
        assert self.texts(str(folder)) == (["a1", "a2", "b1\n", "b2\n", "c1\n"], None)
        reads = open_sources(DataArguments(train_file=str(folder))).train.reads
        assert reads.endswith("a.jsonl and 2 more files; left out: 1 .md")

    def test_patterns_and_lists(self, folder: Path) -> None:
        assert self.texts(f"{folder}/**/*.txt*") == (["b1\n", "b2\n", "c1\n"], None)
        files = [str(folder / "inner"), str(folder / "a.jsonl")]
        assert self.texts(files, validation_file=[str(folder / "b.txt")]) == (["c1\n", "a1", "a2"], ["b1\n", "b2\n"])

    def test_the_first_percent_of_all_files_are_for_validation(self, folder: Path) -> None:
        assert self.texts(str(folder), validation_split_percentage=60) == (["b2\n", "c1\n"], ["a1", "a2", "b1\n"])
        assert self.texts(str(folder), validation_split_percentage=80)[1] == ["a1", "a2", "b1\n", "b2\n"]

    def test_content_follows_the_order_and_the_bytes(self, folder: Path) -> None:
        def content(*names: str) -> str:
            return open_sources(DataArguments(train_file=[str(folder / name) for name in names])).content

        assert content("a.jsonl", "b.txt") != content("b.txt", "a.jsonl")
        before = content("a.jsonl", "b.txt")
        (folder / "copy.txt").write_bytes((folder / "b.txt").read_bytes())
        assert content("a.jsonl", "copy.txt") == before
        (folder / "b.txt").write_text("b1\nB2\n")
        assert content("a.jsonl", "b.txt") != before

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["b.txt", "*.txt"], "train_file: .*b.txt is named more than once"),
            ("*.doc", "train_file: no file matches"),
            (["b.txt", "missing.txt"], "missing.txt does not exist"),
            ("empty", "train_file: folder .*empty has no file that ends with .txt.*, and no other text"),
        ],
    )
    def test_names_without_a_file_are_errors(self, folder: Path, given: str | list[str], message: str) -> None:
        (folder / "empty").mkdir()
        names = [str(folder / name) for name in ([given] if isinstance(given, str) else given)]
        with pytest.raises(StepmarkError, match=message) as caught:
            self.texts(names)
        assert "\n" not in str(caught.value)

    @pytest.fixture
    def code(self, tmp_path: Path) -> Path:
        folder = tmp_path / "code"
        (folder / "inner").mkdir(parents=True)
        for name, content in {
            "a.py": b"import a\n",
            "inner/__init__.py": b"",
            "inner/b.py": b"b = 1\n",
            "inner/c.pyc": b"\0\1",
            "inner/core": b"\0\1",
            "LICENSE": b"Do.\n",
            "logo.png": b"png",
        }.items():
            (folder / name).write_bytes(content)
        return folder

    def test_source_code_is_plain_text(self, code: Path) -> None:
        assert self.texts(f"{code}/**/*.py") == (["import a\n", "b = 1\n"], None)
        train = open_sources(DataArguments(train_file=f"{code}/**/*.py")).train
        assert train.reads.endswith("a.py and 1 more file; as plain text: 2 .py; left out: 1 empty")
        assert self.texts(str(code / "LICENSE")) == (["Do.\n"], None)

    def test_a_folder_without_known_kinds_is_text(self, code: Path) -> None:
        assert self.texts(str(code)) == (["Do.\n", "import a\n", "b = 1\n"], None)
        reads = open_sources(DataArguments(train_file=str(code))).train.reads
        assert "; as plain text: 2 .py, 1 without extension; left out: " in reads
        assert reads.endswith("left out: 1 .png, 1 .pyc, 1 empty, 1 without extension")

    def test_a_folder_of_tables_without_extension_is_not_taken_for_text(self, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "part-0").write_text('{"text": "a"}\n')
        with pytest.raises(UsageError, match="part-0 holds JSON lines"):
            self.texts(str(tmp_path / "rows"))
        (tmp_path / "rows" / "part-0").write_text('{\n"text": 1}\n')  # such as a notebook
        assert self.texts(str(tmp_path / "rows"))[0] == ["{\n", '"text": 1}\n']

    def test_a_folder_of_several_kinds_needs_a_pattern(self, code: Path) -> None:
        (code / "settings.json").write_text('{"text": "x"}')
        with pytest.raises(
            UsageError, match=r"code has several kinds of files: 2 \.py.* by a pattern, such as .*\*\.py"
        ):
            self.texts(str(code))

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("**/*.py*", "c.pyc has a format that is not read"),
            ("inner/co*", "core is a binary file, not text"),
            ("inner/__*", "all files that match .* are empty"),
        ],
    )
    def test_a_pattern_that_matches_no_text(self, code: Path, pattern: str, message: str) -> None:
        with pytest.raises(StepmarkError, match=f"^train_file: .*{message}"):
            self.texts(f"{code}/{pattern}")

    def test_text_of_any_kind_has_no_columns(self, code: Path) -> None:
        for given in (f"{code}/**/*.py", str(code), str(code / "LICENSE")):
            with pytest.raises(UsageError, match="text_column is given, but"):
                self.texts(given, text_column="body")

    def test_a_column_needs_a_table(self, folder: Path) -> None:
        assert self.texts(str(folder), text_column="text")[0][:2] == ["a1", "a2"]
        with pytest.raises(UsageError, match="text_column is given, but"):
            self.texts(f"{folder}/*.txt", text_column="text")


@pytest.mark.parametrize("extension", ["parquet", "csv", "jsonl"])
def test_an_unknown_column_lists_the_existing_ones(tmp_path: Path, extension: str) -> None:
    path = write_rows(tmp_path / f"rows.{extension}", ROWS)
    with pytest.raises(UsageError, match=r"^text_column: .*'story'; its columns are number, text$"):
        texts_of(path, text_column="story")


def test_one_document_cannot_be_divided(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["a"])
    with pytest.raises(DataError, match=r"1 document cannot be split.*validation_split_percentage: 0"):
        texts_of(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "there is no training data"),
        ({"dataset_name": "python-stdlib", "train_file": "a.txt"}, "dataset_name and train_file are both given"),
        ({"dataset_name": "python-stdlib", "dataset_config_name": "x"}, "dataset_config_name"),
        ({"train_file": "a.txt", "text_column": "x"}, "text_column is given, but"),
        ({"train_file": []}, "there is no training data"),
        ({"train_file": ["a.txt", 3]}, "train_file: should be one or more paths"),
        ({"train_file": ["a.txt", "b.txt.gz"], "text_column": "x"}, "text_column is given, but"),
        ({"train_file": "src/**/*.py", "text_column": "x"}, "text_column is given, but"),
        ({"train_file": "a.txt", "block_size": 1}, "block_size: should be at least 2"),
        ({"train_file": "a.txt", "validation_split_percentage": 100}, "validation_split_percentage: should be from"),
        ({"train_file": "a.txt", "max_train_samples": 0}, "max_train_samples: should be at least 1"),
        ({"train_file": "a.txt", "max_eval_samples": -1}, "max_eval_samples: should be at least 1"),
        ({"train_file": "a.txt", "preprocessing_num_workers": 0}, "preprocessing_num_workers: should be at least 1"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataArguments(**fields)  # type: ignore[arg-type]


class TestDatasets:
    """Folders that the datasets library saved."""

    def test_splits_of_a_folder(self, tmp_path: Path) -> None:
        from datasets import Dataset, DatasetDict

        splits = {"train": ROWS, "validation": ["v"], "test": ["t"]}
        DatasetDict(
            {name: Dataset.from_dict({"id": list(range(len(rows))), "body": rows}) for name, rows in splits.items()}
        ).save_to_disk(tmp_path / "saved")
        config = DataArguments(dataset_name=str(tmp_path / "saved"))
        assert divided(config) == (ROWS, ["v"])
        assert open_sources(config).content == open_sources(config).content

    def test_a_single_split_is_divided(self, tmp_path: Path) -> None:
        from datasets import Dataset

        Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "saved")
        config = DataArguments(dataset_name=str(tmp_path / "saved"), validation_split_percentage=25)
        assert divided(config) == (ROWS[1:], ROWS[:1])

    def test_errors(self, tmp_path: Path) -> None:
        from datasets import Dataset, DatasetDict

        DatasetDict({"test": Dataset.from_dict({"text": ROWS})}).save_to_disk(tmp_path / "saved")
        with pytest.raises(DataError, match="has no split train; it has test"):
            open_sources(DataArguments(dataset_name=str(tmp_path / "saved")))
        with pytest.raises(UsageError, match=r"dataset_name: .* is no file or folder here, and cannot be loaded"):
            open_sources(DataArguments(dataset_name=str(tmp_path / "nothing")))
        Dataset.from_dict({"a": [1], "b": [2]}).save_to_disk(tmp_path / "numbers")
        with pytest.raises(UsageError, match="no column of strings; its columns are a, b"):
            open_sources(DataArguments(dataset_name=str(tmp_path / "numbers")))
        with pytest.raises(UsageError, match="no column 'c'; its columns are a, b"):
            open_sources(DataArguments(dataset_name=str(tmp_path / "numbers"), text_column="c"))
        Dataset.from_dict({"a": ["x"], "b": ["y"]}).save_to_disk(tmp_path / "two")
        with pytest.raises(UsageError, match="2 columns of strings.*text_column to one of a, b"):
            open_sources(DataArguments(dataset_name=str(tmp_path / "two")))
