"""A plan as text, and as plain values for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepmark.checkpoint.places import MEMORY
from stepmark.filesystem.objects import PART
from stepmark.preflight.plan.allocations import CATEGORIES
from stepmark.preflight.plan.plan import HEADROOM, Plan, RankMemory
from stepmark.preflight.plan.stages import StageTrace
from stepmark.preflight.plan.step_trace import StepTrace
from stepmark.trainer.run_folder.memory_snapshots import COPIES
from stepmark.trainer.telemetry.progress import aligned

GIGABYTE = 10**9
GIGABIT = 125e6  # bytes per second
SMALL_REQUESTS = 25  # of a checkpoint's upload: for its small files, what is beside it, and to look what is there


def to_text(plan: Plan) -> str:
    """One page: the model and the run, memory of the recipe's own settings, and of others."""
    return "\n".join([*_head(plan), "", *_own(plan), "", *_table(plan), "", *_conclusion(plan)])


def _head(plan: Plan) -> Iterator[str]:
    size, billions = plan.size, plan.size.elements / 1e9
    count = f"{billions:.3f} billion" if billions >= 0.1 else f"{size.elements:,}"
    active = f" ({size.active / size.elements:.1%} active for a token)" if size.active < size.elements else ""
    yield f"model       {plan.model_class}, {count} parameters{active}, {plan.own.args.dtype}"
    yield f"ranks       {plan.setup.ranks}: {_mesh(plan, plan.own)}; device {plan.setup.device.name}"
    if plan.own.stages:
        yield f"pipeline    {_pipeline(plan.own)}"
    steps = "unknown (max_steps, or --count-data, tells)" if plan.steps is None else f"{plan.steps:,}"
    tokens = "" if plan.tokens is None else f", {plan.tokens:,} in all"
    yield f"steps       {steps}; {plan.samples_per_step:,} samples = {plan.tokens_per_step:,} tokens a step{tokens}"
    times = "" if plan.saves is None else f", {plan.saves:,} times"
    kept = plan.own.args.save_total_limit
    disk = "" if kept is None else f"; {kept} kept and one in progress: {_gb((kept + 1) * plan.checkpoint_bytes)}"
    parts = f"model {_gb(plan.model_bytes)}, optimizer {_gb(plan.optimizer_bytes)}"
    yield f"checkpoint  {_gb(plan.checkpoint_bytes)} ({parts}){times}{disk}"
    yield f"host        {_gb(plan.staging_bytes)} a rank to copy a checkpoint to; it is kept from save to save"
    if plan.own.args.memory_every is not None:
        yield f"memory      {_gb(COPIES * plan.checkpoint_bytes)} in /dev/shm for snapshots (memory_every)"
    if plan.own.args.mirror_to is not None:
        requests, seconds = plan.checkpoint_bytes // PART + SMALL_REQUESTS, plan.checkpoint_bytes / GIGABIT
        upload = f"{requests:,} requests and {seconds:,.0f} s at 1 Gbit/s a checkpoint"
        yield f"bucket      {upload}; up to {MEMORY >> 20} MiB on rank 0"


def _pipeline(own: RankMemory) -> str:
    args = own.args
    chunks = f" with {args.pipeline_chunks} stages a rank" if args.pipeline_chunks > 1 else ""
    return (
        f"{args.pipeline_schedule}{chunks}, {args.gradient_accumulation_steps} micro-batches: a rank waits for "
        f"{own.bubble:.1%} of a step, if all stages take equally long"
    )


def _own(plan: Plan) -> Iterator[str]:
    own = plan.own
    where = "" if own.worst is None else f" of pipeline rank {own.worst.rank}, which needs the most"
    yield f"memory a rank at the peak, in the {own.trace.peak_of}{where}:"
    for category in CATEGORIES:
        yield f"  {category:<16}{_gb(own.trace.usage[category]):>12}"
    yield f"  {'sum':<16}{_gb(own.trace.peak):>12}"
    if own.stages:
        yield ""
        kept = "`kept`: forward passes whose activations a rank keeps at a time"
        yield f"the ranks of its pipeline, in {_unit(plan)[1]}; {kept}:"
        rows = [(str(each.rank), _layers(each), str(each.in_flight), *_sizes(plan, each)) for each in own.stages]
        yield from _aligned([("rank", "layers", "kept", *CATEGORIES, "peak"), *rows])


def _sizes(plan: Plan, trace: StepTrace) -> list[str]:
    """The cells of its memory."""
    return [f"{size / _unit(plan)[0]:.2f}" for size in (*map(trace.usage.__getitem__, CATEGORIES), trace.peak)]


def _unit(plan: Plan) -> tuple[int, str]:
    """Bytes and name of the unit of the tables: small models have nothing to show in GB."""
    largest = max(option.trace.peak for option in plan.options if option.impossible is None)
    return (GIGABYTE, "GB") if largest >= GIGABYTE / 10 else (10**6, "MB")


def _layers(stage: StageTrace) -> str:
    """From 0: `0-5`; with chunks `0-2 + 6-8`."""
    return " + ".join(f"{first}-{last}" if last > first else str(first) for first, last in stage.layers)


def _table(plan: Plan) -> Iterator[str]:
    """One line for each setting; the first is the recipe's own."""
    yield f"the recipe's mesh and those near it, in {_unit(plan)[1]}:"
    rows = [_row(plan, option) for option in plan.options if option.impossible is None]
    yield from _aligned([list(rows[0]), *(list(row.values()) for row in rows)])
    for option in plan.options:
        if option.impossible is not None:
            yield f"  {_mesh(plan, option)}: not possible: {option.impossible}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, right=range(len(rows[0])))]


def _row(plan: Plan, option: RankMemory) -> dict[str, str]:
    """The cells by the columns' heads."""
    args, worst = option.args, option.worst
    cells = {
        "mesh": _mesh(plan, option),
        "sharded": "fsdp" if args.fsdp is not None else "zero_1" if args.zero_1 else "no",
        "sequence": ("no", "yes")[args.sequence_parallel],
        "checkpointing": ("no", "yes")[args.gradient_checkpointing],
        "rows x micro": f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps}",
        **dict(zip((*CATEGORIES, "peak"), _sizes(plan, option.trace), strict=True)),
    }
    if any(each.stages for each in plan.options):
        cells |= {"largest": f"rank {worst.rank}" if worst else "", "bubble": f"{option.bubble:.1%}" if worst else ""}
    if plan.device_memory is not None:
        tight = option.trace.peak <= plan.device_memory
        cells["fits"] = "yes" if option.fits(plan.device_memory) else "tight" if tight else "no"
    return cells


def _conclusion(plan: Plan) -> Iterator[str]:
    yield "`rows x micro`: rows of a micro-batch and micro-batches of a step, so that a step has the same samples."
    if any(option.stages for option in plan.options):
        yield "`largest`, `bubble`: the pipeline rank that needs this memory; the share of a step in which ranks wait."
    if plan.setup.device.lazy:
        yield "On xla the compiler decides: it is planned as if operations ran one by one, without fused attention."
    if plan.setup.device.name == "cpu":
        yield "On the CPU these are the tensors. glibc's heap can keep several times that (see MALLOC_MMAP_THRESHOLD_)."
    yield from plan.notes
    if plan.device_memory is None:
        return
    memory = f"{_gb(plan.device_memory)} a rank, of which {1 - HEADROOM:.0%} are left for runtime and libraries"
    chosen = plan.chosen
    if chosen is None:
        narrower = "" if plan.own.args.dtype == "bfloat16" else "dtype: bfloat16, "
        yield f"None of these fits into {memory}: use {narrower}a shorter block_size, or more ranks."
    elif chosen is plan.own:
        yield f"The recipe fits into {memory}."
    else:
        yield f"The recipe does not fit into {memory}. This does: {' '.join(flags(plan.own, chosen))}"


def flags(own: RankMemory, other: RankMemory) -> list[str]:
    """Command line flags that turn the recipe's own settings into the other ones."""
    before, after = own.args.to_dict(), other.args.to_dict()
    changed = {name: value for name, value in after.items() if value != before[name]}
    return [f"--{name} {'null' if value is None else str(value).lower()}" for name, value in changed.items()]


def _mesh(plan: Plan, option: RankMemory) -> str:
    axes = _axes(plan, option)
    return " x ".join(f"{axis} {size}" for axis, size in axes.items() if axis != "pp" or size > 1)


def _axes(plan: Plan, option: RankMemory) -> dict[str, int]:
    tensor, stages = option.args.tensor_parallel_size, option.args.pipeline_parallel_size
    axes = {"pp": stages, "dp": plan.setup.ranks // (tensor * stages), "tp": tensor}
    experts = option.args.expert_parallel_size
    return {**axes, "ep": experts} if experts > 1 else axes


def _gb(size: int) -> str:
    return f"{size / GIGABYTE:,.2f} GB" if size >= GIGABYTE / 10 else f"{size / 1e6:,.2f} MB"


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, sizes in bytes."""
    return {
        "model": plan.model_class,
        "parameters": plan.size.elements,
        "active_parameters": plan.size.active,
        "ranks": plan.setup.ranks,
        "device": plan.setup.device.name,
        "device_memory": plan.device_memory,
        "block_size": plan.setup.length,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "tokens": plan.tokens,
        "checkpoint": {
            "model": plan.model_bytes,
            "optimizer": plan.optimizer_bytes,
            "staging_per_rank": plan.staging_bytes,
            "shared_memory": 0 if plan.own.args.memory_every is None else COPIES * plan.checkpoint_bytes,
            "saves": plan.saves,
        },
        "options": [_option_to_json(plan, option) for option in plan.options],
        "chosen": plan.options.index(plan.chosen) if plan.chosen is not None else None,
        "notes": list(plan.notes),
    }


def _option_to_json(plan: Plan, option: RankMemory) -> dict[str, Any]:
    worst, possible = option.worst, option.impossible is None
    traced = _trace_to_json(option.trace) if possible else {"peak": None, "peak_in": "", "memory": None}
    return {
        "mesh": _axes(plan, option),
        "changes": flags(plan.own, option),
        **traced,
        "fits": None if plan.device_memory is None else option.fits(plan.device_memory),
        "impossible": option.impossible,
        "bubble": option.bubble if possible else None,
        "largest": None if worst is None else worst.rank,
        "stages": [
            {"rank": each.rank, "layers": each.layers, "in_flight": each.in_flight, **_trace_to_json(each)}
            for each in option.stages
        ],
    }


def _trace_to_json(trace: StepTrace) -> dict[str, Any]:
    return {"peak": trace.peak, "peak_in": trace.peak_of, "memory": trace.usage}
