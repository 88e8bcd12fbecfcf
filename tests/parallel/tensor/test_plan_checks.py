"""Models that would train incorrectly without an error are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.tables import read_rows
from stepmark import TrainingArguments
from stepmark.errors import UsageError
from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.parallel.architectures import SEQUENCE_PARALLEL, TENSOR_PARALLEL
from stepmark.parallel.optimizer.whole_parameters import WholeParameters
from stepmark.parallel.parallelize import parallelize
from stepmark.parallel.tensor.plans import ADDED, PLANS, check_plan, plan_of
from stepmark.parallel.tensor.sequence import REFUSED, sequence_stacks
from stepmark.runtime.collectives import NoCollectives
from stepmark.runtime.context import Context
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import Mesh, check_sizes
from stepmark.runtime.rank_grid import RankGrid
from tests.support.models import SHAPE, build


def check(model: Any, plan: dict[str, str] | None = None) -> None:
    check_plan(model, plan_of(model, plan), [model.get_input_embeddings(), model.get_output_embeddings()])


def two_ranks() -> Mesh:
    """The first of two ranks; the checks come before anything is sent."""
    context = Context(World(0, 2, 0, 2), EagerRuntime(torch.device("cpu")), HostGroup(0, 2))
    axes: Any = {"dp": NoCollectives(), "tp": SimpleNamespace(rank=0, size=2)}
    return Mesh(context, RankGrid({"dp": 1, "tp": 2}), axes)


def four_ranks(experts: int, tensor: int = 1) -> Mesh:
    """The first of four ranks that divide experts, some of them along the data parallel axis."""
    context = Context(World(0, 4, 0, 4), EagerRuntime(torch.device("cpu")), HostGroup(0, 4))
    axes: Any = {"dp": NoCollectives(), "tp": NoCollectives()}
    axes["dp"].size, axes["tp"].size = 4 // tensor, tensor
    others = NoCollectives(), NoCollectives()
    others[0].size = experts // tensor
    grid = RankGrid({"dp": 4 // tensor, "tp": tensor})
    return Mesh(context, grid, axes, expert_parallel_size=experts, experts=others)


def of_type(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **{**SHAPE, "vocab_size": 67, **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_additional_modules_and_parameters() -> None:
    model = build("llama")
    model.model.layers[1].mlp.scale = nn.LayerNorm(48)
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.scale\.weight"):
        check(model)
    model.model.layers[1].mlp.scale = None
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UsageError, match=r"model\.layers\.0\.self_attn\.sinks"):
        check(model)


@pytest.mark.parametrize(
    "change", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "lm_head"])
def test_weights_that_are_computed(change: Any, name: str) -> None:
    model = build("llama")
    change(model.get_submodule(name))
    with pytest.raises(UsageError, match=f"^tensor_parallel_size: the weight of {name} is computed from other param"):
        parallelize(model, two_ranks())


def test_a_custom_plan_can_name_them() -> None:
    model = build("llama")
    model.model.layers[1].mlp.scale = nn.LayerNorm(48)
    check(model, {**model.tp_plan, "model.layers.1.mlp.scale": "replicated_with_grad_allreduce"})


def test_latent_attention_is_refused_under_plans_that_forget_its_rotary_part() -> None:
    model = of_type("deepseek_v3", first_k_dense_replace=2, num_key_value_heads=4)
    check(model)
    plan = {"model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    with pytest.raises(UsageError, match=r"kv_a_proj_with_mqa computes keys that all heads share"):
        check(model, plan)


EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
}
SUM = {"model.layers.*.mlp.experts": "moe_tp_experts"}


def mixture(**changes: Any) -> Any:
    return of_type("mixtral", num_local_experts=4, **changes)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"model.layers.*.mlp.experts.down_proj": "rowwise", **SUM}, r"does not mention .*\.experts\.gate_up_proj"),
        (SUM, r"model\.layers\.0\.mlp\.experts has the style moe_tp_experts, but none of its parameters"),
        (EXPERTS, r"parameters of model\.layers\.0\.mlp\.experts are sharded, but it does not have the style"),
    ],
    ids=["half of the weights", "no weights", "outputs are not summed"],
)
def test_plans_of_experts_that_would_give_other_outputs(plan: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parallelize(mixture(), two_ranks(), plan=plan)


def test_experts_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"experts\.gate_up_proj, \[4, 18, 32\].* cannot be split into 2 equal shards"):
        parallelize(mixture(intermediate_size=9), two_ranks())
    with pytest.raises(UsageError, match=r"would be 9 wide on each rank.* multiple of 4"):
        parallelize(mixture(intermediate_size=18), two_ranks())
    model = mixture()
    monkeypatch.setattr(model.model.layers[1].mlp.experts, "has_post_expert_norm", True)
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.experts norms each expert's output"):
        parallelize(model, two_ranks())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_adapters_of_experts_are_refused() -> None:
    import peft

    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(UsageError, match=r"mlp\.experts has an adapter of type lora\.ParamWrapper"):
        parallelize(peft.get_peft_model(mixture(), adapter), two_ranks())


def test_latent_heads_that_do_not_divide() -> None:
    model = of_type(
        "deepseek_v2", hidden_size=36, num_attention_heads=3, num_key_value_heads=3, first_k_dense_replace=2
    )
    with pytest.raises(UsageError, match=r"self_attn has 3 heads .* which 2 ranks cannot share equally"):
        parallelize(model, two_ranks())


def test_types_that_were_not_verified_need_a_custom_plan() -> None:
    model = build("llama")
    model.config.model_type = "llama_like"
    with pytest.raises(UsageError, match="llama_like is not among the architectures"):
        check(model)
    check(model, model.tp_plan)


def test_the_table_lists_the_accepted_types() -> None:
    rows = read_rows("tensor-parallel")
    assert {row["model type"] for row in rows if row["verdict"] == "passed"} == TENSOR_PARALLEL
    assert {*PLANS, *ADDED} <= TENSOR_PARALLEL
    along = {row["model type"]: row["sequence parallel"] for row in rows if row["sequence parallel"]}
    assert {kind for kind, said in along.items() if said == "yes"} == SEQUENCE_PARALLEL
    assert {kind: said for kind, said in along.items() if said != "yes"} == REFUSED


def test_layers_whose_sequence_cannot_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"sequence_parallel: hy_v4 is not supported: .*residual streams"):
        parallelize(of_type("hy_v4", pad_token_id=0), two_ranks(), sequence_parallel=True)
    model = build("llama")
    model.config.model_type = "llama_like"
    with pytest.raises(UsageError, match=r"sequence_parallel: llama_like is not supported: .* verified"):
        parallelize(model, two_ranks(), sequence_parallel=True, plan=model.tp_plan)
    model = build("llama")
    model.model.layers[1].up_proj = nn.Linear(32, 64)
    plan = {**model.tp_plan, "model.layers.*.up_proj": "colwise"}
    with pytest.raises(UsageError, match=r"model\.layers\.1\.up_proj is sharded in no block of its layer"):
        parallelize(model, two_ranks(), sequence_parallel=True, plan=plan)


class OverTheSequence(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(1, keepdim=True)


def test_what_mixes_tokens_gets_all_of_them() -> None:
    """Whatever its name says."""
    model = build("llama")
    model.model.layers[0].post_attention_layernorm = OverTheSequence()
    model.model.layers[1].dropout = nn.Dropout(0.1)
    (stack,) = sequence_stacks(model, plan_of(model))
    blocks = {block.name.removeprefix("model.layers."): (block.partial, block.scatters) for block in stack.blocks}
    whole = {"0.post_attention_layernorm": (False, False)}
    assert blocks == whole | {f"{layer}.{name}": (True, True) for layer in (0, 1) for name in ("self_attn", "mlp")}
    assert stack.last is model.model.norm


EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("llama", {}, "llama has no experts"),
    "other experts": ("llama4_text", {"head_dim": 8, "intermediate_size_mlp": 48}, "llama4_text has no experts that"),
    "number": ("mixtral", {"num_local_experts": 6}, r"mlp\.experts has 6 experts, which 4 ranks"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_that_cannot_be_divided(case: str) -> None:
    kind, changes, why = EXPERTS[case]
    model = of_type(kind, **changes)
    shapes = [each.shape for each in model.parameters()]
    with pytest.raises(UsageError, match=f"^expert_parallel_size: .*{why}"):
        parallelize(model, four_ranks(4))
    assert [each.shape for each in model.parameters()] == shapes


def test_experts_of_types_that_were_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom plan says that the user has compared them."""
    monkeypatch.setattr("stepmark.parallel.tensor.expert_parallel.EXPERT_PARALLEL", frozenset())
    with pytest.raises(UsageError, match="mixtral was not compared with one rank"):
        parallelize(of_type("mixtral"), four_ranks(4))
    assert parallelize(of_type("mixtral"), four_ranks(4), plan={}).model.layers[0].mlp.experts.num_experts == 2


def test_experts_with_more_parameters_than_their_own() -> None:
    model = of_type("mixtral")
    model.model.layers[1].mlp.experts.norm = nn.LayerNorm(32)
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.experts\.norm\.weight is not divided by experts"):
        parallelize(model, four_ranks(4))
    with pytest.raises(UsageError, match="^fsdp and expert_parallel_size: "):
        parallelize(of_type("mixtral"), four_ranks(4), fsdp=True)


def test_optimizers_that_use_whole_parameters_and_divided_experts() -> None:
    mesh = four_ranks(4)
    model = parallelize(of_type("mixtral"), mesh)
    with pytest.raises(UsageError, match="^expert_parallel_size: data parallel ranks hold different experts of"):
        WholeParameters([{"params": list(model.named_parameters())}], mesh)
    with pytest.raises(UsageError, match="^expert_parallel_size and optim: adafactor"):
        TrainingArguments(optim="adafactor", expert_parallel_size=4, tensor_parallel_size=2)
    TrainingArguments(optim="adafactor", expert_parallel_size=2, tensor_parallel_size=2)
    for option in ({"fsdp": True}, {"torch_compile": True}, {"sample_prompts": ["a"], "eval_strategy": "epoch"}):
        with pytest.raises(UsageError, match=f"^{next(iter(option))} and expert_parallel_size: "):
            TrainingArguments(**option, expert_parallel_size=2)


@pytest.mark.parametrize(("ranks", "tensor", "pipeline", "experts"), [(4, 1, 1, 3), (4, 2, 2, 4), (6, 2, 1, 4)])
def test_expert_parallel_sizes_that_do_not_divide(ranks: int, tensor: int, pipeline: int, experts: int) -> None:
    with pytest.raises(UsageError, match=f"^expert_parallel_size: {experts} does not divide the"):
        check_sizes(ranks, tensor, pipeline, experts)
