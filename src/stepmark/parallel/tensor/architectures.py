"""The model types whose own tensor parallel plan reproduces the results of the unsharded model.

docs/tables.md describes the comparison and why other types failed it; `scripts/architectures.py` generates both.
"""

from __future__ import annotations

PASSED = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "helium",
        "hrm_text",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "phi",
        "phi3",
        "phi4_multimodal",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_text",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)
