"""The memory of a deep model from two shallow ones.

Every layer adds the same to each part of a step, so the peak of a part grows linearly with the number of layers: the
part's peak is at the same operation whatever the depth. Two shallow traces give slope and offset, in seconds for a
model whose own trace would take minutes. Parts are extrapolated one by one, because which part has the highest peak
depends on the depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from stepmark.planning.step_trace import Peaks, StepSetup, StepTrace, trace_step

TRACED = 8  # layers up to which all are traced
SHALLOW = 3  # layers of the smaller model, at least: the first and the last may differ from those between them


def trace_deep(setup: StepSetup) -> StepTrace:
    """Like `trace_step`, in a time that does not grow with the model's depth where its layers repeat."""
    depth = getattr(setup.config, "num_hidden_layers", None)
    period = _period(setup.config, depth) if isinstance(depth, int) else None
    if depth is None or period is None:
        return trace_step(setup)
    low = depth % period + period * -(-SHALLOW // period)
    high = low + 2 * period
    if depth <= max(TRACED, high):
        return trace_step(setup)
    shallow, deep = (trace_step(_with_depth(setup, layers)) for layers in (low, high))
    steps = (depth - high) / (high - low)
    return dataclasses.replace(deep, peaks=_extrapolated(shallow.peaks, deep.peaks, steps))


def _extrapolated(low: Peaks, high: Peaks, steps: float) -> Peaks:
    return {
        window: {category: round(size + steps * (size - low[window][category])) for category, size in usage.items()}
        for window, usage in high.items()
    }


def _with_depth(setup: StepSetup, layers: int) -> StepSetup:
    """The same for a model with fewer layers: the first ones."""
    values = setup.config.to_dict()
    depth = setup.config.num_hidden_layers
    changed = {name: value[:layers] for name, value in values.items() if _is_by_layer(value, depth)}
    config = type(setup.config)(**{**values, **changed, "num_hidden_layers": layers, _depth_name(setup.config): layers})
    config.name_or_path = setup.config.name_or_path  # where code that comes with the model is looked for
    return dataclasses.replace(setup, config=config)


def _depth_name(config: Any) -> str:
    """GPT-2's configuration, for one, has another name for it."""
    return str(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))


def _is_by_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


def _period(config: Any, depth: int) -> int | None:
    """After how many layers the kinds of layers repeat: 1 where all are alike; None where they do not repeat, or where
    the configuration of the layers is inside another one."""
    if config.get_text_config() is not config:
        return None
    lists = [value for value in config.to_dict().values() if _is_by_layer(value, depth)]
    kinds = [str(kind) for kind in zip(*lists, strict=True)] if lists else [""] * depth
    for period in range(1, depth // 2 + 1):
        if all(kinds[layer] == kinds[layer % period] for layer in range(depth)):
            return period
    return None
