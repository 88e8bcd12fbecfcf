"""Batches on the device, moved there ahead of the steps that use them.

The calling thread fetches batches on the host, so that a collator never runs concurrently with the model; one
background thread moves them, some steps ahead. The loader's position is that of the consumer; prefetched steps do not
move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from stepmark.data.loader.batch import StepBatch, StepLoader, note_masks
from stepmark.runtime.base import Runtime


class DevicePrefetcher:
    """The steps of a loader from its position to the end of the epoch, their inputs on the runtime's device; of any
    other iterable, such as PyTorch's DataLoader, its batches.

    Up to `lookahead` steps are held on the device in addition to the current one. On a CPU nothing is prefetched. An
    error in fetching or moving a step is raised when the consumer reaches that step.
    """

    def __init__(self, loader: StepLoader | Iterable[Any], runtime: Runtime, lookahead: int = 2) -> None:
        self.loader: Any = loader
        self.runtime = runtime
        self.lookahead = lookahead

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Generator[Any, None, None]:
        steps = hasattr(self.loader, "ahead")
        source = self.loader.ahead() if steps else iter(self.loader)
        ahead = self.lookahead > 0 and self.runtime.device.type != "cpu"
        for step in self._moved_ahead(source) if ahead else map(self._move, source):
            if steps:
                self.loader.load_state_dict(step.state)
            yield step

    def _move(self, step: Any) -> Any:
        if not isinstance(step, StepBatch):
            return self.runtime.place(step)
        placed = self.runtime.place([micro_batch.inputs for micro_batch in step])
        for micro_batch, inputs in zip(step, placed, strict=True):
            note_masks(micro_batch.inputs, inputs)
        moved = [replace(micro_batch, inputs=inputs) for micro_batch, inputs in zip(step, placed, strict=True)]
        return replace(step, micro_batches=moved)

    def _moved_ahead(self, source: Iterator[Any]) -> Iterator[Any]:
        ready: deque[Future[Any]] = deque()
        mover = ThreadPoolExecutor(1, thread_name_prefix="stepmark-prefetcher")
        end: Exception | None = None
        try:
            while True:
                while end is None and len(ready) <= self.lookahead:
                    try:
                        # The first fetch comes before the thread: a worker process is best forked from one thread.
                        ready.append(mover.submit(self._move, next(source)))
                    except Exception as error:
                        end = error
                if not ready:
                    break
                yield ready.popleft().result()
        finally:
            mover.shutdown(cancel_futures=True)
        if end is not None and not isinstance(end, StopIteration):
            raise end
