"""`Trainer.accelerator`: what subclasses written for transformers ask of accelerate's Accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import is_computing, is_filler, rows_of
from stepmark.errors import UsageError
from stepmark.runtime.base import map_tensors
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.compat.given_loader import PlainBatches
from stepmark.training.one_graph_per_step.deferred_reads import defer_reads


class Accelerator:
    """The ranks and the device under accelerate's names; Stepmark itself does not use accelerate.

    Values are gathered over the data parallel ranks, which alone have different samples. On a lazy device they stay
    there: `item()` of what was gathered returns a number that is read when it is used.

    Attributes:
        parallelism_config: None.
        sync_gradients: True; ranks exchange gradients once for each step.
        keeps_own: Whether `gather` in a loss returns what it is given: metrics, which are joined at the next log.
        has_samples: Whether any rank had samples when tensors were gathered last, or else fillers of a last step.
    """

    parallelism_config = None
    sync_gradients = True
    keeps_own = False
    has_samples = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._mesh: Mesh = trainer.mesh
        world = self._mesh.context.world
        self.num_processes, self.process_index, self.local_process_index = world.size, world.rank, world.local_rank
        self.is_main_process, self.is_local_main_process = world.rank == 0, world.local_rank == 0
        self.device: torch.device = self._mesh.runtime.device
        self.gradient_accumulation_steps = 1  # as in transformers, whose loop accumulates
        self.distributed_type = "NO" if world.size == 1 else f"MULTI_{'CPU' if self.device.type == 'cpu' else 'GPU'}"
        self.state = SimpleNamespace(
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            deepspeed_plugin=None,
            fsdp_plugin=None,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'accelerator' of stepmark's Trainer has no attribute {name!r}: Stepmark does not use accelerate; use "
            "trainer.model, trainer.args and trainer.context, or the Trainer's methods (super().training_step runs the "
            "backward pass)"
        )

    def gather(self, tensor: Any) -> Any:
        """Joins tensors of the data parallel ranks along their first dimension, in the order of the ranks; scalars make
        a vector. On one rank they are returned as they are. Collective.

        Args:
            tensor: A tensor, or a nest of them, on the device. Ranks may have different numbers of rows.

        Raises:
            UsageError: A loss would be computed from as many ranks as there are processes, which host more.
        """
        if is_computing() and self.keeps_own:
            return map_tensors(tensor, lambda each: each.detach().to(self.device))
        if is_computing():
            self._mesh.keep_one_rank("the loss joins what ranks have computed")
        return map_tensors(tensor, self._gathered)

    def gather_for_metrics(self, tensor: Any) -> Any:
        """As `gather`, without the rows that fill up the last batches of a prepared loader, or of the Trainer's."""
        gathered, iterated = self.gather(tensor), PlainBatches.iterated
        rows = None if iterated is None else iterated.rows
        if isinstance(iterated, PlainBatches):
            self._mesh.keep_one_rank("an evaluation_loop of your own joins what ranks have computed")
        return gathered if rows is None else map_tensors(gathered, lambda each: each[:rows] if each.ndim else each)

    def _gathered(self, tensor: Tensor) -> Tensor:
        axis, runtime = self._mesh.data_parallel, self._mesh.runtime
        found = tensor.detach().to(runtime.device)
        if axis.size > 1:
            rows = found.reshape(-1, *found.shape[1:]).contiguous()
            kind = rows.dtype
            rows = rows.to(torch.uint8) if kind is torch.bool else rows
            found = self._joined(rows).to(kind)
        return defer_reads(found) if runtime.lazy else found

    def _joined(self, rows: Tensor) -> Tensor:
        """Rows of all ranks, which may have different numbers of them, and none where a rank has no samples."""
        axis = self._mesh.data_parallel
        if self._mesh.runtime.lazy:  # batches have one shape
            return axis.all_gather([rows])[0]
        own = torch.tensor([len(rows), 0 if is_filler() else len(rows)], device=rows.device)
        lengths, counts = axis.all_gather([own])[0].reshape(-1, 2).T.tolist()
        padded = torch.cat([rows, rows.new_zeros(max(lengths) - len(rows), *rows.shape[1:])])
        parts = axis.all_gather([padded])[0].split(max(lengths))
        self.has_samples = any(counts)
        counts = counts if self.has_samples else lengths
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, **_: Any) -> nn.Module:
        """The model inside of what a program has wrapped around it; Stepmark wraps nothing around it."""
        return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Moves another model, such as a reference model that is not trained, to the device; not sharded.

        Raises:
            UsageError: It would be trained too.
        """
        if not evaluation_mode and model is not self._trainer.model:
            raise UsageError(
                "accelerator.prepare_model: a Trainer trains one model; pass evaluation_mode=True for others"
            )
        return model.to(self.device)

    def prepare(self, *given: Any, **_: Any) -> Any:
        """Models as `prepare_model` returns them, and loaders whose batches the data parallel ranks take in turn, on
        the device. Optimizers and schedules are returned as they are."""
        found = [PreparedLoader(each, self) if hasattr(each, "__iter__") else each for each in given]
        return found[0] if len(found) == 1 else tuple(found)

    def autocast(self, *_: Any, **__: Any) -> Any:
        """The context in which models are called."""
        return self._trainer.compute_loss_context_manager()

    def print(self, *given: Any, **options: Any) -> None:
        """Prints once: on the main process of the machine, as accelerate does."""
        if self.is_local_main_process:
            print(*given, **options)

    def wait_for_everyone(self) -> None:
        """Waits for all ranks. Collective."""
        self._mesh.context.host.barrier()


class PreparedLoader:
    """A loader whose batches the data parallel ranks take in turn, on the device. In the last turn the ranks without a
    batch get the last one. A Trainer that trains on it takes the loader itself.

    `rows`: the samples of all ranks in this turn, without those that fill it; None where all count.
    """

    def __init__(self, loader: Any, accelerator: Accelerator) -> None:
        self.before_prepare = loader
        self.dataset = getattr(loader, "dataset", None)
        self.rows: int | None = None
        self._accelerator = accelerator

    def __len__(self) -> int:
        return -(-len(self.before_prepare) // self._accelerator._mesh.data_parallel.size)

    def __iter__(self) -> Iterator[Any]:
        mesh, batches = self._accelerator._mesh, iter(self.before_prepare)
        axis = mesh.data_parallel
        PlainBatches.iterated = self
        try:
            while turn := list(islice(batches, axis.size)):
                if len(turn) < axis.size:
                    self.rows = sum(map(rows_of, turn))
                yield mesh.runtime.place(turn[min(axis.rank, len(turn) - 1)])
        finally:
            self.rows = PlainBatches.iterated = None
