"""Makes the demo's tokenizer: byte-level BPE with a small vocabulary, trained on Python's standard library.

python examples/demo_tokenizer.py demo/tokenizer
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048  # tokens: a larger one needs fewer tokens for a line, and a slower last layer
END = "<|endoftext|>"


def make_tokenizer(folder: Path) -> None:
    """Trains the tokenizer and writes it to `folder`, as Hugging Face's `save_pretrained` does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=bytes_, show_progress=False
    )
    tokenizer.train_from_iterator(sources(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def sources() -> Iterator[str]:
    """Every third module of the standard library, which is enough for a vocabulary of this size."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if not {"site-packages", "test"} & {*path.parts})
    return (path.read_text(encoding="utf-8", errors="replace") for path in files[::3])


if __name__ == "__main__":
    make_tokenizer(Path(sys.argv[1]))
