"""AdamW with a state of 8 bits: what the state is, and that no bit of it is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from stepmark.parallel.optimizer.distribute import sharding_unit
from stepmark.parallel.optimizer.own_classes import adamw_8bit_class
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.runtime.eager import EagerRuntime
from stepmark.training.optimizer import ParameterKinds, build_optimizer, parameter_kinds
from tests.support.programs import Blocks, tiny_model
from tests.trainer.test_training_loop import StopsAt

bitsandbytes = pytest.importorskip("bitsandbytes")

CPU = EagerRuntime(torch.device("cpu"))
FLOAT32, UINT8 = torch.float32, torch.uint8


def trainer(folder: Path, *callbacks: Any, given: bool = False, **options: Any) -> Trainer:
    """Small states have 32 bits, the others 8, but those of embeddings; with `given`, of embeddings as well."""
    named = {} if given else {"optim": "adamw_8bit", "optim_args": "min_8bit_size=2048"}
    args = TrainingArguments(
        output_dir=str(folder), max_steps=6, learning_rate=1e-2, save_steps=3, per_device_train_batch_size=2,
        disable_tqdm=True, device="cpu", resume_from_checkpoint=True, weight_decay=0.1, **named, **options,
    )  # fmt: skip
    model = tiny_model().to(getattr(torch, args.dtype))
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=2048) if given else None
    return Trainer(model, args, train_dataset=Blocks(12), callbacks=list(callbacks), optimizers=(optimizer, None))


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[each] for group in optimizer.param_groups for each in group["params"]]


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"given": True}], ids=["fp32", "bf16", "given"])
def test_a_stopped_run_is_resumed_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(folder: str, *callbacks: Any) -> Trainer:
        made = trainer(tmp_path / folder, *callbacks, **options)
        made.train()
        return made

    whole = run("whole")
    run("parts", StopsAt(3))
    resumed = run("parts")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.optimizer is not None
    assert resumed.optimizer is not None
    found = states(whole.optimizer)
    assert {state["state1"].dtype for state in found} == {FLOAT32, UINT8}
    for one, other in zip(found, states(resumed.optimizer), strict=True):
        assert one["step"] == 6
        assert one.keys() == other.keys()
        assert all(equal(one[key], other[key]) for key in one), one.keys()


def test_embeddings_keep_32_bits_as_in_transformers() -> None:
    model = tiny_model()
    optimizer = build_optimizer(
        "adamw_bnb_8bit", list(model.named_parameters()), CPU, kinds=parameter_kinds(model),
        options={"min_8bit_size": 512}, betas=(0.8, 0.9), epsilon=1e-5, weight_decay=0.3, learning_rate=0.1,
    )  # fmt: skip
    optimizer.ensure_state()
    assert isinstance(optimizer.distribution, Replicated)
    dtypes = {name: state["state1"].dtype for name, state in optimizer.named_state().items()}
    large = {name for name, each in model.named_parameters() if each.numel() >= 512}
    assert {name for name, dtype in dtypes.items() if dtype == UINT8} == large - {
        "transformer.wte.weight", "transformer.wpe.weight",
    }  # fmt: skip
    (group, *_) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"], group["lr"]) == ((0.8, 0.9), 1e-5, 0.3, 0.1)


def test_the_update_is_that_of_bitsandbytes() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(80, 80), nn.Linear(80, 80)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(
        "adamw_8bit", list(ours.named_parameters()), CPU, kinds=ParameterKinds(), learning_rate=1e-2, weight_decay=0.1
    )
    reference = bitsandbytes.optim.AdamW8bit(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        gradients = [torch.randn(80, 80), torch.randn(80)]
        optimizer.set_gradients([each.clone() for each in gradients])
        optimizer.step()
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_options_that_it_does_not_have_are_named() -> None:
    with pytest.raises(UsageError, match="optim_args: adamw_8bit does not accept {'amsgrad': True}"):
        build_optimizer("adamw_8bit", list(nn.Linear(2, 2).named_parameters()), CPU, options={"amsgrad": True})


def test_a_lazy_device_is_refused() -> None:
    lazy: Any = SimpleNamespace(lazy=True, name="xla")
    with pytest.raises(UsageError, match="optim: adamw_8bit has no kernels for xla; use AdamW"):
        build_optimizer("adamw_8bit", list(nn.Linear(2, 2).named_parameters()), lazy)


def test_it_never_sees_flat_shards() -> None:
    assert sharding_unit(bitsandbytes.optim.AdamW8bit) == sharding_unit(adamw_8bit_class()) == "parameter"
    derived = type("Derived", (bitsandbytes.optim.AdamW8bit,), {})
    with pytest.raises(UsageError, match="zero_1: Derived uses complete parameters"):
        sharding_unit(derived)
