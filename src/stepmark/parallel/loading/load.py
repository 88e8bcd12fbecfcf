"""Creates a model that is larger than a rank's memory: on the meta device, sharded, then filled tensor by tensor.

Three steps: the model is constructed without values, `parallelize` leaves each rank its local parameters, and each of
these is filled from its source, one at a time: from the files of a Hugging Face folder (tensor_source.py), or from what
a constructor draws (deferred_init.py).

`load_for_parallelism` applies them to every transformers model that is created inside it. Constructors are wrapped. Of
`from_pretrained`, only the part that reads the files is replaced; the rest, such as the generation configuration, is
done by transformers. tests/parallel/loading/test_transformers_contract.py lists which of its names this needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.parallel.loading.deferred_init import SMALL, DeferredInit, Drawn
from stepmark.parallel.loading.pretrained import prepare
from stepmark.parallel.loading.tensor_source import StoredSource, open_files, open_folder
from stepmark.parallel.parallelize import parallelize
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import cast_module, replace
from stepmark.sharding.layout import Layout, layout_of

ShardModel = Callable[[nn.Module], object]
TensorSource = Drawn | StoredSource


@dataclass(frozen=True)
class ModelFactory:
    """Creates models for one rank: `shard` shards a model on the meta device; its parameters are moved to `runtime`'s
    device. Tensors of less than `small` bytes are kept in memory while a new model is initialized."""

    shard: ShardModel
    runtime: Runtime
    small: int = SMALL

    def new(self, construct: Callable[[], Any], dtype: torch.dtype | None = None) -> Any:
        """The model that `construct` creates, with the values of an unsharded construction, then converted to `dtype`.
        The generator's state afterwards is that after an unsharded construction."""
        deferral = DeferredInit(self.small)
        with deferral:
            model = construct()
        sources = deferral.settle(model)
        if dtype is not None:
            cast_module(model, dtype)
        self.shard(model)
        fill(model, sources, self.runtime)
        return model


def fill(model: nn.Module, sources: Mapping[str, TensorSource], runtime: Runtime) -> None:
    """Gives every parameter on the meta device its values, and moves the buffers to the device.

    A parameter's source has its name, or one of its names where it is tied. Parameters keep their identity;
    elements outside their layout are 0. Raises CheckpointMismatch, before anything is read, where a source
    is missing or of another shape.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: list[tuple[nn.Parameter, Layout, TensorSource]] = []
    for parameter in model.parameters():
        if parameter.is_meta:
            layout = layout_of(parameter) or Layout.full(parameter.shape)
            found.append((parameter, layout, _source(names[id(parameter)], layout, sources)))
    for parameter, layout, source in found:
        covered = sum(part.slice.numel for part in layout.parts) == parameter.numel()
        local = (torch.empty if covered else torch.zeros)(parameter.shape, dtype=parameter.dtype)
        source.fill(local, layout)
        replace(parameter, runtime.place(local))
    for buffer in model.buffers():
        if buffer.device != runtime.device:
            replace(buffer, runtime.place(buffer))


def _source(names: list[str], layout: Layout, sources: Mapping[str, TensorSource]) -> TensorSource:
    name = next((name for name in names if name in sources), None)
    if name is None:
        raise CheckpointMismatch(
            f"parameter {names[0]!r} has no values: no tensor of that name was initialized or stored"
        )
    if sources[name].shape != layout.shape:
        raise CheckpointMismatch(f"parameter {name!r} is {list(sources[name].shape)} and {list(layout.shape)} here")
    return sources[name]


@contextmanager
def load_for_parallelism(
    mesh: Mesh | None = None,
    *,
    sequence_parallel: bool = False,
    parallelize_embedding: bool = True,
    plan: Any = None,
    pipeline_layers: Sequence[int] | None = None,
    pipeline_chunks: int = 1,
    **of_a_mesh: Any,
) -> Iterator[None]:
    """Context in which transformers models are created for this rank of the mesh: parallelized and on its device.

    `from_pretrained` of a folder reads only this rank's shards. `from_config` and constructors draw the same values as
    for the complete model, tensor by tensor. No rank ever holds the complete model.

    Args:
        mesh: The mesh; its tensor parallel axis shards the model, and its pipeline cuts it into stages.
        sequence_parallel: As for `parallelize`. Default: False.
        parallelize_embedding: Whether embedding, output layer and loss are sharded along the vocabulary. Default: True.
        plan: A tensor parallel plan in place of the model's own. Default: None.
        pipeline_layers: As for `parallelize`. Default: None.
        pipeline_chunks: As for `parallelize`. Default: 1.
        of_a_mesh: Refused: `tensor_parallel_size` and the like are arguments of `Mesh.create`.

    Raises:
        CheckpointNotFound: The folder has no safetensors files.
        CheckpointDamaged: A file is missing, truncated or malformed. The error names the file and the tensor.
        CheckpointMismatch: The folder's tensors and the model's differ in names or shapes.
        UsageError: The model cannot be created or loaded in shards, or there is no mesh.
    """
    if mesh is None or of_a_mesh:
        sizes = ", ".join(f"{name}={value!r}" for name, value in of_a_mesh.items())
        raise UsageError(
            f"load_for_parallelism: {next(iter(of_a_mesh), 'mesh')} is not given here but to the mesh, as the first "
            f"argument; write load_for_parallelism(Mesh.create({sizes}))"
        )
    factory = model_factory(
        mesh,
        sequence_parallel=sequence_parallel,
        parallelize_embedding=parallelize_embedding,
        plan=plan,
        pipeline_layers=pipeline_layers,
        pipeline_chunks=pipeline_chunks,
    )
    with patched_constructors(factory):
        yield


def model_factory(mesh: Mesh, **options: Any) -> ModelFactory:
    """The factory of models for a rank of the mesh; the options are those of `parallelize`."""
    return ModelFactory(functools.partial(parallelize, mesh=mesh, **options), mesh.runtime)


@contextmanager
def patched_constructors(factory: ModelFactory) -> Iterator[None]:
    """Context in which transformers models are created by `factory`, through patched constructors."""
    with ExitStack() as patches:
        _Patches(factory, patches)
        yield


class _Patches:
    """Makes transformers' models by `factory`, until `patches` are undone."""

    def __init__(self, factory: ModelFactory, patches: ExitStack) -> None:
        from transformers import PreTrainedModel

        self._factory = factory
        self._patches = patches
        self._building = False  # whether a model is being created: models inside it are not created separately
        for each in _subclasses(PreTrainedModel):
            self._patch_constructor(each)
        # transformers imports its models' modules lazily: classes that are defined meanwhile are patched, too.
        prepare: Any = PreTrainedModel.__dict__["__init_subclass__"]

        def prepare_class(owner: type, **options: Any) -> None:
            prepare.__get__(None, owner)(**options)
            self._patch_constructor(owner)

        self._patch(PreTrainedModel, "__init_subclass__", classmethod(prepare_class))
        self._patch(PreTrainedModel, "from_pretrained", classmethod(self._from_pretrained(PreTrainedModel)))

    def _patch(self, owner: type, name: str, value: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, value))

    def _patch_constructor(self, owner: type) -> None:
        original: Any = vars(owner).get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def construct(model: Any, *args: Any, **options: Any) -> None:
            # The first constructor to be called is the model's own; those of its parents and parts follow inside it.
            if self._building:
                original(model, *args, **options)
                return

            def constructed() -> Any:
                original(model, *args, **options)
                return model

            with mock.patch.object(self, "_building", True):
                self._factory.new(constructed)

        self._patch(owner, "__init__", construct)

    def _read(self, model: Any, state_dict: Any, files: Any, config: Any, *_: Any, **__: Any) -> Any:
        """In place of the part of `from_pretrained` that reads the files."""
        from transformers.utils.loading_report import LoadStateDictInfo

        if state_dict is not None or config.hf_quantizer is not None or config.device_map is not None:
            raise UsageError(
                "from_pretrained: state_dict, device_map and quantization are not supported with parallel loading"
            )
        sources = prepare(model, open_files([Path(file) for file in files]), config)
        self._factory.shard(model)
        fill(model, sources, self._factory.runtime)
        return LoadStateDictInfo(set(), set(), set(), [], {}, set()), None

    def _from_pretrained(self, base: Any) -> Callable[..., Any]:
        original = base.__dict__["from_pretrained"]
        parts: dict[str, Any] = {
            "_load_pretrained_model": staticmethod(self._read),
            "_finalize_model_loading": staticmethod(lambda model, config, info: info),
        }

        def from_pretrained(owner: Any, name: Any, *args: Any, **options: Any) -> Any:
            if Path(str(name)).is_dir() and not options.get("variant") and not options.get("subfolder"):
                open_folder(Path(str(name)))  # fails earlier than transformers does, and with a clearer error
            with mock.patch.object(self, "_building", True), mock.patch.multiple(base, **parts):
                return original.__get__(None, owner)(name, *args, **options)

        return from_pretrained


def _subclasses(parent: type) -> list[type]:
    """All classes below, each once."""
    children: list[type] = parent.__subclasses__()
    return list(dict.fromkeys(each for child in children for each in (child, *_subclasses(child))))
