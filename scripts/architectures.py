"""Verifies tensor parallelism for every causal language model of transformers, and records which types pass.

Each architecture with a plan is built with a small random configuration and compared, at tensor_parallel_size 2, with
itself on one rank: logits, loss, and the gradient of every parameter; and again with sequence parallelism. The
two ranks are threads of this process.

    python scripts/architectures.py [--only MODEL_TYPE …] [--write] [--pipeline] [--experts]

With --pipeline, pipeline stages are verified instead (pipeline_architectures.py); with --experts, experts that two
ranks divide, which share a batch, or have one each. With --write the results go to docs/data, and the lists that
`parallelize` uses to src/stepmark/parallel/architectures.json.
"""

from __future__ import annotations

import argparse
import copy
import re
import threading
import warnings
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import transformers
from pipeline_architectures import verify
from small_models import SMALL, narrow_model
from tables import write_lists, write_table
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stepmark.errors import UsageError
from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.parallel import architectures as accepted
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.tensor.expert_parallel import expert_modules
from stepmark.parallel.tensor.plans import PLANS, STYLES, own_plan, parse_style, plan_of
from stepmark.parallel.tensor.sequence import REFUSED
from stepmark.runtime.collectives import NoCollectives, Reduction
from stepmark.runtime.context import Context
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.rank_grid import RankGrid
from stepmark.sharding.layout import layout_of
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import local_shard

KINDS = {parse_style(style).kind for style in STYLES}
RANKS = 2
TOKENS = 8
OVER_TENSOR, OVER_DATA = "tensor parallel ranks", "data parallel ranks"
TOLERANCE = 1e-4  # of the largest value of the tensor compared
GRADIENT = "the gradient of"
WAIT_SECONDS = 20
ATTENTION = re.compile(r"^(?!.*\.(shared_)?experts\.).*(att(entio)?n|mixer|mamba)")
"""The names of parameters that mix tokens."""
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""The loss of routers is a large part of the loss, where the model has one."""


class ThreadAxis:
    """An axis whose ranks are threads: see `Collectives`."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def _exchange(self, tensors: Any) -> list[list[Tensor]]:
        self._slots[self.rank] = [tensor.detach().clone() for tensor in tensors]
        self._barrier.wait(WAIT_SECONDS)
        all_ranks = list(self._slots)
        self._barrier.wait(WAIT_SECONDS)
        return [list(each) for each in zip(*all_ranks, strict=True)]

    def all_reduce(self, tensors: Any, op: Reduction = "sum") -> list[Tensor]:
        stacked = [torch.stack(each) for each in self._exchange(tensors)]
        return [each.sum(0) if op == "sum" else each.amax(0) for each in stacked]

    def all_gather(self, tensors: Any, dim: int = 0) -> list[Tensor]:
        return [torch.cat(each, dim) for each in self._exchange(tensors)]

    def reduce_scatter(self, tensors: Any, dim: int = 0) -> list[Tensor]:
        return [self.own_shard(each, dim) for each in self.all_reduce(tensors)]

    def all_to_all(self, tensors: Any, sent: Any, received: Any) -> list[Tensor]:
        rows = [row for tensor in tensors for row in tensor.split(list(sent))]
        return [torch.cat(each) for each in self._exchange(rows)[self.rank :: self.size]]

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank]


@dataclass(frozen=True)
class Result:
    """`verdict`: passed, refused, failed, not built (no small configuration was found), or no plan. `why`: of a type
    that passed, what its plan does not shard. `sequence`: whether it passed with sequence parallelism, or why not."""

    model_type: str
    verdict: str
    why: str = ""
    sequence: str = ""


def attempt(model_type: str) -> Result:
    """Builds the model, parallelizes it, compares."""
    try:
        model = narrow_model(model_type, **ROUTERS)
        if not _has_router_losses(model):
            model = narrow_model(model_type)
    except Exception as error:  # small values that the configuration rejects say nothing about parallelism
        return Result(model_type, "not built", _first_line(error))
    try:
        plan = _plan(model)
        plan_of(model, plan)
        halves = [copy.deepcopy(model) for _ in range(RANKS)]
        difference = compare(model, halves, plan) or _not_sharded(halves[0])
        sequence = "" if difference else _with_sequence(model, plan)
    except UsageError as error:
        return Result(model_type, "refused", str(error).removeprefix("tensor_parallel_size: ").split("; supported")[0])
    except Exception as error:
        return Result(model_type, "failed", f"{type(error).__name__}: {_first_line(error)}")
    if difference:
        return Result(model_type, "failed", difference)
    return Result(model_type, "passed", _whole(halves[0]), sequence)


def _with_sequence(model: Any, plan: dict[str, str]) -> str:
    """ "yes", or why the model cannot be sharded along the sequence, too."""
    model.zero_grad()
    try:
        return compare(model, [copy.deepcopy(model) for _ in range(RANKS)], plan, sequence=True) or "yes"
    except UsageError as error:
        return str(error).removeprefix("sequence_parallel: ").split("; set it")[0].partition(" is not supported: ")[2]
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"


def attempt_experts(model_type: str) -> Result:
    """The same for expert parallelism: on tensor parallel ranks, if the type has a plan for these, and on data parallel
    ranks."""
    try:
        model = narrow_model(model_type, **ROUTERS)
        if not _has_router_losses(model):
            model = narrow_model(model_type)
    except Exception as error:
        return Result(model_type, "not built", _first_line(error))
    for form in (OVER_TENSOR, OVER_DATA) if model_type in accepted.TENSOR_PARALLEL else (OVER_DATA,):
        try:
            expert_modules(model, verified=False)
            halves = [copy.deepcopy(model) for _ in range(RANKS)]
            model.zero_grad()
            difference = compare(model, halves, _plan(model), form)
        except UsageError as error:
            return Result(model_type, "refused", str(error).removeprefix("expert_parallel_size: ").split(" (docs")[0])
        except Exception as error:
            return Result(model_type, "failed", f"over {form}: {type(error).__name__}: {_first_line(error)}")
        if difference:
            return Result(model_type, "failed", f"over {form}: {difference}")
    return Result(
        model_type, "passed", "" if model_type in accepted.TENSOR_PARALLEL else "only over data parallel ranks"
    )


def _has_router_losses(model: Any) -> bool:
    """Whether the unsharded model computes a loss with those of its routers; some fail where no layer has any."""
    try:
        return bool(model(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False).logits is not None)
    except (IndexError, TypeError, AttributeError):
        return False


def _plan(model: Any) -> dict[str, str]:
    """What the model's own plan says of modules and parameters that it has."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    there = [pattern for pattern in own_plan(model) if any(_means(pattern, name) for name in names)]
    return {p: style for p, style in own_plan(model).items() if p in there or parse_style(style).kind not in KINDS}


def _means(pattern: str, name: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name))


def _not_sharded(half: Any) -> str:
    """What a plan must shard, and did not: a model without shards is equal to itself. Empty if there is nothing."""
    layers = {name: each for name, each in half.named_parameters() if re.search(r"\.\d+\.", name)}
    if all(layout_of(each) is None for each in layers.values()):
        return "nothing is sharded"
    experts = [name for name, each in layers.items() if each.dim() == 3 and ".experts." in name]
    return next((f"{name} is not sharded" for name in experts if layout_of(layers[name]) is None), "")


def _whole(half: Any) -> str:
    """What the plan leaves whole, in words."""
    attention = [each for name, each in half.named_parameters() if ATTENTION.search(name) and each.dim() > 1]
    return "" if any(layout_of(each) is not None for each in attention) else "attention is whole on every rank"


def compare(
    model: Any,
    halves: list[Any],
    plan: dict[str, str],
    form: str = "",
    lengths: tuple[int, int] = (TOKENS, TOKENS),
    *,
    sequence: bool = False,
) -> str:
    """The difference between the model and its copies, which become its shards; empty if there is none. `form`: along
    which axis experts are divided; `lengths`: of the sequences of two data parallel ranks.

    A gradient that is a sum with cancellation is noise in float32, with the kernels of some processors more than with
    others'. Where one differs, float64 decides, also in code that asks for float32."""
    exact = _in_float64(copy.deepcopy(model))
    difference = _compare(model, halves, plan, form, lengths, sequence=sequence)
    if difference.startswith(GRADIENT):
        in_float64 = [copy.deepcopy(exact) for _ in range(RANKS)]
        with patch.object(Tensor, "float", Tensor.double):
            return difference if _compare(exact, in_float64, plan, form, lengths, sequence=sequence) else ""
    return difference


def _in_float64(model: Any) -> Any:
    """Grouped products of experts know no float64."""
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    return model.double()


def _compare(
    model: Any, halves: list[Any], plan: dict[str, str], form: str, lengths: tuple[int, int], *, sequence: bool
) -> str:
    tokens = torch.randint(3, SMALL["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(0))
    batches, shares = [tokens] * RANKS, [1.0]
    if form == OVER_DATA:
        batches = [row[None, :length] for row, length in zip(tokens, lengths, strict=True)]
        shares = [(length - 1) / (sum(lengths) - RANKS) for length in lengths]
    expected = [_run(model, batch, share) for batch, share in zip(batches, shares, strict=False)]
    expected *= RANKS // len(shares)
    slots: list[Any] = [None] * RANKS
    barrier = threading.Barrier(RANKS)
    found: list[Any] = [None] * RANKS
    errors: list[BaseException] = []

    def rank_runs(rank: int) -> None:
        try:
            runtime = EagerRuntime(torch.device("cpu"))
            context = Context(World(rank, RANKS, rank, RANKS), runtime, HostGroup(rank, RANKS))
            axis: Any = ThreadAxis(rank, slots, barrier)
            data = form == OVER_DATA
            axes: Any = {"dp": axis, "tp": NoCollectives()} if data else {"dp": NoCollectives(), "tp": axis}
            mesh = Mesh(
                context,
                RankGrid({name: each.size for name, each in axes.items()}),
                axes,
                expert_parallel_size=RANKS if form else 1,
                experts=(axis, NoCollectives()) if data else None,
            )
            parallelize(halves[rank], mesh, plan=plan, sequence_parallel=sequence)
            found[rank] = _run(halves[rank], batches[rank], shares[rank] if data else 1.0)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return _difference(model, halves, expected, found, shares)


def _run(model: Any, tokens: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Logits in evaluation, and the loss in training; adds a share of its gradients."""
    options = {"use_cache": False}
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, **options).logits
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    loss = model.train()(input_ids=tokens, labels=tokens, **options).loss
    (loss * share).backward()
    return logits, loss.detach()


def _difference(model: Any, halves: list[Any], expected: list[Any], found: list[Any], shares: list[float]) -> str:
    for rank in range(RANKS):
        for name, ours, theirs in zip(("logits", "loss"), found[rank], expected[rank], strict=True):
            if not _close(ours, theirs):
                return f"{name} differ by {_gap(ours, theirs)}"
    parameters = [dict(half.named_parameters()) for half in halves]
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for rank in range(RANKS):
            local = parameters[rank][name]
            replication = replication_of(local, RANKS)
            of_others = len(shares) > 1 and not replication.experts
            sources = parameters if replication.partial or of_others else [parameters[rank]]
            gradients = [each[name].grad for each in sources]
            if any(gradient is None for gradient in gradients):
                return f"{name} has no gradient"
            layout = layout_of(local)
            expected_gradient = parameter.grad
            if layout is not None:
                expected_gradient = local_shard(parameter.grad, layout, tuple(local.shape))
            if not _close(sum(gradients), expected_gradient, parameter.grad.abs().max()):
                return f"{GRADIENT} {name} differs by {_gap(sum(gradients), expected_gradient)}"
    return ""


def _close(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> bool:
    if ours.shape != theirs.shape:
        return False
    scale = theirs.abs().max() if scale is None else scale
    return bool((ours - theirs).abs().max() <= TOLERANCE * max(float(scale), 1e-6))


def _gap(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape: {list(ours.shape)}, not {list(theirs.shape)}"
    return f"{float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)):.1e} of the largest value"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def has_plan(model_type: str) -> bool:
    if model_type in PLANS:
        return True
    config = CONFIG_MAPPING[model_type]
    text = getattr(config, "sub_configs", {}).get("text_config")
    return bool(config.base_model_tp_plan or getattr(text, "base_model_tp_plan", None))


def has_experts(model_type: str) -> bool:
    """Whether transformers, or the tensor parallel plan, has experts with weights of three dims."""
    config = CONFIG_MAPPING[model_type]
    text = getattr(config, "sub_configs", {}).get("text_config")
    plans = [getattr(each, f"base_model_{axis}_plan", None) for each in (config, text) for axis in ("tp", "ep")]
    return any({"moe_tp_experts", "ep_dispatch_experts"} & set((plan or {}).values()) for plan in plans)


def write(results: list[Result], axis: str) -> None:
    """The table that docs/tables.md shows."""
    options = "--experts --write" if axis == "expert" else "--write"
    made_by = (
        f"`python scripts/architectures.py {options}` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.split('+')[0]}"
    )
    names = {"model_type": "model type", "verdict": "verdict", "why": "why"}
    names |= {"sequence": "sequence parallel"} if axis == "tensor" else {}
    rows = [{shown: getattr(each, name) for name, shown in names.items()} for each in results]
    write_table(f"{axis}-parallel", f"Model types and {axis} parallelism", made_by, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pipeline", action="store_true", help="verify pipeline stages")
    parser.add_argument("--experts", action="store_true", help="verify expert parallelism")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    accepted.SEQUENCE_PARALLEL = frozenset(CONFIG_MAPPING) - set(REFUSED)
    if arguments.pipeline:
        verify(arguments.only, write=arguments.write)
        return
    names = arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if arguments.experts and not arguments.only:
        names = [name for name in names if has_experts(name)]
    results = []
    for name in names:
        if arguments.experts:
            results.append(attempt_experts(name))
        else:
            results.append(attempt(name) if has_plan(name) else Result(name, "no plan"))
        print(f"{results[-1].verdict:10} {name:28} {results[-1].why:36} {results[-1].sequence}", flush=True)
    if arguments.write and arguments.experts:
        write(results, "expert")
        write_lists(expert_parallel=[each.model_type for each in results if each.verdict == "passed"])
    elif arguments.write:
        write(results, "tensor")
        write_lists(
            tensor_parallel=[each.model_type for each in results if each.verdict == "passed"],
            sequence_parallel=[each.model_type for each in results if each.sequence == "yes"],
        )


if __name__ == "__main__":
    main()
