"""In forward passes on a lazy device transformers reads no values; elsewhere it does what it did."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks

HERE = "tests.training.one_graph_per_step.test_transformers_forward"


def model_of(pad_token: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=17, n_positions=8, pad_token_id=pad_token)
    return GPT2LMHeadModel(config)


def reads_inside_and_outside() -> dict[str, Any]:
    """Transfers to the host of two forward passes, and what `is_tracing` says; before, in, and after `lazy_forward`."""
    from transformers import masking_utils, modeling_utils
    from transformers.utils import import_utils

    from stepmark.runtime.xla import XlaRuntime
    from stepmark.training.one_graph_per_step.transformers_forward import lazy_forward

    runtime = XlaRuntime()
    model = model_of(pad_token=0).to(runtime.device)
    tokens = runtime.place(torch.full((2, 8), 3))

    def transfers_of_forward() -> int:
        before = runtime.transfers_to_host() or 0
        model(input_ids=tokens)
        return (runtime.transfers_to_host() or 0) - before

    with lazy_forward({"input_ids": tokens}):
        inside = transfers_of_forward()
        tracing = [module.is_tracing(tokens) for module in (masking_utils, modeling_utils, import_utils)]
        on_host = masking_utils.is_tracing(torch.ones(1))
        import_utils.torch_compilable_check(tokens < 0, "is not read")
        import_utils.torch_compilable_check(lambda: tokens < 0, "is not read")
        with pytest.raises(ValueError, match="is read"):
            import_utils.torch_compilable_check(torch.ones(1) < 0, "is read")
        later = importlib.import_module("transformers.models.aria.modeling_aria")
        imported_later = later.torch_compilable_check.__wrapped__ is not None
    with pytest.raises(ValueError, match="is read"):
        import_utils.torch_compilable_check(tokens < 0, "is read")
    return {
        "inside": inside,
        "outside": transfers_of_forward() > 0,
        "tracing": tracing,
        "tracing outside": modeling_utils.is_tracing(tokens),
        "tracing on the host": on_host,
        "imported later": imported_later,
    }


@pytest.mark.xla
def test_only_lazy_tensors_in_lazy_forward_are_not_read(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{HERE}:reads_inside_and_outside").check()
    assert found == {
        "inside": 0,
        "outside": True,
        "tracing": [True, True, True],
        "tracing outside": False,
        "tracing on the host": False,
        "imported later": True,
    }


def recorded_in_both_passes() -> list[bool]:
    """What `is_recorded` says in a layer's forward pass, and when the backward pass repeats it."""
    from stepmark.runtime.xla import XlaRuntime, checkpoint_function
    from stepmark.training.one_graph_per_step.transformers_forward import is_recorded, recorded_checkpoint

    said: list[bool] = []

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        said.append(is_recorded(tensor))
        return tensor * 2

    tensor = torch.ones(2, device=XlaRuntime().device, requires_grad=True)
    recorded_checkpoint(checkpoint_function())(layer, tensor, use_reentrant=True).sum().backward()
    said.append(is_recorded(tensor))
    return said


@pytest.mark.xla
def test_what_gradient_checkpointing_repeats_is_recorded_too(ranks: Ranks) -> None:
    (said,) = ranks.run(f"{HERE}:recorded_in_both_passes").check()
    assert said == [True, True, False]


def gradients_behind_frozen_embeddings(device: str) -> list[float]:
    """The gradient norm of each layer of a vision model whose embeddings are frozen; of a frozen layer, 0."""
    from transformers import ViTConfig, ViTForImageClassification

    from stepmark.runtime.device import create_runtime
    from stepmark.training.model_options import enable_gradient_checkpointing

    runtime = create_runtime(device)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model: Any = ViTForImageClassification(ViTConfig(num_hidden_layers=3, **sizes))
    model.train().vit.embeddings.requires_grad_(False)
    model.vit.layers[0].requires_grad_(False)
    pixels, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    model.to(runtime.device)
    enable_gradient_checkpointing(model, runtime)
    model(pixel_values=runtime.place(pixels), labels=runtime.place(labels)).loss.backward()
    found = [[p.grad for p in layer.parameters() if p.grad is not None] for layer in model.vit.layers]
    norms = [
        torch.stack([gradient.norm() for gradient in gradients]).sum() if gradients else None for gradients in found
    ]
    present = iter(torch.stack([norm for norm in norms if norm is not None]).tolist())  # read at once: one graph
    return [0.0 if norm is None else next(present) for norm in norms]


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_layers_behind_frozen_embeddings_get_their_gradients(ranks: Ranks) -> None:
    (lazy,) = ranks.run(f"{HERE}:gradients_behind_frozen_embeddings", "xla").check()
    (eager,) = ranks.run(f"{HERE}:gradients_behind_frozen_embeddings", "cpu").check()
    assert lazy == pytest.approx(eager, rel=1e-4)
    assert lazy[0] == 0.0 < min(lazy[1:])


@pytest.mark.parametrize("more", [{}, {"output_hidden_states": True}, {"output_attentions": True}])
def test_what_a_recomputed_layer_captures_has_gradients(more: dict[str, bool]) -> None:
    """A reentrant function, as on lazy devices, and the losses of routers and of hidden states."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from stepmark.runtime.eager import EagerRuntime
    from stepmark.training.model_options import enable_gradient_checkpointing

    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5, use_cache=False)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    tokens = torch.randint(3, 17, (2, 8))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens, **more)
        captured = [each for name in ("hidden_states", "attentions") for each in getattr(output, name) or ()]
        assert len(captured) == (3 if "output_hidden_states" in more else 2 if more else 0)
        (output.loss + sum(each.square().mean() for each in captured)).backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    expected = gradients()
    enable_gradient_checkpointing(model, EagerRuntime(torch.device("cpu")), {"use_reentrant": True})
    torch.testing.assert_close(gradients(), expected)
