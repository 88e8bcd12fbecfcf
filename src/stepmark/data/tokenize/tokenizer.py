"""The tokenizer of a run: the built-in one of bytes, or one of Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.errors import UsageError
from stepmark.filesystem.files import check_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
OWN_CODE = "comes with Python code of its own"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """UTF-8 bytes: token id b is byte b, 256 is `<|endoftext|>` (begin and end of text), 257 is `<|pad|>`.

    Decoding restores the text exactly. `save_pretrained` writes an ordinary Hugging Face tokenizer, which
    `AutoTokenizer.from_pretrained` reads.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Splitting words is slow and has no effect without merges.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(
    name: str, trust_remote_code: bool = False, *, field: str = "tokenizer_name"
) -> PreTrainedTokenizerBase:
    """The tokenizer that `tokenizer_name` names: `bytes`, a folder, or a name of the Hugging Face hub.

    Args:
        name: As above.
        trust_remote_code: Executes Python code that comes with the tokenizer. Default: False.
        field: The recipe field with the name, for error messages. Default: "tokenizer_name".

    Raises:
        UsageError: There is none, or it needs code of its own that is not trusted.
    """
    if name == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    check_files(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the library raises many kinds
        check_own_code(error, field, name)
        if Path(name).is_dir():
            remedy = "the folder needs the files that save_pretrained of a tokenizer writes"
        else:
            remedy = "give a folder with a tokenizer, a name of the Hugging Face hub that can be reached, or `bytes`"
        raise UsageError(f"{field}: no tokenizer could be loaded from {name!r}; {remedy}") from error


def check_own_code(error: Exception, field: str, name: str) -> None:
    """Raises UsageError where `error`, of transformers, means that what `field` names comes with untrusted code."""
    if "trust_remote_code" in str(error):
        raise UsageError(
            f"{field}: {name} {OWN_CODE}, which would be executed; set trust_remote_code: true if you trust it"
        ) from error
