"""A run's watch over its ranks: see runtime/liveness.py."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stepmark.runtime.liveness import PeerWatch

if TYPE_CHECKING:
    from stepmark.trainer.trainer import Trainer

logger = logging.getLogger("stepmark")


def watch_of(trainer: Trainer) -> PeerWatch:
    """While it is entered, a rank that shows no sign of life for `save_timeout` ends the run, as a failed one."""

    def tell(reason: str) -> None:
        try:
            trainer.journal.status("failed", trainer.state.global_step, reason)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)

    context = trainer.context
    return PeerWatch(
        context.store,
        context.host.rank,
        context.host.size,
        trainer.args.save_timeout,
        setting="save_timeout",
        progress=lambda: f"after step {trainer.state.global_step}",
        ending=tell,
    )
