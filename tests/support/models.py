"""Small transformers models for tests of parallelism, and their training on a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stepmark.config.full_sharding import FullSharding
from stepmark.parallel.parallelize import parallelize
from stepmark.runtime.context import Context, start
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from tests.support.programs import LENGTH, VOCABULARY, Blocks

ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, **ROUTERS},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, **ROUTERS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4, **ROUTERS},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Mixtures of experts: what their configurations have beside SHAPE."""

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def configuration(kind: str, **changes: Any) -> PreTrainedConfig:
    """`kind` is gpt2, llama, qwen3, gemma2, olmo2, bert (causal) or one of EXPERTS. Two layers, 4 heads (2
    key/value heads), a vocabulary of 67, which is prime."""
    if kind == "gpt2":
        drop = changes.pop("dropout", 0.0)
        drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
        return GPT2Config(
            n_layer=changes.pop("num_hidden_layers", 2), n_embd=32, n_head=4, n_positions=LENGTH,
            vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **{**drops, **changes},
        )  # fmt: skip
    if kind == "bert":
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {**SHAPE, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
        return BertConfig(is_decoder=True, **{**sizes, **drops, **changes})
    changes = {"num_key_value_heads": 2, **EXPERTS.get(kind, {}), **changes}
    if "dropout" in changes:
        changes["attention_dropout"] = changes.pop("dropout")
    if kind in ("qwen3", "gemma2"):
        changes.setdefault("head_dim", 8)
    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma2": Gemma2Config, "olmo2": Olmo2Config}
    make = kinds.get(kind) or CONFIG_MAPPING[kind]
    return make(**{**SHAPE, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **changes})


def build(kind: str, lora: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The model of that configuration, always with the same weights. Norms and biases are not just ones and zeros,
    which would hide mistakes. `lora`: the arguments of a LoraConfig; then it is a PeftModel."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or (not parameter.is_meta and parameter.isnan().any()):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model if lora is None else with_lora(model, lora)


def with_lora(model: Any, options: dict[str, Any]) -> Any:
    """The model with an adapter that is not zero, as a new one would be."""
    import peft

    defaults = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "fan_in_fan_out": model.config.model_type == "gpt2"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**defaults, **options}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return adapted


MODELS: list[Any] = []  # made before the replica threads start, which share one random generator


def train_on(context: Context, options: dict[str, Any]) -> list[list[float]]:
    """Loss, tokens, gradient norm, and the tokens of each expert, of each of `steps` steps; see `training` for the
    other options."""
    step, batches = training(context, options, MODELS.pop() if MODELS else build(**options["model"]))
    found: list[list[float]] = []
    for number, batch in zip(range(options.get("steps", 20)), batches, strict=False):
        with fit_for_a_compiler(context) if number == 1 else nullcontext():
            statistics = step(number, batch)
        found.append(numbers(context, statistics))
    return found


def numbers(context: Context, statistics: Any) -> list[float]:
    loads = statistics.expert_loads
    vectors = context.runtime.to_host([statistics.values, *([] if loads is None else [loads])])
    return [float(value) for vector in vectors for value in vector]


@contextmanager
def fit_for_a_compiler(context: Context) -> Iterator[None]:
    """Inside the block, no graph of a lazy device may have what a compiler for accelerators rejects."""
    if not context.runtime.lazy:
        yield
        return
    from stepmark.preflight.precompile.graph_text import GraphText
    from stepmark.runtime.xla import XlaRuntime, pending_graph

    assert isinstance(context.runtime, XlaRuntime)
    graphs: list[GraphText] = []

    def dispatch(run: Callable[[], None]) -> None:
        graphs.append(GraphText.read(pending_graph()))
        run()

    with context.runtime.dispatching(dispatch):
        yield
    assert sum(graph.operations for graph in graphs) > 100, "the step's graph was not seen"
    assert [problem for graph in graphs for problem in graph.problems] == []


def unshifted_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over all labels, the first of each row included."""
    return torch.nn.functional.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten())


unshifted_loss.causal_shift = False  # type: ignore[attr-defined]


def training(context: Context, options: dict[str, Any], model: Any) -> tuple[Any, Iterator[Any]]:
    """The step and its batches, epoch after epoch. `options`: tp, sequence, embedding, accumulation, bf16 (parameters),
    autocast, rounded (gradients sent in bf16),
    checkpointing, zero_1, fsdp (2: on so many replicas), smoothing, clip, batch (samples of a step, 4 by
    default); pp, schedule, chunks, layers; frozen (a pattern of names); unlabelled (steps in which no sample has a
    target), silent (samples without any); own_loss (of labels that are not shifted); optim (adamw_torch by default;
    "lamb" is no name of a recipe's), rate; bias_rate (of routers); ep (experts)."""
    from stepmark.data.loader.loader import DataLoader
    from stepmark.data.loader.prefetcher import DevicePrefetcher
    from stepmark.parallel.optimizer.named import NamedOptimizer
    from stepmark.parallel.optimizer.whole_parameters import WholeParameters
    from stepmark.training.model_options import enable_gradient_checkpointing
    from stepmark.training.optimizer import build_optimizer, parameter_kinds
    from stepmark.training.step import TrainStep
    from stepmark.training.weighted_loss import MicroBatchLoss
    from tests.support.whole_parameter_programs import Lamb

    tp, accumulation = options.get("tp", 1), options.get("accumulation", 1)
    pp, fsdp = options.get("pp", 1), options.get("fsdp")
    mesh = Mesh.create(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel_size=options.get("ep", 1), context=context
    )
    runtime, axis = mesh.runtime, mesh.data_parallel
    if options.get("bf16"):
        model.to(torch.bfloat16)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(options.get("frozen") is None or not re.search(options["frozen"], name))
    parallelize(
        model,
        mesh,
        sequence_parallel=options.get("sequence", False),
        parallelize_embedding=options.get("embedding", True),
        pipeline_layers=options.get("layers"),
        pipeline_chunks=options.get("chunks", 1),
        fsdp=FullSharding(replicas=fsdp) if isinstance(fsdp, int) and not isinstance(fsdp, bool) else fsdp,
    )
    if options.get("checkpointing"):
        enable_gradient_checkpointing(model, runtime)
    place_module(model, runtime)
    own = unshifted_loss if options.get("own_loss") else None
    smoothing = options.get("smoothing", 0.0)
    loss = MicroBatchLoss(model, lazy=runtime.lazy, label_smoothing=smoothing, compute_loss_func=own)
    optimizer: Any
    if options.get("optim") == "lamb":
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        groups = [{"params": named}]
        distribution = WholeParameters(groups, mesh, zero_1=options.get("zero_1", False))
        optimizer = NamedOptimizer(distribution, groups, Lamb, runtime)
    else:
        optimizer = build_optimizer(
            options.get("optim", "adamw_torch"),
            list(model.named_parameters()),
            runtime,
            kinds=parameter_kinds(model),
            decay=lambda name: "bias" not in name,
            weight_decay=0.1,
            learning_rate=options.get("rate", 1e-3),
            sharded_over=mesh if options.get("zero_1") else None,
            stages=context.host if pp > 1 else None,
            mesh=mesh,
        )
    clip = options.get("clip", 1.0)
    schedule = options.get("schedule", "1f1b")
    step = TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        accumulation=accumulation,
        max_grad_norm=clip,
        pipeline_schedule=schedule,
        autocast=torch.bfloat16 if options.get("autocast") else None,
        reduce_dtype=torch.bfloat16 if options.get("rounded") else torch.float32,
        router_bias_update_rate=options.get("bias_rate", 0.0),
    )
    data, size = Blocks(30), options.get("batch", 4)
    for number in options.get("unlabelled", ()):
        data.labels[number * size : (number + 1) * size] = -100
    for sample in options.get("silent", ()):
        data.labels[sample] = -100
    loader = DataLoader(
        data,
        size // axis.size // accumulation,
        shuffle=not {"unlabelled", "silent"} & set(options),
        rank=axis.rank,
        world_size=axis.size,
        accumulation=accumulation,
        fixed_shape=True,
        labels=loss.labels,
    )
    return step, (batch for _ in count() for batch in DevicePrefetcher(loader, runtime))


def cases(device: str, options: list[dict[str, Any]]) -> list[list[list[float]]]:
    """Several trainings, one after the other, in one launch. Muon's iteration, which torch runs in bfloat16 and which
    makes 1e-5 of a gradient's last bit, runs in float32."""
    context, found = start(device), []
    for each in options:
        with (
            patch.object(torch.Tensor, "bfloat16", torch.Tensor.float) if each.get("optim") == "muon" else nullcontext()
        ):
            found.append(train_on(context, each))
    return found


def embeddings(options: dict[str, Any]) -> dict[str, Any]:
    """The embedding that this rank holds after `steps` steps, as a checksum, and its names; None where it has none."""
    import xxhash

    step, batches = training(start("cpu"), options, build(**options["model"]))
    for number, batch in zip(range(options["steps"]), batches, strict=False):
        step(number, batch)
    held = {name: value for name, value in step.model.named_parameters() if "embed" in name or "wte" in name}
    digests = {name: xxhash.xxh3_64_hexdigest(value.detach().numpy().tobytes()) for name, value in held.items()}
    return {"held": digests, "shape": [list(value.shape) for value in held.values()]}


def state_bytes(cases: list[dict[str, Any]]) -> list[int]:
    """Bytes of optimizer state that this rank holds after a step of each case."""
    found = []
    for options in cases:
        step, batches = training(start("cpu"), options, build(**options["model"]))
        step(0, next(batches))
        found.append(step.optimizer.state_bytes())
    return found


def measured(context: Context, options: dict[str, Any], *, together: bool = False) -> dict[str, Any]:
    """`train_on`'s `values`; the `graphs` that this process has compiled after each step; how often this rank has
    executed one in each step (`executions`); and the `reads` of the lazy device that nobody has asked for: `together`
    with the other ranks, which are in this process, all during steps."""
    from stepmark.runtime.xla import XlaRuntime

    assert isinstance(context.runtime, XlaRuntime)
    step, batches = training(context, options, MODELS.pop() if MODELS else build(**options["model"]))
    values, graphs, executions, during = [], [], [], 0

    def transfers() -> int:
        """Of all ranks up to here, none of which goes on before the others are here."""
        context.host.all_gather(None)
        found = context.runtime.transfers_to_host()
        context.host.all_gather(None)
        return found

    for number, batch in zip(range(options["steps"]), batches, strict=False):
        executed: list[None] = []
        before = transfers()
        with context.runtime.dispatching(lambda run, to=executed: (to.append(None), run())):
            statistics = step(number, batch)
        executions.append(len(executed))
        during += transfers() - before
        values.append(numbers(context, statistics))
        graphs.append(context.runtime.counters().compilations)
    reads = during if together else context.runtime.transfers_to_host(own=False)
    return {"values": values, "graphs": graphs, "executions": executions, "reads": reads}


def measured_over_the_host(options: dict[str, Any]) -> dict[str, Any]:
    """In processes of XLA's CPU client."""
    return measured(start("xla"), options)


def measured_in_replica_threads(replicas: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """In replica threads, by rank; the graphs and reads are those of all of them."""
    from tests.support.replica_threads import run_replicas

    MODELS.extend(build(**options["model"]) for _ in range(replicas))
    return run_replicas(lambda context: measured(context, options, together=True), replicas)


def in_replica_threads(replicas: int, options: list[dict[str, Any]]) -> list[list[list[list[float]]]]:
    """The same in replica threads; by rank, then by case."""
    from tests.support.replica_threads import run_replicas

    results = []
    for each in options:
        MODELS.extend(build(**each["model"]) for _ in range(replicas))
        results.append(run_replicas(lambda context, each=each: train_on(context, each), replicas))
    return [[case[rank] for case in results] for rank in range(replicas)]
