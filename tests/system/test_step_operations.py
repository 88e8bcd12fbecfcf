"""A step of the Trainer's has a few operations more than one by hand, as many in deep models as in shallow ones.

What is added for each layer, or for each parameter, keeps the host busy on an accelerator. For the numbers of models of
usual depths see `benchmarks/step_host_costs.py`; that the host never waits for an accelerator is in
`tests/runtime/test_native_waits.py`.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.parallel.gradients.arithmetic import LONG
from tests.support.models import build
from tests.support.programs import Blocks

ROWS, STEPS, WARM_UP = 2, 5, 2
SHALLOW, DEEP = 1, 4
MOST = 45  # operations that a step of one micro-batch adds
MOST_OF_MICRO_BATCH = 25  # that another micro-batch adds
OF_EXPERTS = 2  # operations that count the tokens of a layer's experts
SMALL = 1e-3  # a norm to which gradients are clipped in every step
READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero")
READERS = ("tolist", "numpy")  # of host tensors, which are no operations
CLIPS = "parallel/gradients/arithmetic.py"  # reads the factor on a host, where it is there


class Watch(TorchDispatchMode):
    """Counts operations, and notes which of Stepmark's files read a tensor, but for those that make a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if str(func.overloadpacket) in READS:
            self._note()
        return func(*args, **(kwargs or {}))

    def look(self, frame: Any, event: str, called: Any) -> None:
        """A profiling function."""
        reads = event == "c_call" and getattr(called, "__name__", "") in READERS
        if reads and isinstance(getattr(called, "__self__", None), Tensor):
            self._note()

    def _note(self) -> None:
        paths = [Path(frame.filename).as_posix() for frame in traceback.extract_stack()]
        innermost = next((path for path in reversed(paths) if "site-packages" not in path and path != __file__), "")
        if "/stepmark/data/loader/" not in innermost and "/modeling_" not in "".join(paths):
            self.reads.append(innermost.partition("/stepmark/")[2])


class Counter(TrainerCallback):
    """Watches one step, from the end of another to its own."""

    def __init__(self) -> None:
        self.watch, self._ended = Watch(), 0

    def tick(self) -> None:
        self._ended += 1
        if self._ended == WARM_UP:
            self.watch.__enter__()
            sys.setprofile(self.watch.look)
        elif self._ended == WARM_UP + 1:
            sys.setprofile(None)
            self.watch.__exit__(None, None, None)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tick()


def model_of(kind: str, layers: int) -> Any:
    """One without long tensors, whose norm is several operations on a host."""
    narrow = {"intermediate_size": 16} if kind == "mixtral" else {}
    model = build(kind, num_hidden_layers=layers, **narrow)
    assert all(each.numel() < LONG for each in model.parameters())
    model.config.use_cache = False
    return model.train()


def by_hand(kind: str, layers: int, accumulation: int, *, bf16: bool) -> int:
    """Operations of a step."""
    model, counter = model_of(kind, layers), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = iter(torch.utils.data.DataLoader(Blocks(ROWS * STEPS * accumulation, ragged=False), ROWS))
    for _ in range(STEPS):
        for _ in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**next(batches)).loss
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SMALL)
        optimizer.step()
        optimizer.zero_grad()
        counter.tick()
    return counter.watch.count


def watched(kind: str, layers: int, accumulation: int, folder: Path, **options: Any) -> Watch:
    args = TrainingArguments(
        output_dir=str(folder / f"{kind}-{layers}"),
        device="cpu",
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=SMALL,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )
    counter, data = Counter(), Blocks(ROWS * STEPS * accumulation, ragged=False)
    Trainer(model_of(kind, layers), args, train_dataset=data, callbacks=[counter]).train()
    return counter.watch


@pytest.mark.parametrize(("accumulation", "bf16"), [(1, False), (3, True)])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "qwen3_moe"])
def test_layers_add_no_operations_and_nothing_is_read(kind: str, bf16: bool, accumulation: int, tmp_path: Path) -> None:
    added = {}
    for layers in (SHALLOW, DEEP):
        watch = watched(kind, layers, accumulation, tmp_path, bf16=bf16)
        added[layers] = watch.count - by_hand(kind, layers, accumulation, bf16=bf16)
        assert watch.reads == [CLIPS]
    each = OF_EXPERTS * accumulation if kind in ("mixtral", "qwen3_moe") else 0
    assert added[DEEP] - added[SHALLOW] == (DEEP - SHALLOW) * each
    assert added[SHALLOW] <= MOST + (accumulation - 1) * MOST_OF_MICRO_BATCH + each
