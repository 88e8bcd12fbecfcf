"""Optimizers over named parameters: master weights, weight decay, and state by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, ResNetConfig, SwinConfig, T5Config
from transformers import Trainer as TransformersTrainer
from transformers import TrainingArguments as TransformersArguments
from transformers.optimization import Adafactor, AdafactorSchedule

from stepmark import Checkpointer, Mesh, Trainer, TrainingArguments, ZeroRedundancyOptimizer
from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import UsageError
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.runtime.eager import EagerRuntime
from stepmark.sharding.layout import Layout, annotate
from stepmark.training.optimizer import build_optimizer, check_step, decays_by_default, wrap_optimizer
from tests.support.models import build
from tests.support.programs import Blocks, tiny_model
from tests.trainer.test_training_loop import StopsAt

CPU = EagerRuntime(torch.device("cpu"))
T5 = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 32}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}

# Master weights


def bf16_optimizer(name: str, **options: Any) -> tuple[nn.Linear, NamedOptimizer]:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).to(torch.bfloat16)
    return module, build_optimizer(name, list(module.named_parameters()), CPU, options=options, learning_rate=1e-3)


def test_updates_too_small_for_bf16_add_up_in_the_master_weights() -> None:
    module, optimizer = bf16_optimizer("sgd")
    start = module.weight.detach().float().clone()
    tiny = torch.full((8, 8), 1e-2)  # a step of 1e-5: below bf16's spacing of about 4e-3 near 1
    for step in range(2000):
        optimizer.set_gradients([tiny, None])
        optimizer.step()
        if step == 0:
            largest = start.abs() > 0.2
            assert torch.equal(module.weight.detach().float()[largest], start[largest])
    torch.testing.assert_close(module.weight.detach().float(), start - 2e-2, rtol=1e-2, atol=1e-3)
    master = optimizer.named_state()["weight"][MASTER]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, start - 2e-2, rtol=1e-4, atol=1e-5)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "init": lambda weight: nn.init.constant_(weight, 0.5),
    "data": lambda weight: weight.data.fill_(0.5),
    "element by element": lambda weight: [weight.data[row].fill_(0.5) for row in range(len(weight))],
    "detached": lambda weight: weight.detach().copy_(torch.full_like(weight, 0.5)),
    "new data": lambda weight: setattr(weight, "data", torch.full_like(weight, 0.5)),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_masters_follow_parameters_that_the_script_writes(write: str) -> None:
    module, optimizer = bf16_optimizer("sgd")
    for _ in range(3):
        optimizer.set_gradients([torch.full((8, 8), 1e-2), torch.full((8,), 1e-2, dtype=torch.bfloat16)])
        optimizer.step()
    kept = optimizer.named_state()["bias"][MASTER].detach().clone()
    assert not torch.equal(kept, kept.to(torch.bfloat16).float())
    WRITES[write](module.weight)
    optimizer.set_gradients([torch.zeros(8, 8), None])
    optimizer.step()
    assert torch.equal(module.weight, torch.full((8, 8), 0.5, dtype=torch.bfloat16))
    assert torch.equal(optimizer.named_state()["bias"][MASTER], kept)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_bf16_parameters_are_their_masters_rounded(name: str) -> None:
    module, optimizer = bf16_optimizer(name)
    kept = list(module.parameters())
    for _ in range(3):
        optimizer.set_gradients([torch.randn(8, 8), torch.randn(8).to(torch.bfloat16)])
        optimizer.step()
    state = optimizer.named_state()
    for key, parameter in module.named_parameters():
        assert any(parameter is each for each in kept)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), state[key][MASTER].to(torch.bfloat16))
        states = [value for value in state[key].values() if isinstance(value, Tensor) and value.dim()]
        assert all(value.dtype == torch.float32 for value in states)


def test_fp32_parameters_have_no_copy() -> None:
    module = nn.Linear(2, 2)
    optimizer = build_optimizer("adamw_torch", list(module.named_parameters()), CPU)
    assert [group["params"][0] is module.weight for group in optimizer.param_groups] == [True]
    assert MASTER not in optimizer.named_state()["weight"]


# Building


def test_decay_applies_to_the_accepted_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].bias.requires_grad = False
    optimizer = build_optimizer(
        "adamw_torch", list(module.named_parameters()), CPU, decay=decays_by_default(module), weight_decay=0.3
    )
    decays = {name: group["weight_decay"] for group in optimizer.named_groups() for name in group["params"]}
    assert decays == {"0.weight": 0.3, "1.weight": 0.0, "1.bias": 0.0}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox", "bert", "gemma3_text", "olmo2", "mixtral"])
def test_decay_by_default_is_that_of_transformers(name: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "vocab_size": 32, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **more, is_decoder=True))
    decays = decays_by_default(model)
    ours = {key for key, _ in model.named_parameters() if decays(key)}
    theirs = set(TransformersTrainer.get_decay_parameter_names(None, model))
    assert ours == theirs & {key for key, _ in model.named_parameters()}
    assert ours
    assert len(ours) < len(list(model.named_parameters()))


@pytest.mark.parametrize(
    ("config", "spared"),
    [
        (T5Config(**T5), "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        (SwinConfig(**SWIN), "encoder.layers.0.blocks.0.attention.relative_position_bias.relative_position_bias_table"),
        (ResNetConfig(**RESNET), "embedder.embedder.normalization.bias"),
    ],
    ids=["t5", "swin", "resnet"],
)
def test_decay_by_default_spares_what_is_named_a_bias_and_no_batch_norm(config: Any, spared: str) -> None:
    model = AutoModel.from_config(config)
    decays = decays_by_default(model)
    names = [name for name, _ in model.named_parameters()]
    assert spared in names
    assert not decays(spared)
    assert {name for name in names if decays(name)} == set(
        TransformersTrainer.get_decay_parameter_names(None, model)
    ) & {*names}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("adafacto", {}, "optim: 'adafacto' is not supported; choose one of adamw_torch"),
        ("sgd", {"momentun": 0.9}, "optim_args: sgd does not accept {'momentun': 0.9}: .*momentun"),
        ("adafactor", {"clip": 1.0}, "optim_args: adafactor does not accept {'clip': 1.0}: "),
        ("sgd", {"nesterov": True}, "optim_args: sgd does not accept .*Nesterov"),
        ("adamw_torch", {"foreach": True, "fused": True}, "optim_args: adamw_torch does not accept"),
    ],
)
def test_unknown_names_and_options(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_optimizer(name, list(nn.Linear(2, 2).named_parameters()), CPU, options=options)


def test_options_reach_the_optimizer() -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    sgd = build_optimizer("sgd", named, CPU, options={"momentum": 0.9, "nesterov": True}, learning_rate=0.5)
    assert isinstance(sgd.inner, torch.optim.SGD)
    (group,) = sgd.param_groups
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, True, 0.5)
    adamw = build_optimizer("adamw_torch_fused", named, CPU, betas=(0.1, 0.2), epsilon=1e-3)
    (group,) = adamw.param_groups
    assert (group["betas"], group["eps"], group["fused"]) == ((0.1, 0.2), 1e-3, True)


def test_around_an_optimizer_of_the_users() -> None:
    module = nn.Linear(2, 2)
    names = {parameter: name for name, parameter in module.named_parameters()}
    given = torch.optim.RMSprop([{"params": [module.bias]}, {"params": [module.weight], "lr": 0.5}])
    optimizer = wrap_optimizer(given, names, Mesh.create(device="cpu"))
    assert optimizer.inner is given
    assert optimizer.names == ["weight", "bias"]  # the model's order, whatever the groups' is
    optimizer.set_gradients([torch.ones(2, 2), torch.ones(2)])
    optimizer.step()
    assert set(optimizer.named_state()["weight"]) == {"step", "square_avg"}
    with pytest.raises(UsageError, match="a parameter that is not in the model"):
        wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), names, Mesh.create(device="cpu"))


def sharded_linear() -> tuple[nn.Module, dict[nn.Parameter, str]]:
    module = nn.Linear(4, 2)
    annotate(module.weight, Layout.box((4, 4), (0, 0), (2, 4)))
    return module, {parameter: name for name, parameter in module.named_parameters()}


class Undeclared(torch.optim.SGD):
    """A class of the user's that does not say what it needs."""


def test_what_cannot_get_whole_parameters_is_refused_where_they_are_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    module, names = sharded_linear()
    mesh = Mesh.create(device="cpu")
    assert isinstance(wrap_optimizer(torch.optim.AdamW(module.parameters()), names, mesh).distribution, Replicated)
    with pytest.raises(
        UsageError, match="tensor_parallel_size: it is unknown what Undeclared .* or `elementwise = True`"
    ):
        wrap_optimizer(Undeclared(module.parameters()), names, mesh)
    with pytest.raises(UsageError, match="optimizers: SparseAdam takes no dense gradients"):
        wrap_optimizer(torch.optim.SparseAdam(list(module.parameters())), names, mesh)
    stateful = Adafactor(module.parameters())
    stateful.state[module.weight]["step"] = 1
    with pytest.raises(UsageError, match="optimizers: Adafactor has a state of weight already"):
        wrap_optimizer(stateful, names, mesh)
    with pytest.raises(UsageError, match="mesh: adafactor uses whole parameters"):
        build_optimizer("adafactor", list(module.named_parameters()), CPU)
    monkeypatch.setattr(type(mesh.runtime), "lazy", True)
    words = "optimizers: Adafactor uses complete parameters, and tensor parallelism shards weight; on cpu set"
    with pytest.raises(UsageError, match=words):
        wrap_optimizer(Adafactor(module.parameters()), names, mesh)


def test_lazy_devices_divide_no_whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh.create(device="cpu")
    monkeypatch.setattr(type(mesh.runtime), "lazy", True)
    with pytest.raises(UsageError, match="zero_1: Adafactor uses complete parameters, .* and the ranks of cpu run one"):
        ZeroRedundancyOptimizer(nn.Linear(4, 2).named_parameters(), Adafactor, mesh=mesh)


# State


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_can_be_made_before_the_first_step(name: str, dtype: torch.dtype) -> None:
    module = nn.Linear(3, 3).to(dtype)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = build_optimizer(
        name, list(module.named_parameters()), CPU, options=options, weight_decay=0.1, learning_rate=0.1
    )
    optimizer.ensure_state()
    made = {key: set(state) for key, state in optimizer.named_state().items()}
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert module.weight.grad is None
    objects = {key: dict(state) for key, state in optimizer.named_state().items()}
    optimizer.ensure_state()
    optimizer.set_gradients([torch.ones(3, 3), torch.ones(3)])
    optimizer.step()
    assert {key: set(state) for key, state in optimizer.named_state().items()} == made
    for key, state in optimizer.named_state().items():
        held = [part for part in state if part not in (MASTER, "RMS") and isinstance(state[part], Tensor)]
        assert held
        assert all(objects[key][part] is state[part] for part in held)


def test_adafactor_is_that_of_transformers_with_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    model, expected = build("gpt2"), build("gpt2")
    args = TrainingArguments(
        output_dir=str(tmp_path), optim="adafactor", optim_args="clip_threshold=0.5", weight_decay=0.1, max_steps=3,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0, per_device_train_batch_size=2,
        save_strategy="no", disable_tqdm=True, device="cpu",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Blocks(6))
    batches: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, __, given: batches.append(given), with_kwargs=True)
    trainer.train()
    hook.remove()
    assert len(batches) == 3
    decays = decays_by_default(expected)
    groups = [
        {"params": [each for name, each in expected.named_parameters() if decays(name) == kind], "weight_decay": decay}
        for kind, decay in ((True, 0.1), (False, 0.0))
    ]
    theirs = Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False, clip_threshold=0.5)
    for batch in batches:
        expected(**batch).loss.backward()
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


class Counting(torch.optim.Optimizer):
    """Keeps plain values: of each parameter its steps, and of a group their number and the sum of the rates. The update
    depends on all of them, and on every element alone."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "rates": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["rates"] += group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                rate = group["lr"] / (state["step"] + group["count"] + group["rates"])
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad.sign())


class Remembers(Counting):
    """Also counts in an attribute, which its state dict has under another name; and in one that it lacks."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.count = self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count, self.calls = self.count + 1, self.calls + 1
        for group in self.param_groups:
            group["rates"] += self.count
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["steps"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


@pytest.mark.parametrize("own", [Counting, Remembers])
@pytest.mark.parametrize("saved_by", ["zero", "torch"])
@pytest.mark.parametrize("restored_by", ["zero", "torch"])
def test_plain_values_pass_between_optimizers_with_and_without_zero_1(
    tmp_path: Path, saved_by: str, restored_by: str, own: Any
) -> None:
    def make(kind: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        if kind == "torch":
            return model, own(model.parameters())
        return model, ZeroRedundancyOptimizer(model.named_parameters(), own, mesh=Mesh.create(device="cpu"))

    def train(model: nn.Module, optimizer: Any, steps: int) -> None:
        for step in range(steps):
            model(torch.full((4, 3), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(saved_by)
    train(model, optimizer, 3)
    other, resumed = make(restored_by)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"model": model, "optimizer": optimizer}).wait()
        checkpointer.restore({"model": other, "optimizer": resumed})
    assert getattr(getattr(resumed, "inner", resumed), "calls", 0) == 0  # also where a step has made the state
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]


class Rates:
    """The rates with which Adafactor made its steps, as its update computes them."""

    def __init__(self, optimizer: Adafactor) -> None:
        self.of_step: dict[int, float] = {}
        kept = optimizer._get_lr

        def get_lr(group: Any, state: Any) -> Any:
            self.of_step.setdefault(state["step"], float(kept(group, state)))
            return kept(group, state)

        optimizer._get_lr = get_lr


@pytest.mark.parametrize(("scaled", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_rates_that_adafactor_chooses_are_logged_and_saved(tmp_path: Path, scaled: bool, dtype: str) -> None:
    def made(**options: Any) -> tuple[Trainer, Rates]:
        model = build("gpt2")
        own = Adafactor(model.parameters(), lr=None, warmup_init=True, relative_step=True, scale_parameter=scaled)
        rates = Rates(own)
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, logging_steps=1, save_steps=2, disable_tqdm=True, device="cpu",
            per_device_train_batch_size=2, dtype=dtype, **options,
        )  # fmt: skip
        return Trainer(model, args, train_dataset=Blocks(8), optimizers=(own, AdafactorSchedule(own))), rates

    first, rates = made()
    first.train()
    logged = {log["step"]: log["learning_rate"] for log in first.state.log_history if "learning_rate" in log}
    assert logged == pytest.approx(rates.of_step)
    assert len(set(logged.values())) == 4
    assert min(logged.values()) > 0
    assert float(first.get_learning_rates()[0]) == pytest.approx(logged[4])
    again, rates = made(ignore_data_skip=False)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = {log["step"]: log["learning_rate"] for log in again.state.log_history if "learning_rate" in log}
    assert resumed == pytest.approx(logged)
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "option", "field"),
    [
        ("adamw_torch", "lr=3", "learning_rate"),
        ("sgd", "momentum=0.9,learning_rate=3", "learning_rate"),
        ("muon", "weight_decay=0.1", "weight_decay"),
        ("adafactor", '{"lr": 1}', "learning_rate"),
        ("adamw_torch_fused", '{"betas": [0.8, 0.9]}', "adam_beta1"),
        ("adamw_torch", "eps=1e-5", "adam_epsilon"),
    ],
)
def test_an_option_that_is_a_field_is_refused(name: str, option: str, field: str) -> None:
    with pytest.raises(UsageError, match=f"^optim_args: .*{field}"):
        TrainingArguments(optim=name, optim_args=option)


def test_adafactor_has_an_eps_of_its_own() -> None:
    args = TrainingArguments(optim="adafactor", optim_args='{"eps": [1e-30, 1e-2]}')
    made = build_optimizer(
        "adafactor", list(nn.Linear(2, 2).named_parameters()), CPU, options=args.parsed_options("optim_args")
    )
    assert made.param_groups[0]["eps"] == [1e-30, 1e-2]


# Closures


class Asserts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "two passes"
        return super().step(closure)


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("two passes")
        return super().step(closure)


class Forwards(torch.optim.SGD):
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        return super().step(*arguments, **keywords)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Asserts, Raises])
@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_optimizers_that_need_a_closure_are_refused_when_the_trainer_is_made(
    tmp_path: Path, kind: Any, way: str
) -> None:
    model, args = tiny_model(), TrainingArguments(str(tmp_path), device="cpu")
    given: Any = (kind(model.parameters()), None) if way == "optimizers" else (kind, {})
    with pytest.raises(UsageError, match=rf"^optimizers: {kind.__name__}\.step needs a closure"):
        Trainer(model, args, train_dataset=Blocks(8), **{way: given})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Forwards, Counting, Adafactor])
def test_a_closure_that_may_be_left_out_is_no_reason_to_refuse(kind: Any) -> None:
    check_step(kind)


# What is clipped


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_norm_is_that_of_the_models_gradients_as_in_transformers(tmp_path: Path, accumulation: int) -> None:
    """Also of those that are trained by no optimizer: here all but the last layer norm's."""
    data, norms = Blocks(16, ragged=False), []
    data.labels[:, 0] = -100  # which transformers would count
    for kind, arguments in ((Trainer, TrainingArguments), (TransformersTrainer, TransformersArguments)):
        model = tiny_model(0.0)
        args = arguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=2, disable_tqdm=True,
            save_strategy="no", gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
            lr_scheduler_type="constant", max_grad_norm=0.5, report_to="none", use_cpu=True,
        )  # fmt: skip
        own = (torch.optim.SGD(model.transformer.ln_f.parameters(), lr=0.5), None)
        trainer = kind(model, args, train_dataset=data, optimizers=own)
        trainer.train()
        logged = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        norms.append([*logged, *model.transformer.ln_f.weight.tolist()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class Calls(torch.optim.AdamW):
    """Notes the calls of its methods."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        self.calls: list[str] = []

    def step(self, closure: Any = None) -> Any:
        self.calls.append("step")
        return super().step(closure)


def test_resuming_never_calls_the_step_of_a_users_optimizer(tmp_path: Path) -> None:
    def run(*callbacks: Any) -> list[str]:
        model = tiny_model()
        args = TrainingArguments(str(tmp_path), device="cpu", max_steps=4, save_steps=2, disable_tqdm=True)
        own = Calls(model.parameters())
        trainer = Trainer(model, args, train_dataset=Blocks(80), optimizers=(own, None), callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=True)
        return own.calls

    assert run(StopsAt(2)) == ["step"] * 2
    assert run() == ["step"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_1_has_the_states_of_parameters_without_elements(dtype: torch.dtype) -> None:
    """As without it, so that a run goes on with either."""
    mesh, states = Mesh.create(device="cpu"), []
    for over in (None, mesh):
        parameters = [
            (name, nn.Parameter(torch.ones(shape, dtype=dtype))) for name, shape in {"a": 3, "b": (0, 5)}.items()
        ]
        optimizer = build_optimizer("adamw_torch", parameters, mesh.runtime, sharded_over=over)
        optimizer.ensure_state()
        states.append({name: sorted(state) for name, state in optimizer.named_state().items()})
    assert states[0] == states[1]
