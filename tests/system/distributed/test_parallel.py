"""A tensor parallel model: its logits, its dropout, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash

from stepmark.errors import UsageError
from stepmark.parallel.parallelize import parallelize
from stepmark.runtime.context import Context
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import place_module
from stepmark.sharding.layout import layout_of
from stepmark.sharding.views import local_shard
from tests.support.models import build
from tests.support.programs import LENGTH, VOCABULARY
from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt2", {}), ("llama", {"parallelize_embedding": False}), ("gpt2", {"sequence_parallel": True})],
)
def test_logits_are_complete_where_they_are_used(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    for found in ranks.run(logits, {"kind": kind}, options, nproc=2).check():
        assert found["evaluation"] < 1e-5
        assert found["training"] < 1e-5
        assert found["loss"] < 1e-5
        assert found["parameters"] == 0
        assert found["has_logits"] == ("parallelize_embedding" in options)


def test_a_model_on_the_meta_device(ranks: Ranks) -> None:
    assert ranks.run(shapes_on_meta, {"kind": "gpt2"}, nproc=2).check() == [True, True]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({"kind": "llama", "num_key_value_heads": 4}, {"plan": {"model.nothing": "colwise"}}, "model.nothing"),
        ({"kind": "llama"}, {"plan": {"model.layers.*.mlp.up_proj": "moe_tp_experts"}}, "moe_tp_experts"),
        ({"kind": "llama"}, {"plan": {"model.layers.*.input_layernorm": "colwise"}}, "RMSNorm"),
        ({"kind": "llama", "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, {}, "3 heads"),
        ({"kind": "gpt2", "n_inner": 5}, {}, "c_fc"),
        (
            {"kind": "llama"},
            {"plan": {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}},
            "model.layers.0.mlp.gate_proj.weight",
        ),
        ({"kind": "llama"}, {"sequence_parallel": True, "length": 7}, "7 tokens"),
        (
            {"kind": "llama", "output_hidden_states": True},
            {"sequence_parallel": True},
            "output_hidden_states: with seq",
        ),
    ],
)
def test_unsupported_requests_fail(ranks: Ranks, model: dict[str, Any], options: dict[str, Any], words: str) -> None:
    for message in ranks.run(refusal, model, options, nproc=2).check():
        assert words in message
        assert "\n" not in message


def test_dropout_agrees_where_activations_do(ranks: Ranks) -> None:
    one, other = ranks.run(dropped, {"kind": "gpt2", "dropout": 0.5}, {}, nproc=2).check()
    for place in one:
        assert (one[place] == other[place]) == (place != "probabilities"), place
    assert one["attention 0"] != one["attention 1"]


def test_dropout_differs_along_a_sharded_sequence(ranks: Ranks) -> None:
    options = {"sequence_parallel": True}
    one, other = ranks.run(dropped, {"kind": "gpt2", "dropout": 0.5}, options, nproc=2).check()
    for place in one:
        assert (one[place] == other[place]) == (place == "embedding"), place


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_draws_the_same_numbers(ranks: Ranks, sequence: bool) -> None:
    arguments: list[Any] = [{"kind": "gpt2", "dropout": 0.5}, {"sequence_parallel": sequence}]
    for found in ranks.run(dropped_checkpointed, *arguments, nproc=2).check():
        assert found["difference"] < 1e-6


@pytest.mark.xla
def test_the_graphs_of_all_ranks_are_one(ranks: Ranks) -> None:
    """Two layers, two regions each. Entering a region gathers, and its backward pass reduces and scatters; leaving it
    is the other way round. Beside that: the cut and the gather at the ends, the embedding's sum, the loss's maximum
    and sum. Dropout's seeds compile nothing."""
    model = {"kind": "gpt2", "dropout": 0.1}
    (found,) = ranks.run(graph, 2, model, environment=replica_environment(2)).check()
    assert found[0] == found[1]
    assert {kind: found[0][kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")} == {
        "all-gather": 4 + 4 + 2,
        "reduce-scatter": 4 + 4 + 1,
        "all-reduce": 3,
    }
    assert len(set(found[0]["compilations"])) == 1


# What ranks run


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Largest differences from the complete model: logits of an evaluation, of training without labels, and the loss in
    training with labels; whether that returned logits; and of all parameters' slices."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    whole, cut = build(**model), parallelize(build(**model), mesh, **options)
    found: dict[str, Any] = {}
    with torch.no_grad():
        expected = whole.eval()(input_ids=tokens()).logits
        found["evaluation"] = float((cut.eval()(input_ids=tokens(), labels=tokens()).logits - expected).abs().max())
        found["training"] = float((cut.train()(input_ids=tokens()).logits - expected).abs().max())
    labels = tokens()
    labels[:, 5] = -100
    outputs = cut(input_ids=tokens(), labels=labels)
    found["loss"] = float((outputs.loss - whole(input_ids=tokens(), labels=labels).loss).abs())
    found["has_logits"] = outputs.logits is not None
    differences = []
    for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        layout = layout_of(ours)
        part = theirs.detach() if layout is None else local_shard(theirs.detach(), layout, tuple(ours.shape))
        differences.append(float((ours.detach() - part).abs().max()))
    found["parameters"] = max(differences)
    return found


def shapes_on_meta(model: dict[str, Any]) -> bool:
    """Whether a model on the meta device gets the shapes, layouts and ties of one on the host."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    real = parallelize(build(**model), mesh)
    with torch.device("meta"):
        empty = build(**model)
    meta = parallelize(empty, mesh)
    pairs = list(zip(real.named_parameters(), meta.named_parameters(), strict=True))
    return all(a == b and p.shape == q.shape and layout_of(p) == layout_of(q) and q.is_meta for (a, p), (b, q) in pairs)


def refusal(model: dict[str, Any], options: dict[str, Any]) -> str:
    """The error of `parallelize`, or of one forward pass after it; empty if there is none."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    made = build(**model)
    length = options.pop("length", LENGTH)
    before = [parameter.shape for parameter in made.parameters()]
    try:
        parallelize(made, mesh, **options)
    except UsageError as error:
        assert [parameter.shape for parameter in made.parameters()] == before
        return str(error)
    try:
        made(input_ids=tokens()[:, :length])
    except UsageError as error:
        return str(error)
    return ""


def dropped(model: dict[str, Any], options: dict[str, Any]) -> dict[str, list[Any]]:
    """Which units dropout keeps, by place: after the embedding, in the attention's probabilities and after its
    projection, of two layers; and the gradients' checksum."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    made = parallelize(build(**model), mesh, **options).train()
    if options.get("checkpointing"):
        made.gradient_checkpointing_enable()
    made.config._attn_implementation = "eager"
    kept: dict[str, list[Any]] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            kept.setdefault(name, []).append((output == 0).flatten()[:64].tolist())

        return hook

    made.transformer.drop.register_forward_hook(watch("embedding"))
    for number, block in enumerate(made.transformer.h):
        block.attn.resid_dropout.register_forward_hook(watch(f"attention {number}"))
        block.mlp.dropout.register_forward_hook(watch(f"feed-forward {number}"))
    functional = torch.nn.functional.dropout

    def watched(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        output = functional(input, p, training, inplace)
        if input.dim() == 4 and p:
            kept.setdefault("probabilities", []).append((output[0, 0, -1] == 0).tolist())
        return output

    torch.nn.functional.dropout = watched
    try:
        mesh.runtime.seed(5)
        made(input_ids=tokens(), labels=tokens()).loss.backward()
    finally:
        torch.nn.functional.dropout = functional
    return kept


def dropped_checkpointed(model: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """The largest difference of gradients with and without gradient checkpointing, with dropout."""
    mesh = Mesh.create(tensor_parallel_size=2, device="cpu")
    gradients = []
    for checkpointing in (False, True):
        made = parallelize(build(**model), mesh, **options).train()
        if checkpointing:
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh.runtime.seed(5)
        made(input_ids=tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    return {"difference": max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))}


def graph(replicas: int, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each replica thread, with sequence parallelism and dropout: the collectives in the graph of a micro-step, the
    graph's hash, and compilations after each of four micro-steps."""
    from tests.support.replica_threads import run_replicas

    made = [build(**model) for _ in range(replicas)]

    def replica(context: Context) -> dict[str, Any]:
        import torch_xla

        mesh = Mesh.create(tensor_parallel_size=replicas, context=context)
        cut = parallelize(made[context.world.rank], mesh, sequence_parallel=True).train()
        place_module(cut, mesh.runtime)
        placed = mesh.runtime.place(tokens())
        found: dict[str, Any] = {"compilations": []}
        for number in range(4):
            mesh.runtime.seed(1000 + number)
            loss = cut(input_ids=placed, labels=placed, use_cache=False).loss
            loss.backward()
            gradients = [parameter.grad for parameter in cut.parameters()]
            if not number:
                text = torch_xla._XLAC._get_xla_tensors_hlo([loss, *gradients])
                found["digest"] = xxhash.xxh3_64_hexdigest(text.encode())
                found |= {kind: text.count(f"{kind}(") for kind in ("all-reduce", "all-gather", "reduce-scatter")}
            mesh.runtime.step_boundary(wait=True)
            counters = mesh.runtime.counters()
            assert counters is not None
            found["compilations"].append(counters.compilations)
            cut.zero_grad()
        return found

    return run_replicas(replica, replicas)


def zero_1_graphs(replicas: int) -> list[dict[str, Any]]:
    """Of each replica thread, data parallel by 2 tensor parallel with ZeRO-1 and sequence parallelism: of every graph
    that one step runs its collectives and its digest; and compilations after each of five steps, between the last of
    which everything that is saved is copied to the host."""
    from stepmark.checkpoint.sections import describe
    from tests.support.models import training
    from tests.support.replica_threads import run_replicas

    made = [build(kind="llama") for _ in range(replicas)]

    def replica(context: Context) -> dict[str, Any]:
        graphs: list[dict[str, Any]] = []
        found: dict[str, Any] = {"graphs": graphs, "compilations": []}
        options = {"model": {}, "tp": 2, "zero_1": True, "sequence": True}
        step, batches = training(context, options, made[context.world.rank])
        dispatch = context.runtime._dispatch

        def watched(ranks: Any) -> None:
            graphs.append(_pending(step))
            dispatch(ranks)

        for number, batch in zip(range(5), batches, strict=False):
            context.runtime._dispatch = dispatch if number else watched
            step(number, batch)
            context.runtime._dispatch = dispatch
            context.runtime.step_boundary(wait=True)
            counters = context.runtime.counters()
            found["compilations"].append(counters.compilations)
            if number >= 2:
                sections = describe({"model": step.model, "optimizer": step.optimizer})
                context.runtime.to_host([entry.tensor for each in sections for entry in each.entries.values()])
        return found

    return run_replicas(replica, replicas)


def _pending(step: Any) -> dict[str, Any]:
    """Of the graph that is recorded for the parameters, their gradients and the optimizer's state."""
    import torch_xla

    parameters = list(step.model.parameters())
    live = [
        *parameters,
        *[held.tensor for held in step.optimizer.distribution.held],
        *[each.grad for each in parameters if each.grad is not None],
    ]
    text = torch_xla._XLAC._get_xla_tensors_hlo(live)
    kinds = {kind: text.count(f"{kind}(") for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    return {"digest": xxhash.xxh3_64_hexdigest(text.encode()), **kinds}
