"""The ids of texts are those of their tokenizer, also where they are found in a quicker way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.data.tokenize import encoding
from stepmark.data.tokenize.encoding import Segment, TextEncoder
from stepmark.data.tokenize.tokenizer import END_OF_TEXT, PAD, byte_tokenizer

TOKENIZER = byte_tokenizer()
ENCODER = TextEncoder(TOKENIZER)
PIECES = st.lists(st.one_of(st.text(), st.sampled_from([END_OF_TEXT, PAD, "<|", "|>"])), min_size=1)


@given(PIECES)
@settings(max_examples=200, deadline=None)
def test_bytes_are_encoded_as_the_tokenizer_does(pieces: list[str]) -> None:
    """Adjacent pieces make up special tokens, too."""
    texts = [*pieces, "".join(pieces)]
    expected = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    assert [list(ids) for ids in ENCODER.encode(texts)] == expected
    stream = ENCODER.stream([Segment(pieces)])
    assert (stream.tolist(), stream.dtype) == ([*expected[-1], 256], np.dtype("<u2"))


def test_the_library_is_not_asked_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(encoding, "_encode_fast", called)
    assert [list(ids) for ids in ENCODER.encode(["ü"])] == [[195, 188]]
    with pytest.raises(AssertionError):
        ENCODER.encode([PAD])


def test_another_tokenizer_of_bytes_is_left_to_the_library() -> None:
    """One token more, and text is no longer its bytes."""
    other = byte_tokenizer()
    other.add_tokens(["ab"])
    assert [list(ids) for ids in TextEncoder(other).encode(["abc"])] == [[258, 99]]
