"""The README is short, and so are the pages of the documentation and their sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README_WORDS = 700
PAGE_WORDS = 1_500  # of a page of docs/; what exceeds it is divided by subject
AVERAGE = 16.0  # words per sentence, of all pages
AVERAGE_OF_A_PAGE = 19.0
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]+`")
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])[)*\"]*\s+(?=[A-Z0-9(\"*\u00ab]|CODE)")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's paragraphs and list items, without code, tables and headings. Inline code is a word."""
    text = LINK.sub(r"\1", COMMENT.sub("", FENCE.sub("\n", text)))
    text = CODE.sub("CODE", text)
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = ITEM.match(line)
        if starts or not line.strip() or line.startswith(("#", "|")):
            yield from (each for each in END.split(" ".join(paragraph)) if any(map(str.isalpha, each)))
            paragraph = []
        if line.strip() and not line.startswith(("#", "|")):
            paragraph.append(line[starts.end() :] if starts else line.strip())


def lengths(text: str) -> list[int]:
    return [len(sentence.split()) for sentence in sentences(text)]


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= PAGE_WORDS


def test_sentences_are_short() -> None:
    assert mean(length for page in PAGES for length in lengths(page.read_text(encoding="utf-8"))) <= AVERAGE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_has_long_sentences_throughout(page: Path) -> None:
    assert mean(lengths(page.read_text(encoding="utf-8"))) <= AVERAGE_OF_A_PAGE


def test_sentences_are_counted() -> None:
    text = (
        "# Title\n\nOne two `three.four five`. Six\nseven!\n\n- Eight nine\n- ten [eleven twelve](x.md)\n\n| a. B. |\n"
    )
    assert lengths(text) == [3, 2, 2, 3]
    assert lengths("```\nnot this. Nor this.\n```\nThis one. And this.\n") == [2, 2]
