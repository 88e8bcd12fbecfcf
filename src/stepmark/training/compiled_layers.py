"""torch.compile of a model's layers, in place, on eager devices.

Layers are compiled one by one. The gradients of each then arrive as soon as its backward pass is done, so that sending
them overlaps with the rest; and layers of one kind share a compilation.
"""

from __future__ import annotations

import torch
from torch import nn

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.runtime.eager import kept_generators

MOST_GRAPHS = 64  # of one kind of layer, beyond which it runs uncompiled; torch's 8 are fewer than a few stated lengths

NOT_TRACED = (  # modules that seed and communicate inside of layers: their graphs would depend on the seed's value
    "stepmark.runtime",
    "stepmark.parallel.tensor.autograd_collectives",
    "stepmark.parallel.tensor.dropout",
)


def check_compiler(args: TrainingFields, device: str) -> None:
    """Raises UsageError where torch.compile cannot do what the arguments ask for: tried on one element."""
    if not args.torch_compile:
        return
    import torch._dynamo as dynamo
    from torch._dynamo.backends.registry import lookup_backend

    backend, mode = str(args.torch_compile_backend), args.torch_compile_mode
    if backend not in dynamo.list_backends(exclude_tags=()):
        known = ", ".join(sorted({*dynamo.list_backends(), "aot_eager", "eager"}))  # two of those for debugging
        raise UsageError(f"torch_compile_backend: {backend!r} is unknown; choose one of {known}")
    own = str(lookup_backend(backend).__module__).startswith("torch._dynamo.backends")
    if mode is not None and own and backend != "inductor":
        raise UsageError(f"torch_compile_mode and torch_compile_backend: {backend} has no modes; leave one of them out")
    try:
        if backend == "inductor" and device == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
        with kept_generators():
            torch.compile(lambda element: element + 1, backend=backend, mode=mode)(torch.ones(1, device=device))
    except Exception as error:  # each backend has its own
        said = " ".join(str(error).split("\n\n")[0].split())
        given = backend if mode is None else f"{backend} with torch_compile_mode {mode}"
        raise UsageError(
            f"torch_compile_backend: {given} cannot compile for {device} here ({type(error).__name__}: {said}); "
            "install what it lacks, choose another, or leave torch_compile out"
        ) from error


def compile_layers(model: nn.Module, args: TrainingFields, *, static: bool) -> None:
    """Compiles the model's layers in place, which changes no name in its state.

    With `static` each shape has a graph, otherwise one graph has all. Neither depends on the batches before, so a
    resumed run trains the same.
    """
    import torch._dynamo.config as settings
    from torch._dynamo import trace_rules

    for name in NOT_TRACED:
        trace_rules.add(name)
    settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
    for module in layers_of(model):
        module.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode, dynamic=not static)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost lists, if these have most of the parameters; else the model itself."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for each in lists for layer in each for part in layer.modules()}
    layers = [layer for each in lists if id(each) not in inner for layer in each]
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = sum(each.numel() for each in model.parameters() if id(each) not in tables | inside)
    return layers if sum(each.numel() for layer in layers for each in layer.parameters()) > others else [model]
