"""The state of a run that continues from another tool's: what the training loop and transformers' files need."""

from __future__ import annotations

import json
import math
from typing import Any

from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer

# The fields of transformers' TrainerState that any of its versions has
_STATE_FIELDS = (
    "epoch global_step max_steps logging_steps eval_steps save_steps train_batch_size num_train_epochs "
    "num_input_tokens_seen total_flos log_history best_metric best_global_step best_model_checkpoint "
    "is_local_process_zero is_world_process_zero is_hyper_param_search trial_name trial_params"
)


def run_values(source: ForeignCheckpoint, optimizer: ForeignOptimizer) -> dict[str, Any]:
    """The values of the section "run". The position in the data is that after `step` steps, wherever that is in the
    data of the run that continues: `loader` says only that it was imported."""
    step = source.step or 0
    epoch = float((source.trainer_state or {}).get("epoch") or 0.0)
    none: dict[str, Any] = {"loss": 0.0, "tokens": 0}
    return {
        "step": step,
        "epoch": epoch,
        "epoch_open": False,
        "loader": {"imported": True, "step": step, "epoch": epoch},
        "unfinished": None,
        "means": {"since_log": none, "since_start": none, "grad_norm": 0.0},
        "schedule": _schedule(source, step),
        "rates": _rates(source, optimizer),
    }


def _schedule(source: ForeignCheckpoint, step: int) -> dict[str, Any]:
    """A schedule that is a function of the step needs the step; any other has more state."""
    state = dict(source.schedule or {})
    if not state or "lr_lambdas" in state:
        found = state.get("last_epoch")
        return {"step": found if type(found) is int else step}
    return state


def _rates(source: ForeignCheckpoint, optimizer: ForeignOptimizer) -> list[float]:
    """The groups' learning rates, as the schedule says: optimum-neuron's ZeRO-1 keeps the first ones in the groups."""
    last = (source.schedule or {}).get("_last_lr")
    if isinstance(last, list) and len(last) == len(optimizer.groups) and all(type(rate) is float for rate in last):
        return last
    rates = [group.get("lr") for group in optimizer.groups]
    return [float(rate) if isinstance(rate, int | float) else 0.0 for rate in rates]


def metrics_of(source: ForeignCheckpoint) -> dict[str, float]:
    """What the evaluation at this step has found, by which retention knows the best checkpoint."""
    history = (source.trainer_state or {}).get("log_history") or []
    logs = [log for log in history if isinstance(log, dict) and log.get("step") == source.step]
    numbers = {name: value for log in logs for name, value in log.items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if name.startswith("eval_") and math.isfinite(value)}


def trainer_state_bytes(source: ForeignCheckpoint) -> bytes:
    found = source.trainer_state or {}
    state = {name: found[name] for name in _STATE_FIELDS.split() if found.get(name) is not None}
    state["global_step"] = source.step or 0
    callbacks = found.get("stateful_callbacks") or {}
    state["stateful_callbacks"] = {
        name: value
        for name, value in callbacks.items()
        if isinstance(value, dict) and "attributes" in value and name != "TrainerControl"
    }
    return (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()
