"""The byte tokenizer is exact and ordinary; a tokenizer that is not there is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from stepmark.data.tokenize.tokenizer import byte_tokenizer, load_tokenizer
from stepmark.errors import UsageError

TOKENIZER = byte_tokenizer()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_ids_are_the_bytes_and_decoding_is_exact(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    if "<|" not in text:  # what spells a special token is that token, as with any tokenizer of transformers
        assert ids == list(text.encode())


def test_every_byte_value_is_a_separate_token() -> None:
    text = "".join(map(chr, range(0x110))) + "\u2028\U0001f600 do n't . ,"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (256, 256, 257)
    assert len(TOKENIZER) == 258


@pytest.mark.parametrize("model_type", [None, "gpt2", "llama", "qwen3"])
def test_transformers_loads_the_saved_tokenizer(tmp_path: Path, model_type: str | None) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    if model_type:  # beside a model's configuration, as in a checkpoint
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "  it 's\n\n\té 😀<|endoftext|>"
    assert again.encode(text) == TOKENIZER.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.special_tokens_map == TOKENIZER.special_tokens_map


def test_names() -> None:
    assert load_tokenizer("bytes").encode("a") == [97]


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("a") == [97]


def test_an_empty_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^tokenizer_name: .*save_pretrained") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"^tokenizer_name: .*'no/such-tokenizer'.*`bytes`"):
        load_tokenizer("no/such-tokenizer")
