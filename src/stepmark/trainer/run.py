"""A run, opened: the ranks and their device, the output folder and its log. A recipe and its Trainer share one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from stepmark.config.contradictions import device_contradictions
from stepmark.config.fields import refuse
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import StepmarkError
from stepmark.filesystem.error_advice import with_advice
from stepmark.runtime.compile_cache import open_compile_cache, prepare_compile_cache
from stepmark.runtime.context import Context, start
from stepmark.runtime.mesh import check_hosting, check_sizes
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.memory_snapshots import check_shared_memory
from stepmark.trainer.run_folder.output_folder import finished, prepare_output_folder
from stepmark.trainer.run_folder.run_log import RunLog
from stepmark.trainer.run_folder.run_mirror import check_place
from stepmark.trainer.run_folder.status import DONE
from stepmark.training.compiled_layers import check_compiler

Metrics = dict[str, float]


def check_device(args: TrainingFields, device: str) -> None:
    """Raises UsageError where devices of this type, which `args` may call `auto`, cannot do what it asks for."""
    refuse(device_contradictions(args, device))
    check_compiler(args, device)


class Run:
    """What a run has before there is a model, and keeps over all calls of `train`. `log` writes on rank 0 alone."""

    def __init__(self, context: Context, folder: Path, *, shared: bool = True) -> None:
        """`shared`: all ranks have to see the folder."""
        self.context, self._shared = context, shared
        self.log = RunLog(folder, writes=context.host.rank == 0 and not extracting_graphs())
        self._prepared = False

    @classmethod
    def open(cls, args: TrainingFields) -> Run:
        """Joins the other ranks, and opens the device and its compile cache. Collective.

        Raises UsageError, DeviceError or LaunchError where that is impossible, StepmarkError where the place in object
        storage cannot be used.
        """
        prepare_compile_cache(args.compile_cache)
        context = start(args.device_name, args.join_timeout)
        open_compile_cache(context.runtime, args.compile_cache, context.world, compiles=args.torch_compile)
        check_device(args, context.runtime.device.type)
        sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.expert_parallel_size
        check_sizes(context.world.size, *sizes, replicas=args.data_parallel_replicas)
        check_hosting(context.runtime, sizes[0], sizes[2], args.data_parallel_replicas)
        check_place(args, context.host)
        check_shared_memory(args, context.host)
        return cls(context, Path(args.output_dir), shared=args.mirror_to is None)

    def prepare_folder(self) -> None:
        """Creates the output folder and checks that all ranks can use it. Collective.

        Raises UsageError, StepmarkError or LaunchError as `prepare_output_folder`.
        """
        prepare_output_folder(self.log.folder, self.context.host, shared=self._shared)
        self._prepared = True

    def begin_training(self, folder: Path) -> None:
        """As `prepare_folder`, unless the folder was prepared since the last training began. Collective."""
        if not self._prepared or folder != self.log.folder:
            self.log.folder = folder
            self.prepare_folder()
        self._prepared = False

    def finish(self, step: int, reason: str | None) -> None:
        """The run is done; `reason`: why it was asked to stop before its last step."""
        with self.writing():
            self.log.status(DONE, step, reason)
        finished(self.log.folder)

    # Results

    def write_results(self, split: str, metrics: Metrics, datasets: Collection[Any]) -> None:
        """Writes `<split>_results.json`, with the number of samples of `datasets` where all have one."""
        counted = datasets and all(hasattr(dataset, "__len__") for dataset in datasets)
        samples = {f"{split}_samples": sum(len(dataset) for dataset in datasets)} if counted else {}
        with self.writing():
            self.log.results(split, {**metrics, **samples})

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, a file that cannot be written is a StepmarkError."""
        try:
            yield
        except OSError as error:
            reason = f"the results cannot be written to {self.log.folder}: {error.strerror or error}"
            raise StepmarkError(
                f"{with_advice(reason, error)}; then start the run again, with resume_from_checkpoint: true from its "
                "last checkpoint"
            ) from error
