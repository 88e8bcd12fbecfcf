"""Verifies pipeline stages for every causal language model of transformers, and records which types pass.

Each architecture is built with a small random configuration of 4 layers, and compared with itself in 2 and in 3 stages
and in 2 ranks of 2 stages each (pipeline_comparison.py). Run by `python scripts/architectures.py --pipeline`; results
go to docs/data/pipeline-parallel.json and src/stepmark/parallel/architectures.json.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from typing import Any

import torch
import transformers
from pipeline_comparison import difference, router_difference, tokens_for
from small_models import has_latent_attention, narrow_model, small_model
from tables import write_lists, write_table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stepmark.errors import UsageError
from stepmark.parallel import architectures
from stepmark.parallel.pipeline import stage_plan
from stepmark.parallel.pipeline.stage_plan import layers_of

LAYERS = 4
CUTS = ((2, 1), (3, 1), (2, 2))  # ranks, and stages of each
SECONDS = 60
IMPORTED_ONCE = ("llama", "gpt2", "qwen3_5_text", "mixtral")  # what most types import, before processes are forked
MORE: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}
ROUTERS = ", router losses"  # after what a layer returns
Row = tuple[str, str, str]  # model type, verdict, and why or what a layer returns


def attempt(kind: str) -> Row:
    """The verdict on one model type: passed, failed, refused or not built."""
    try:
        latent = has_latent_attention(kind)
        model = (narrow_model(kind, **MORE) if latent else small_model(kind, MORE)).train()
        for module in model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
        returns = _returns(model)
    except Exception as error:  # small values that the configuration rejects say nothing about stages
        return kind, "not built", _first_line(error)
    architectures.STAGES[kind] = returns
    try:
        for ranks, chunks in CUTS:
            model.zero_grad()
            found = difference(model, ranks, chunks)
            if found:
                return kind, "failed", found
    except UsageError as error:
        return kind, "refused", str(error).removeprefix("pipeline_parallel_size: ").removesuffix("; set it to 1")
    except Exception as error:
        return kind, "failed", f"{type(error).__name__}: {_first_line(error)}"
    return kind, "passed", returns + (ROUTERS if _has_router_losses(kind, model) else "")


def _has_router_losses(kind: str, model: Any) -> bool:
    """Whether the loss over the routers of all layers is the same in stages, where there is one."""
    if getattr(model.config.get_text_config(decoder=True), "output_router_logits", None) is None:
        return False
    before = architectures.ROUTER_LOSSES
    stage_plan.ROUTER_LOSSES = before | {kind}
    try:
        return not any(router_difference(model, ranks, chunks) for ranks, chunks in CUTS)
    except Exception:  # it has another form
        return False
    finally:
        stage_plan.ROUTER_LOSSES = before


def _returns(model: Any) -> str:
    """What the layers return, in the words of `StagePlan.returns`."""
    config = model.config.get_text_config(decoder=True)
    try:
        _, layers = layers_of(model, config.num_hidden_layers)
    except UsageError:
        return "tensor"  # which the comparison then reports
    outputs: list[Any] = []
    handle = layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    model(input_ids=tokens_for(config.vocab_size), use_cache=False)
    handle.remove()
    first = outputs[0]
    if isinstance(first, list):
        return "list"
    return f"tuple{len(first)}" if isinstance(first, tuple) else "tensor"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:140]


def in_a_process(kind: str) -> Row:
    """`attempt` in a forked process, which may crash or hang."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(attempt(kind), pipe)
        os._exit(0)
    os.close(write)
    content, deadline = b"", time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if select.select([read], [], [], 1.0)[0]:
            more = os.read(read, 1 << 16)
            if not more:
                break
            content += more
    else:
        os.kill(process, signal.SIGKILL)
    os.close(read)
    os.waitpid(process, 0)
    found: Row = pickle.loads(content) if content else (kind, "not built", f"ended, or took {SECONDS} s")
    return found


def write_rows(rows: list[Row]) -> None:
    """The table that docs/tables.md shows."""
    made_by = (
        f"`python scripts/architectures.py --pipeline --write` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.split('+')[0]}"
    )
    named = [
        {
            "model type": kind,
            "verdict": verdict,
            "router losses": "yes" if verdict == "passed" and why.endswith(ROUTERS) else "",
            "why": "" if verdict == "passed" else why,
        }
        for kind, verdict, why in rows
    ]
    write_table("pipeline-parallel", "Model types and pipeline stages", made_by, named)


def verify(names: list[str] | None, *, write: bool) -> None:
    """Tries the model types, all of them by default, and prints the results."""
    rows = []
    for kind in IMPORTED_ONCE:
        attempt(kind)
    for kind in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(in_a_process(kind))
        print(f"{rows[-1][1]:10} {kind:28} {rows[-1][2]}", flush=True)
    if write:
        write_rows(rows)
        passed = {kind: returns for kind, verdict, returns in rows if verdict == "passed"}
        write_lists(
            stages={kind: returns.removesuffix(ROUTERS) for kind, returns in passed.items()},
            router_losses=[kind for kind, returns in passed.items() if returns.endswith(ROUTERS)],
        )
