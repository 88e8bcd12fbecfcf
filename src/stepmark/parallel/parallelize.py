"""Makes a model parallel: by fsdp, or by experts and tensor parallel layers and then pipeline stages, in this order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from stepmark.config.full_sharding import FullSharding, full_sharding
from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import keep_whole, shard_fully
from stepmark.parallel.pipeline.stage_plan import plan_stages
from stepmark.parallel.pipeline.staged_model import cut_into_stages
from stepmark.parallel.tensor.adapted_layers import check_adapters, is_wrapper, unwrapped
from stepmark.parallel.tensor.expert_parallel import ExpertParallelism
from stepmark.parallel.tensor.tensor_parallelism import TensorParallelism
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import agree_on_weights

logger = logging.getLogger("stepmark")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParallelizedModel:
    """How a model was parallelized."""

    mesh: Mesh
    sequence_parallel: bool
    parallelize_embedding: bool
    pipeline_layers: list[int] | None = None
    pipeline_chunks: int = 1
    fsdp: FullSharding | None = None


_applied: WeakKeyDictionary[nn.Module, ParallelizedModel] = WeakKeyDictionary()


def parallelized(model: nn.Module) -> ParallelizedModel | None:
    """How the model was parallelized; None where it was not."""
    return _applied.get(model)


def check_adapted(model: nn.Module, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
    """Raises UsageError for adapters that axes of these sizes rule out, and for a model that got one after it was
    sharded, as far as that is seen before it is called: one in a PeftModel, or one in a pipeline."""
    applied = _applied.get(model)
    staged = applied is not None and applied.mesh.pipeline.size > 1
    if (applied is None and unwrapped(model) in _applied) or (staged and any(map(is_wrapper, model.modules()))):
        raise UsageError(
            "model: it got an adapter of peft after it was sharded, which would train incorrectly; add adapters to the "
            "complete model, before Trainer or parallelize shards it"
        )
    check_adapters(model, tensor_parallel_size, pipeline_parallel_size)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    parallelize_embedding: bool = True,
    plan: Mapping[str, str] | None = None,
    pipeline_layers: Sequence[int] | None = None,
    pipeline_chunks: int = 1,
    fsdp: FullSharding | bool | str | None = None,
) -> Model:
    """Shards a transformers model over the mesh's tensor parallel axis, divides experts over its expert parallel ranks,
    and cuts it into stages along the pipeline, in place; or shards the parameters of any model over the data parallel
    axis (`fsdp`).

    Every rank passes the same complete model, before it is moved to the device and before an optimizer is created.
    Parameters stay the same objects, so ties are preserved; afterwards each holds this rank's shard and is annotated
    with its layout, which the Checkpointer reads. While the model trains with labels, its outputs contain a loss and no
    logits, unless a Trainer has a `compute_loss` of the user's; otherwise the logits are complete. On a mesh with a
    pipeline each rank keeps the modules of its own stages, and `TrainStep` or `Trainer` runs them; the model cannot be
    called. On a mesh that has neither the model is returned unchanged.

    LoRA adapters of peft are sharded with their layers, and have to be in the model by then. Where the ranks have drawn
    different ones, all use those of rank 0.

    Args:
        model: A complete model, on the host or on the meta device.
        mesh: The mesh from `Mesh.create`.
        sequence_parallel: Shard activations between layers along the sequence, whose length must then be a multiple
            of the axis size. Default False.
        parallelize_embedding: Shard embedding and head along the vocabulary, whatever the plan says. Default True.
        plan: Module name (with `*` for a layer's number) to style, instead of the model's own `tp_plan`.
        pipeline_layers: The number of layers of each stage. Default: so that all stages cost as much, the embedding,
            the head and the loss counted.
        pipeline_chunks: Stages of each rank, for the interleaved schedule; rank r has the stages r, r + ranks and so
            on. Default 1.
        fsdp: Shard parameters over the data parallel ranks, on eager devices without the other two axes: true, a
            strategy such as `shard_grad_op`, or a `FullSharding`. Parameters become DTensors, other objects than
            before. Default None.

    Returns:
        The model that was passed.

    Raises:
        UsageError: Before anything is changed: the model has no plan that was verified, the plan has unsupported
            styles or misses a module with parameters among sharded ones, sizes are not divisible, the model does not
            support sequence parallelism, or it cannot be cut into stages.
    """
    tensor, pipeline, divided = mesh.tensor_parallel.size > 1, mesh.pipeline.size > 1, mesh.expert_parallel_size > 1
    sharding = fsdp if isinstance(fsdp, FullSharding) else full_sharding(fsdp, None)
    fully = sharding is not None and (tensor or pipeline or mesh.data_parallel.size > 1)
    if sharding is not None and mesh.context.world.size == 1:
        keep_whole(model)
    if not tensor and not pipeline and not fully and not divided:
        return model
    if model in _applied:
        raise UsageError("parallelize: the model is already sharded; pass a complete one")
    check_adapted(model, mesh.tensor_parallel.size, mesh.pipeline.size)
    if sharding is not None:
        shard_fully(model, mesh, sharding)
    along = mesh.tensor_parallel if tensor and sequence_parallel else None
    stages = plan_stages(model, mesh.pipeline.size * pipeline_chunks, pipeline_layers, along) if pipeline else None
    experts = ExpertParallelism(unwrapped(model), mesh, verified=plan is None) if divided else None
    if tensor:
        own = experts.modules if experts is not None else {}
        work = TensorParallelism(model, mesh, plan, parallelize_embedding, sequence_parallel, own)
        _agree_on_adapters(model, mesh)
        work.shard_parameters()
        work.wire()
    if experts is not None:
        experts.shard_parameters()
        experts.wire()
    if stages is not None:
        cut_into_stages(model, stages, mesh)
    sizes = None if pipeline_layers is None else list(pipeline_layers)
    for each in (model, unwrapped(model)):
        _applied[each] = ParallelizedModel(
            mesh, sequence_parallel, parallelize_embedding, sizes, pipeline_chunks, sharding
        )
        vars(each)["save_pretrained"] = _refuse_saving
    return model


def _agree_on_adapters(model: nn.Module, mesh: Mesh) -> None:
    """Makes adapters, which each rank may have drawn for itself, equal on all ranks. Collective if there are any."""
    trained = nn.ParameterList([each for each in model.parameters() if each.requires_grad and not each.is_meta])
    if not any(map(is_wrapper, model.modules())):
        return
    if agree_on_weights(trained, mesh.runtime, mesh.context.host) and mesh.context.host.rank == 0:
        logger.warning("the ranks had different adapters; all use those of rank 0")


def _refuse_saving(*args: Any, **options: Any) -> None:
    """In place of the model's `save_pretrained`, which would write this rank's part of it as if it were complete."""
    raise UsageError(
        "save_pretrained: this rank has a part of the model; call the Trainer's save_model, or save with a "
        "Checkpointer and run stepmark consolidate"
    )
