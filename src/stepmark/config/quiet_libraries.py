"""Silences messages of libraries that users cannot act on."""

from __future__ import annotations

import logging
import os
import warnings


def leave_out_torch_xla() -> None:
    """Keeps accelerate and transformers, imported later, from importing torch_xla, which takes two seconds."""
    os.environ.setdefault("USE_TORCH_XLA", "0")


def quiet_libraries() -> None:
    """Silences progress bars and notices of the libraries underneath; their errors stay. Call before importing them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("torch_xla").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
