"""The memory of the ranks of a pipeline, which differ: the first keeps the activations of the most micro-batches, the
last has the head and the loss; and the memory of a deep model from two shallow ones.

Every layer adds the same to each part of a step, so the peak of a part grows linearly with the number of layers: the
part's peak is at the same operation whatever the depth. Two shallow traces give slope and offset, in seconds for a
model whose own trace would take minutes. Parts are extrapolated one by one, because which part has the highest peak
depends on the depth.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from stepmark.config.training_fields import TrainingFields
from stepmark.parallel.pipeline.balance import bounds_of
from stepmark.parallel.pipeline.schedules import GPIPE, make_schedule
from stepmark.parallel.pipeline.stage_plan import plan_stages
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import Peaks, StepTrace, meta_model, trace_step, train_like

LAYERS = 8  # layers up to which all are traced
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
    removed = ((min(sizes[stage] for stage in own) - SHALLOW) // period - 2) // 2 * 2  # periods: halves stay halves
    if removed < 1 or max(sizes[stage] for stage in own) <= LAYERS:
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
    periods = range(1, depth // 2 + 1)
    return next((each for each in periods if all(kinds[at] == kinds[at % each] for at in range(depth))), None)


FEW, MORE = 3, 4  # micro-batches that are traced of gpipe, which keeps the activations of all
TRACED = 6  # micro-batches of gpipe up to which all are traced


@dataclass(frozen=True)
class StageTrace(StepTrace):
    """The step of one rank of a pipeline, by its coordinate on the pipeline's axis. `layers`: the first and the last of
    each of its stages. `in_flight`: the most forward passes whose activations it keeps."""

    rank: int
    layers: tuple[tuple[int, int], ...]
    in_flight: int


def trace_stages(setup: StepSetup, *, every: bool) -> list[StageTrace]:
    """Traces the ranks of a pipeline, the first of each stage.

    Args:
        setup: Whose `pipeline_layers` may be None: the layers are divided as the run would.
        every: Trace all; otherwise those among which the largest must be.

    Raises:
        UsageError: The model cannot be cut in this way.
    """
    args = setup.args
    with FakeTensorMode():
        model = train_like(meta_model(setup), args)
        plan = plan_stages(model, args.pipeline_parallel_size * args.pipeline_chunks, args.pipeline_layers)
    sizes = [end - begin for begin, end in plan.bounds]
    args = dataclasses.replace(args, pipeline_layers=sizes)
    ranks = range(args.pipeline_parallel_size)
    traced = ranks if every or period_of(setup.config) != 1 else _largest(sizes, args)
    bounds = bounds_of(sizes)
    found = []
    for rank in traced:
        layers = tuple((begin, end - 1) for begin, end in bounds[rank :: len(ranks)])
        trace = _trace(dataclasses.replace(setup, args=args, stage=rank))
        found.append(StageTrace(trace.peaks, trace.saved_per_element, rank, layers, in_flight(args, rank)))
    return found


def in_flight(args: TrainingFields, rank: int) -> int:
    """The most forward passes whose activations a rank of the pipeline keeps."""
    micro_batches = args.gradient_accumulation_steps
    ranks = args.pipeline_parallel_size
    if args.pipeline_schedule != GPIPE:  # from there on it is the same
        micro_batches = min(micro_batches, 4 * ranks)
    return make_schedule(args.pipeline_schedule, ranks, micro_batches, args.pipeline_chunks).in_flight(rank)


def _largest(sizes: list[int], args: TrainingFields) -> list[int]:
    """The first rank, the last, and of those between them, which keep the fewer activations the later they are, each
    that has more layers than the ones before it."""
    last = args.pipeline_parallel_size - 1
    found, most = [0], 0
    for rank in range(1, last):
        layers = sum(sizes[rank :: last + 1])
        if layers > most:
            found.append(rank)
            most = layers
    return [*found, last]


def _trace(setup: StepSetup) -> StepTrace:
    """One rank's step. With gpipe the peaks grow with every micro-batch by the same, so two small numbers suffice."""
    count = setup.args.gradient_accumulation_steps
    if setup.args.pipeline_schedule != GPIPE or count <= TRACED:
        return trace_deep(setup)
    few, more = (trace_deep(dataclasses.replace(setup, micro_batches=number)) for number in (FEW, MORE))
    peaks = extrapolated(_by_part(few.peaks), _by_part(more.peaks), (count - MORE) / (MORE - FEW))
    return dataclasses.replace(more, peaks=peaks)


def _by_part(peaks: Peaks) -> Peaks:
    """The highest peak of all passes of a kind."""
    found: Peaks = {}
    for window, usage in peaks.items():
        part = " ".join(word for word in window.replace(",", "").split() if not word.isdigit())
        if part not in found or sum(usage.values()) > sum(found[part].values()):
            found[part] = usage
    return found
