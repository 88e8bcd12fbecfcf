"""The trainings that survival.py kills: each trains the same small model on the same text, saves every few steps, and
continues from what is in its folder when it is started again, as its own documentation says.

    python benchmarks/survival_contestants.py CONTESTANT FOLDER NOTES RANKS
    python benchmarks/survival_contestants.py CONTESTANT --serve

The first command starts a training, or continues it. The second imports the contestant's packages once and does the
same in a fork for each line of standard input that has the last three arguments, as a JSON list, and a file for what it
prints. It prints the fork's process id, and its exit code when it has ended.

NOTES gets a line when a rank begins, the number of steps from which rank 0 goes on, a line for each step that it
begins, and the digest of the final weights.

What was chosen for all: GPT-2 with dropout in float32, 1.7 million parameters; AdamW; a constant learning rate; 8
samples a step on all ranks together, shuffled, 40 steps of 25 to the epoch; a save every 5 steps, of which 2 are kept.
faults.py sets other numbers in the environment, and asks for the weights and for an agent that starts ranks again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

STEPS = int(os.environ.get("SURVIVAL_STEPS", "40"))
EVERY, KEPT = int(os.environ.get("SURVIVAL_SAVE_EVERY", "5")), 2
SAMPLES, BLOCK, BATCH = 200, 32, 8
STEPS_AN_EPOCH = SAMPLES // BATCH
LEARNING_RATE = 1e-3
PAUSE = float(os.environ.get("SURVIVAL_PAUSE", "0.05"))  # seconds in each step, as if the model were larger
RESTARTS = int(os.environ.get("SURVIVAL_RESTARTS", "0"))  # by torchrun's agent
WEIGHTS = os.environ.get("SURVIVAL_WEIGHTS")  # the name of a file beside NOTES

Training = Callable[[Path], nn.Module]  # trains in a folder, from what is there; returns the model
Launch = Callable[[Training, Path, int], None]  # on so many ranks


def world_size() -> int:
    """Of all that train; with torchft the number of replica groups, of one rank each."""
    return int(os.environ.get("NUM_REPLICA_GROUPS") or os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("REPLICA_GROUP_ID") or os.environ.get("RANK", "0"))


def note(*words: object) -> None:
    """One write at the end of the file, so that ranks do not cut each other's lines."""
    descriptor = os.open(os.environ["SURVIVAL_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def make_model() -> nn.Module:
    model = plain_model()
    model.register_forward_pre_hook(begin_step)
    return model


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_embd=256, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def begin_step(model: nn.Module, _: object) -> None:
    if model.training and rank() == 0:
        note("step")
        time.sleep(PAUSE)


def whole_parameters(model: nn.Module) -> list[Tensor]:
    """All ranks have to call it."""
    values = [parameter.detach() for parameter in model.parameters()]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).contiguous() for each in values]


def digest(parameters: list[Tensor]) -> str:
    """Of all their bits."""
    whole = hashlib.sha256()
    for each in parameters:
        whole.update(each.view(torch.uint8).numpy())
    return whole.hexdigest()[:16]


class Texts(Dataset[dict[str, Tensor]]):
    """Bytes of the standard library's sources, each byte a token."""

    def __init__(self) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(source.read_bytes() for source in sources[:20])[: SAMPLES * BLOCK]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(SAMPLES, BLOCK)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def prune(folder: Path, pattern: str) -> None:
    """Deletes all but the newest, as a loop by hand does once a save has ended."""
    if rank() == 0:
        found = sorted(folder.glob(pattern), key=lambda each: int(each.name[len(pattern) - 1 :]))
        for each in found[:-KEPT]:
            shutil.rmtree(each)


# transformers, TRL, Stepmark


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // world_size(),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": EVERY,
        "save_total_limit": KEPT,
        "seed": 0,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }


class Notes(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if rank() == 0:
            note("from", state.global_step)


def transformers_trainer(**more: Any) -> Training:
    """Its examples pass what `get_last_checkpoint` finds to `train`. `full_determinism` is its option for equal runs;
    `enable_jit_checkpoint` the one for SIGTERM, of a contestant of its own."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    def train(folder: Path) -> nn.Module:
        options = TrainingArguments(**arguments(folder), full_determinism=True, **more)
        trainer = Trainer(make_model(), options, train_dataset=Texts(), callbacks=[Notes()])
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
        assert isinstance(trainer.model, nn.Module)
        return trainer.model

    return train


def sft_trainer() -> Training:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    def train(folder: Path) -> nn.Module:
        words = Tokenizer(WordLevel({f"<{byte}>": byte for byte in range(256)}, unk_token="<0>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<0>")
        options = SFTConfig(
            **arguments(folder), full_determinism=True, bf16=False, gradient_checkpointing=False, max_length=BLOCK
        )
        table = Table.from_dict({"input_ids": Texts().tokens.tolist()})
        trainer = SFTTrainer(make_model(), options, train_dataset=table, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
        assert isinstance(trainer.model, nn.Module)
        return trainer.model

    return train


def stepmark_trainer(**more: Any) -> Training:
    from stepmark import Trainer, TrainingArguments

    def train(folder: Path) -> nn.Module:
        options = TrainingArguments(**arguments(folder), **more)
        trainer = Trainer(make_model(), options, train_dataset=Texts(), callbacks=[Notes()])
        trainer.train(resume_from_checkpoint=True)
        return trainer.model

    return train


# accelerate, Lightning


def accelerate_loop(*, with_generator: bool = False) -> Training:
    """As its examples/by_feature/checkpointing.py and complete_nlp_example.py: folders `step_N`, the newest is loaded
    (by its number: by its time, as there, it could be one that was being deleted), and `skip_first_batches`; with its
    seedable sampler. `with_generator`: the loader has a generator of its own, so that one which skips batches leaves
    torch's alone, which it does not by itself."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    def train(folder: Path) -> nn.Module:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        set_seed(0)
        plain = make_model()
        its_own = torch.Generator() if with_generator else None
        loader = DataLoader(Texts(), BATCH // accelerator.num_processes, shuffle=True, generator=its_own)
        model, optimizer, loader = accelerator.prepare(plain, adamw(plain), loader)
        step = 0
        found = sorted(folder.glob("step_*"), key=lambda each: int(each.name[5:]))
        if found:
            accelerator.load_state(str(found[-1]))
            step = int(found[-1].name.removeprefix("step_"))
        skipped = step % STEPS_AN_EPOCH
        for epoch in range(step // STEPS_AN_EPOCH, -(-STEPS // STEPS_AN_EPOCH)):
            loader.set_epoch(epoch)
            batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
            skipped = 0
            for batch in batches:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % EVERY == 0:
                    accelerator.save_state(str(folder / f"step_{step}"))
                    prune(folder, "step_*")
                if step == STEPS:
                    break
        return accelerator.unwrap_model(model)

    return train


def lightning_trainer(*, with_generators: bool = False) -> Training:
    """`ModelCheckpoint(save_last=True, save_on_exception=True)`, which saves at SIGTERM too, with `ckpt_path="last"`,
    and torchdata's StatefulDataLoader, whose state it saves. `with_generators`: a callback of ours adds the state of
    torch's generator, which it does not save."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    class Generators(Callback):
        saved: Tensor | None = None

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["generator"] = torch.get_rng_state()

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.saved = checkpoint["generator"]

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            """An epoch that begins is shuffled with it."""
            if self.saved is not None:
                torch.set_rng_state(self.saved)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            """One that goes on was shuffled before."""
            if self.saved is not None and index > 0:
                torch.set_rng_state(self.saved)
            self.saved = None

    def train(folder: Path) -> nn.Module:
        lightning.seed_everything(0)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size(),
            max_steps=STEPS,
            deterministic=True,
            default_root_dir=folder,
            callbacks=[
                ModelCheckpoint(
                    folder / "checkpoints", every_n_train_steps=EVERY, save_last=True, save_on_exception=True
                ),
                *([Generators()] if with_generators else []),
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, StatefulDataLoader(Texts(), batch_size=BATCH, shuffle=True), ckpt_path="last")
        return module.model

    return train


# FSDP2 with torch.distributed.checkpoint, torchtitan's component, Stepmark's dcp


def start_group() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class App(Stateful):
    """Model and optimizer, as in torch's tutorial of DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Progress(Stateful):
    """The step, and this rank's random numbers."""

    def __init__(self) -> None:
        self.step = 0
        torch.manual_seed(rank())

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), f"generator of {rank()}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        torch.set_rng_state(state[f"generator of {rank()}"])


def sharded_model() -> nn.Module:
    model = make_model()
    for layer in model.transformer.h:
        fully_shard(layer)
    fully_shard(model)
    return model


def batch_of(texts: Texts, step: int) -> dict[str, Tensor]:
    """The rank's share, in an order that depends on the epoch alone."""
    epoch, index = divmod(step, STEPS_AN_EPOCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    share = order[index * BATCH : (index + 1) * BATCH].tensor_split(world_size())[rank()]
    return {"input_ids": texts.tokens[share], "labels": texts.tokens[share]}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Iterator[int]:
    """Trains, and yields the number of each step that was done."""
    texts = Texts()
    if rank() == 0:
        note("from", progress.step)
    while progress.step < STEPS:
        model(**batch_of(texts, progress.step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        yield progress.step


def fsdp2_loop(dcp: Any, *, asynchronous: bool, complete: str = "") -> Training:
    """The newest folder is loaded, or the newest that has the file `complete`: torch's documentation leaves the choice
    to the loop. DCP writes `.metadata` last, and torchtitan looks for it. `async_save` gets a group of its own, as in
    torchtitan: on a CPU it would share one with FSDP2."""

    def train(folder: Path) -> nn.Module:
        start_group()
        model = sharded_model()
        optimizer = adamw(model)
        progress = Progress()
        state = {"app": App(model, optimizer), "progress": progress}
        found = [each for each in folder.glob("step-*") if (each / complete).exists()]
        if found:
            dcp.load(state, checkpoint_id=max(found, key=lambda each: int(each.name[5:])))
        group = dist.new_group(backend="gloo") if asynchronous else None
        saving: Any = None
        for step in steps(model, optimizer, progress):
            if step % EVERY:
                continue
            if asynchronous:
                if saving is not None:
                    saving.result()
                prune(folder, "step-*")
                saving = dcp.async_save(state, checkpoint_id=folder / f"step-{step}", process_group=group)
            else:
                dcp.save(state, checkpoint_id=folder / f"step-{step}")
                prune(folder, "step-*")
        if saving is not None:
            saving.result()
        return model

    return train


def dcp_loop(*, asynchronous: bool, complete: str = ".metadata") -> Training:
    return fsdp2_loop(torch.distributed.checkpoint, asynchronous=asynchronous, complete=complete)


def stepmark_dcp_loop() -> Training:
    """The loop of "DCP async_save, newest folder" with the import changed."""
    from stepmark.checkpoint import dcp

    return fsdp2_loop(dcp, asynchronous=True)


def torchtitan_loop() -> Training:
    """Its CheckpointManager and its optimizers, with asynchronous saves, in the same FSDP2 loop."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw

    class Nothing(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def train(folder: Path) -> nn.Module:
        start_group()
        model = sharded_model()
        chosen = default_adamw(LEARNING_RATE)
        chosen.implementation = "foreach"  # its default is CUDA's
        optimizer = OptimizersContainer(chosen, model_parts=[model])
        progress = Progress()
        manager = CheckpointManager(
            CheckpointManager.Config(
                enable=True, interval=EVERY, keep_latest_k=KEPT, async_mode="async", last_save_model_only=False
            ),
            dataloader=Nothing(),
            model_parts=[model],
            optimizers=optimizer,
            lr_schedulers=Nothing(),
            states={"train_state": progress},
            sd_adapter=None,
            base_folder=str(folder),
        )
        manager.load()
        for step in steps(model, optimizer, progress):
            manager.save(step, last_step=step == STEPS)
        manager.close()
        return model

    return train


CONTESTANTS: dict[str, Callable[[], Training]] = {
    "Stepmark": stepmark_trainer,
    "transformers": transformers_trainer,
    "DCP save": lambda: dcp_loop(asynchronous=False),
    "DCP async_save": lambda: dcp_loop(asynchronous=True),
    "DCP async_save, newest folder": lambda: dcp_loop(asynchronous=True, complete=""),
    "Stepmark dcp": stepmark_dcp_loop,
    "accelerate": accelerate_loop,
    "accelerate, generator": lambda: accelerate_loop(with_generator=True),
    "Lightning": lightning_trainer,
    "Lightning, generator": lambda: lightning_trainer(with_generators=True),
    "torchtitan": torchtitan_loop,
    "TRL": sft_trainer,
    "transformers, JIT": lambda: transformers_trainer(enable_jit_checkpoint=True),
}


def be_rank(train: Training, folder: Path) -> None:
    if RESTARTS:  # else a fork has the agent's handler, which does not run while gloo waits for a dead rank
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    note("begin", rank(), os.getpid())
    weights = whole_parameters(train(folder))
    if rank() == 0:
        if WEIGHTS is not None:
            torch.save(weights, Path(os.environ["SURVIVAL_NOTES"]).with_name(WEIGHTS))
        note("end", digest(weights))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(train: Training, folder: Path, ranks: int) -> None:
    """Several ranks are started by torchrun's own agent, as forks, for what they import is there already."""
    if ranks == 1:
        be_rank(train, folder)
    else:
        run_agent(train, folder, ranks)


def run_agent(train: Training, folder: Path, ranks: int) -> None:
    config = LaunchConfig(
        1,
        1,
        ranks,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{free_port()}",
        start_method="fork",
        max_restarts=RESTARTS,
    )
    elastic_launch(config, be_rank)(train, folder)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def wait_for_start() -> list[Any]:
    """Returns in a fork for each line, with what the line has; ends with standard input."""
    for line in sys.stdin:
        *words, output = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            descriptors = (os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
            for target, source in enumerate((descriptors[0], descriptors[1], descriptors[1])):
                os.dup2(source, target)
            for descriptor in descriptors:
                os.close(descriptor)
            os.environ["TMPDIR"] = tempfile.tempdir = str(Path(output).parent / "temporary")
            return words
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def main(contestants: Mapping[str, Callable[[], Training]] = CONTESTANTS, start: Launch = launch) -> None:
    name, *words = sys.argv[1:]
    train = contestants[name]()
    if words == ["--serve"]:
        print("ready", flush=True)
        words = wait_for_start()
    folder, notes, ranks = words
    os.environ["SURVIVAL_NOTES"] = notes
    start(train, Path(folder), int(ranks))


if __name__ == "__main__":
    main()
