"""TRL's trainers on Stepmark's Trainer: SFT, DPO, KTO and reward models, with all that a Stepmark run has.

Each class is TRL's own with another base, so that everything of TRL's documentation holds for it. Its config has TRL's
fields, and Stepmark's in place of those of transformers. Needs the extra `stepmark[trl]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl import DPOConfig as DPOConfig
    from trl import DPOTrainer as DPOTrainer
    from trl import KTOConfig as KTOConfig
    from trl import KTOTrainer as KTOTrainer
    from trl import RewardConfig as RewardConfig
    from trl import RewardTrainer as RewardTrainer
    from trl import SFTConfig as SFTConfig
    from trl import SFTTrainer as SFTTrainer

_NAMES = [f"{kind}{what}" for kind in ("SFT", "DPO", "KTO", "Reward") for what in ("Trainer", "Config")]
_GENERATES = (
    "generates while it trains, for which Stepmark has no loop yet: generation on the training ranks, or by vLLM with "
    "the weights of each step, and rewards of the texts"
)
_ONLINE = ("GRPO", "RLOO", "OnlineDPO", "PPO", "GKD", "XPO", "NashMD", "Distillation")
__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES and (name.startswith("_") or not name.endswith(("Trainer", "Config"))):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _NAMES:
        why = _GENERATES if name.startswith(_ONLINE) else "is not on Stepmark's Trainer"
        raise ImportError(f"{name}: {why}; stepmark.trl has {', '.join(_NAMES)}")
    from stepmark.trainer.library_trainers import exported

    return globals().setdefault(name, exported(__name__, "trl", name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
