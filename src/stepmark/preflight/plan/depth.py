"""The memory of a deep model from two shallow ones.

Every layer adds the same to each part of a step, so the peak of a part grows linearly with the number of layers: the
part's peak is at the same operation whatever the depth. Two shallow traces give slope and offset, in seconds for a
model whose own trace would take minutes. Parts are extrapolated one by one, because which part has the highest peak
depends on the depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import Peaks, StepTrace, trace_step

TRACED = 8  # layers up to which all are traced
SHALLOW = 3  # layers of the smaller model, at least: the first and the last may differ from those between them


def trace_deep(setup: StepSetup) -> StepTrace:
    """Like `trace_step`, in a time that does not grow with the model's depth where its layers repeat.

    A rank of a pipeline has its own stages shortened alike, and those of other ranks as far as kinds of layers allow.
    """
    args, period = setup.args, period_of(setup.config)
    if period is None:
        return trace_step(setup)
    sizes = args.pipeline_layers if setup.staged else [setup.config.num_hidden_layers]
    assert sizes is not None
    own = range(setup.stage, len(sizes), args.pipeline_parallel_size)
    removed = (min(sizes[stage] for stage in own) - SHALLOW) // period - 2  # periods
    if removed < 1 or max(sizes[stage] for stage in own) <= TRACED:
        return trace_step(setup)

    def shortened(periods: int) -> StepSetup:
        changed = [
            size - periods * period if stage in own else (size - 1) % period + 1 for stage, size in enumerate(sizes)
        ]
        cut = dataclasses.replace(args, pipeline_layers=changed) if setup.staged else args
        return _with_depth(dataclasses.replace(setup, args=cut), sum(changed))

    shallow, deep = trace_step(shortened(removed + 2)), trace_step(shortened(removed))
    return dataclasses.replace(deep, peaks=extrapolated(shallow.peaks, deep.peaks, removed / 2))


def extrapolated(low: Peaks, high: Peaks, steps: float) -> Peaks:
    """The peaks after as many further steps as that from `low` to `high`."""
    return {
        window: {category: round(size + steps * (size - low[window][category])) for category, size in usage.items()}
        for window, usage in high.items()
    }


def _with_depth(setup: StepSetup, layers: int) -> StepSetup:
    """The setup for a model with only the first `layers` layers."""
    values, depth = setup.config.to_dict(), setup.config.num_hidden_layers
    changed = {name: value[:layers] for name, value in values.items() if _is_by_layer(value, depth)}
    own_name = setup.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")  # GPT-2's is another one
    config = type(setup.config)(**{**values, **changed, "num_hidden_layers": layers, own_name: layers})
    config.name_or_path = setup.config.name_or_path  # where code that comes with the model is looked for
    return dataclasses.replace(setup, config=config)


def _is_by_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


def period_of(config: Any) -> int | None:
    """After how many layers the kinds of layers repeat: 1 where all are alike; None where they do not repeat, or where
    the configuration of the layers is inside another one."""
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or config.get_text_config() is not config:
        return None
    lists = [value for value in config.to_dict().values() if _is_by_layer(value, depth)]
    kinds = [str(kind) for kind in zip(*lists, strict=True)] if lists else [""] * depth
    for period in range(1, depth // 2 + 1):
        if all(kinds[layer] == kinds[layer % period] for layer in range(depth)):
            return period
    return None
