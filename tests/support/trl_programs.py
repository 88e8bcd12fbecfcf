"""TRL's trainers, plain and on Stepmark, with small models and preferences of random words."""

from __future__ import annotations

import os
import random
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from stepmark.data.loader.batch import MicroBatch, computing
from stepmark.runtime.context import start
from tests.support.programs import CountGraphs, KillAt

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
KINDS = ("SFT", "DPO", "KTO", "Reward")


def word_tokenizer(**special: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", **special)


def save_model(folder: Path, kind: str) -> Path:
    """A model and a tokenizer of words in a folder; the tokenizer's configuration is written last."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForSequenceClassification(config) if kind == "Reward" else LlamaForCausalLM(config)
    model.save_pretrained(folder)
    word_tokenizer(eos_token="<eos>").save_pretrained(folder)
    return folder


def dataset(kind: str, rows: int) -> Any:
    from datasets import Dataset

    draw = random.Random(1)

    def words() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 7)))

    columns: dict[str, list[Any]] = {"prompt": [words() for _ in range(rows)]}
    if kind == "SFT":
        return Dataset.from_dict({"text": columns["prompt"]})
    if kind == "KTO":
        columns |= {"completion": [f" {words()}" for _ in range(rows)], "label": [row % 3 > 0 for row in range(rows)]}
    else:
        columns |= {side: [f" {words()}" for _ in range(rows)] for side in ("chosen", "rejected")}
    return Dataset.from_dict(columns)


def make(kind: str, folder: Path, **options: Any) -> Any:
    """The trainer of a kind, on Stepmark or `plain`; the order of samples is that of the data. `options` are fields of
    its config, and `lora`, `reference` (as a second model), `rows` and `callbacks`."""
    import trl

    import stepmark.trl as on_stepmark

    os.environ["TQDM_DISABLE"] = "1"
    library: Any = trl if options.pop("plain", False) else on_stepmark
    if library is trl and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start("cpu")  # accelerate takes the group that is there
    more: dict[str, Any] = {"callbacks": options.pop("callbacks", None)}
    if options.pop("lora", False):
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    rows, eval_rows = options.pop("rows", 96), options.pop("eval_rows", 0)
    more["eval_dataset"] = dataset(kind, eval_rows) if eval_rows else None
    fields = {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "max_length": 32,
        "model_init_kwargs": {"dtype": "float32"},
        **options,
    }
    if "device" in fields:
        del fields["use_cpu"]
    model = folder / "model"
    if not model.exists() and int(os.environ.get("RANK", "0")) == 0:
        save_model(model, kind)
    wait_for(model / "tokenizer_config.json")
    config = getattr(library, f"{kind}Config")(**fields)
    return getattr(library, f"{kind}Trainer")(model=str(model), args=config, train_dataset=dataset(kind, rows), **more)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def logs(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def trained(kind: str, folder: str, options: dict[str, Any], make: Any = make) -> list[dict[str, float]]:
    """The logs of a run, the last with a number that depends on every bit of the trained weights. `options` are those
    of `make`, which returns the trainer, `resume` and `kill_at`, a step."""
    options = dict(options)
    resume, kill_at = options.pop("resume", False), options.pop("kill_at", None)
    callbacks = [] if kill_at is None else [KillAt(kill_at, None)]
    trainer = make(kind, Path(folder), callbacks=callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
    logs(trainer)[-1]["weights"] = zlib.crc32(save({name: whole(each) for name, each in weights.items()}))
    return logs(trainer)


def history(kind: str, folder: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """All that a run logs and that depends on no clock, and a number of the weights; `options` as in `trained`."""
    made: list[Any] = []

    def keep(*given: Any, **more: Any) -> Any:
        made.append(make(*given, **more))
        return made[0]

    trained(kind, folder, options, keep)
    timed = ("second", "runtime")
    return [
        {name: value for name, value in log.items() if not any(word in name for word in timed)}
        for log in made[0].state.log_history
        if "loss" in log or "eval_loss" in log
    ]


def evaluated(kind: str, folder: str, options: dict[str, Any]) -> dict[str, float]:
    """What a run's evaluation logs, without times."""
    trainer = make(kind, Path(folder), **options)
    trainer.train()
    (found,) = (log for log in trainer.state.log_history if "eval_loss" in log)
    return {name: value for name, value in found.items() if "second" not in name and "runtime" not in name}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def graphs(folder: str) -> list[list[int]]:
    """Compilations and executions after each step of SFT on a lazy device."""
    count = CountGraphs()
    trainer = make("SFT", Path(folder), device="xla", max_steps=6, pad_to_multiple_of=32, callbacks=[count])
    count.trainer = trainer
    trainer.train()
    assert all(0 < log["mean_token_accuracy"] < 1 or log["step"] < 3 for log in logs(trainer)), logs(trainer)
    return count.graphs


def gathered() -> list[Any]:
    """What a rank of two gathers: vectors of different lengths, scalars, truths, and the rows of a prepared loader."""
    from stepmark import Trainer, TrainingArguments

    rank = int(os.environ["RANK"])
    trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments(device="cpu", output_dir=tempfile.mkdtemp()))
    accelerator = trainer.accelerator
    rows = torch.arange(rank + 1.0) + 10 * rank
    found = [accelerator.gather(rows), accelerator.gather(torch.tensor(rank)), accelerator.gather(rows > 10)]
    for filled in (1, 2):  # ranks without samples: the others' values, or all if nobody has any
        with computing(MicroBatch({}, int(rank < 2 - filled), None)):
            found.append(accelerator.gather(torch.tensor(float(rank))))
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(9), batch_size=2))  # type: ignore[arg-type]
    read = [value for batch in loader for value in accelerator.gather_for_metrics(batch).tolist()]
    return [*(each.tolist() for each in found), read, accelerator.is_main_process]
