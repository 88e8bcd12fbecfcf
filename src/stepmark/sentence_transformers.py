"""sentence-transformers' trainers on Stepmark's Trainer: embeddings, rerankers and sparse encoders.

Each class is the library's own with another base, so that everything of its documentation holds for it. Its arguments
have the library's fields, and Stepmark's in place of those of transformers. Needs the extra
`stepmark[sentence-transformers]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoderTrainer as CrossEncoderTrainer
    from sentence_transformers import CrossEncoderTrainingArguments as CrossEncoderTrainingArguments
    from sentence_transformers import SentenceTransformerTrainer as SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as SentenceTransformerTrainingArguments
    from sentence_transformers import SparseEncoderTrainer as SparseEncoderTrainer
    from sentence_transformers import SparseEncoderTrainingArguments as SparseEncoderTrainingArguments

_KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
_NAMES = [f"{kind}{what}" for kind in _KINDS for what in ("Trainer", "TrainingArguments")]
__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_NAMES)}")
    from stepmark.trainer.library_trainers import exported

    return globals().setdefault(name, exported(__name__, "sentence_transformers", name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
