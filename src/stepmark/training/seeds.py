"""Where random numbers come from: each micro-step's are set before it, so that nothing else can shift them.

The micro-step's dropout takes (seed, step, micro-step, data parallel coordinate); regions of a tensor parallel model
derive theirs from that (parallel/tensor/dropout.py).
"""

from __future__ import annotations

from stepmark.runtime.seeds import derive_seed

__all__ = ["derive_seed"]
