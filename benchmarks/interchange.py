"""Speed and peak memory of `stepmark import` and `export` beside `cp` of the same bytes, and `dcp.load` of the store.

    .venv/bin/python benchmarks/interchange.py --gigabytes 8 --folder /a/disk

Made-up states of a Llama and its AdamW: as a folder of transformers' Trainer, and as neuronx-distributed's shards of 8
tensor parallel ranks with ZeRO-1; the same of 32 layers in bf16 with master weights; the weights of a Llama of 7B's
sizes in such shards, in bf16; and 80,000 small tensors in one file. Command and cp run in turn, round after round, each
from a source that is not in the page cache, and each until its bytes are on the disk: cp is followed by fsync of its
files, since an import returns when it is durable. The command's time is that of its process, start and all. `--dcp`
compares with torch.distributed.checkpoint, whose time is without the import of torch. `--save` appends the results to
results/interchange.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from page_cache import drop_cache

HIDDEN, INNER, VOCABULARY, HEADS, RANKS = 1024, 2816, 32000, 16, 8
COMMAND = (sys.executable, "-m", "stepmark")
BARS = {"speed": 0.8, "megabytes": 512}


def config(layers: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """All parameters, in the model's order."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        found |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_trainer_folder(folder: Path, gigabytes: float) -> None:
    """Weights, moments and the rest as transformers' Trainer saves them. In a process of its own: a child's peak memory
    is counted from its parent's."""
    import torch
    from safetensors.torch import save_file

    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    layers = max(1, round((gigabytes * 1e9 / 12 - 2 * VOCABULARY * HIDDEN) / layer))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    found = shapes(layers)
    save_file({name: torch.rand(shape) for name, shape in found.items()}, folder / "model.safetensors")
    groups = [[n for n in found if "norm" not in n], [n for n in found if "norm" in n]]
    order = [name for group in groups for name in group]
    state = {
        number: {"step": torch.tensor(10.0), **{key: torch.rand(found[name]) for key in ("exp_avg", "exp_avg_sq")}}
        for number, name in enumerate(order)
    }
    listed = [
        {"lr": 0.01, "params": list(range(start, start + len(group)))}
        for start, group in zip((0, len(groups[0])), groups, strict=True)
    ]
    torch.save({"state": state, "param_groups": listed}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "epoch": 0.5}))


def timed(source: Path, out: Path, action: Callable[[], Usage]) -> tuple[float, Usage]:
    """Seconds, and what a child process used."""
    shutil.rmtree(out, ignore_errors=True)
    drop_cache(source)
    begin = time.perf_counter()
    used = action()
    return time.perf_counter() - begin, used


class Usage(NamedTuple):
    """Peak memory in MB, and processor seconds."""

    megabytes: int
    seconds: float


def child(*command: str) -> Usage:
    """Runs a command; what it used."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    assert process.stderr is not None
    assert os.waitstatus_to_exitcode(status) == 0, process.stderr.read().decode()[-2000:]
    return Usage(usage.ru_maxrss // 1024, usage.ru_utime + usage.ru_stime)


def copied(source: Path, out: Path) -> float:
    """Seconds of cp and of writing its files out; the second is returned in full."""
    seconds, _ = timed(source, out, lambda: child("cp", "-r", str(source), str(out)))
    begin = time.perf_counter()
    for path in out.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return seconds + time.perf_counter() - begin


def measure(name: str, source: Path, folder: Path, rounds: int, *command: str) -> Path:
    """Runs a command and cp in turn, and prints medians of the ratios within a round; returns what it wrote."""
    out, copy = folder / "out", folder / "copy"
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    ratios, times, usages = [], [], []
    for number in range(rounds):
        call = [*COMMAND, command[0], str(source), str(out), *command[1:]]
        pair: dict[str, float] = {}
        for what in ("own", "cp") if number % 2 else ("cp", "own"):
            if what == "own":
                pair["own"], used = timed(source, out, partial(child, *call))
                usages.append(used)
            else:
                pair["cp"] = copied(source, copy)
        shutil.rmtree(copy)
        ratios.append(pair["cp"] / pair["own"])
        times.append(pair["own"])
    speed, peak = statistics.median(ratios), max(used.megabytes for used in usages)
    processor = statistics.median(used.seconds for used in usages)
    held = speed >= BARS["speed"] and peak <= BARS["megabytes"]
    say(
        f"{name}: {size / 1e9:.2f} GB in {statistics.median(times):.1f} s ({processor:.1f} s of processors), "
        f"{speed:.2f} of cp's speed ({min(ratios):.2f} to {max(ratios):.2f}; bar 0.8), {peak} MB (bar 512)"
        f"{'' if held else '  MISSED'}"
    )
    kept = folder / name.replace(" ", "-")
    out.rename(kept)
    return kept


LOAD = """
import sys, time, warnings
import torch
import torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
found = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in found.items() if hasattr(m, "size")}
begin = time.perf_counter()
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
print(time.perf_counter() - begin)
"""
SAVE = LOAD + "dcp.save(state, checkpoint_id=sys.argv[2], no_dist=True)\nprint(time.perf_counter() - begin)\n"


def beside_torch(store: Path, own: Path, folder: Path, rounds: int) -> None:
    """`stepmark import` of a store that torch wrote, and `export` of what that gave, start and all, each beside torch's
    load and save of the same tensors, in turn."""
    calls = {
        "import of torch's store": (store, "import", str(store), str(folder / "out"), "--config", str(store)),
        "export to dcp": (own, "export", str(own), str(folder / "out"), "--to", "dcp"),
    }
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shutil.rmtree(folder / "again", ignore_errors=True)
        drop_cache(store)
        command = [sys.executable, "-c", SAVE, str(store), str(folder / "again")]
        theirs = float(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[-1])
        for name, (source, *call) in calls.items():
            seconds, _ = timed(source, folder / "out", partial(child, *COMMAND, *call))
            ratios[name].append(theirs / seconds)
            shutil.rmtree(folder / "out")
    for name, found in ratios.items():
        say(f"{name} beside dcp.load and dcp.save of its tensors: {in_words(found)} of the speed")


def in_words(ratios: list[float]) -> str:
    """The median, and how far they differ."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


SAID: list[str] = []


def say(line: str) -> None:
    """Prints a result, and keeps it."""
    SAID.append(line)
    print(line, flush=True)


def save_results() -> None:
    """Keeps what was said, with the machine it was measured on."""
    import keeping  # imports torch, and a child's peak memory is counted from its parent's

    keeping.keep("interchange", " ".join(sys.argv[1:]), "\n".join([keeping.machine(), *(f"- {line}" for line in SAID)]))


def load_with_torch(source: Path) -> float:
    """Seconds of `dcp.load` of a store's tensors into memory, from a cold cache."""
    drop_cache(source)
    return float(subprocess.run([sys.executable, "-c", LOAD, str(source)], capture_output=True, check=True).stdout)


def save_with_torch(source: Path, out: Path) -> None:
    """The same state as torch's own writer saves it."""
    subprocess.run([sys.executable, "-c", SAVE, str(source), str(out)], capture_output=True, check=True)


def make_shards(folder: Path, layers: int) -> None:
    """The weights of a Llama of 7B's sizes, in bf16, as neuronx-distributed's ranks save them with tp 8: generated, a
    rank at a time."""
    import torch

    hidden, inner, vocabulary = 4096, 11008, 32000
    (folder / "step_1" / "model").mkdir(parents=True)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    (folder / "config.json").write_text(json.dumps({**config(layers), **sizes, **heads}))
    for rank in range(RANKS):
        generator = torch.Generator().manual_seed(rank)

        def drawn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

        norm = torch.ones(hidden, dtype=torch.bfloat16)
        state = {"model.embed_tokens.weight": drawn(vocabulary // RANKS, hidden)}
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            state |= {f"{prefix}.self_attn.{name}_proj.weight": drawn(hidden // RANKS, hidden) for name in "qkv"}
            state[f"{prefix}.self_attn.o_proj.weight"] = drawn(hidden, hidden // RANKS)
            state |= {f"{prefix}.mlp.{name}_proj.weight": drawn(inner // RANKS, hidden) for name in ("gate", "up")}
            state[f"{prefix}.mlp.down_proj.weight"] = drawn(hidden, inner // RANKS)
            state |= {f"{prefix}.{name}_layernorm.weight": norm.clone() for name in ("input", "post_attention")}
        state |= {"model.norm.weight": norm, "lm_head.weight": drawn(vocabulary // RANKS, hidden)}
        torch.save(state, folder / "step_1" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    for name in ("checkpoint", "done"):
        (folder / "step_1" / name).write_text("1")


def make_zero(folder: Path, layers: int, hidden: int, dp: int) -> None:
    """A Llama in bf16 with fp32 master weights, as neuronx-distributed's ranks save it with tp 8 and ZeRO-1 over `dp`
    ranks: generated, a rank at a time. All bits are drawn, so that nothing is sparse or equal."""
    import torch

    heads, inner, vocabulary = hidden // 64, 11 * hidden // 4, 8 * hidden
    tag = folder / "step_1"
    for name in ("model", "optim"):
        (tag / name).mkdir(parents=True)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    number_of = {"num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps({**config(layers), **sizes, **number_of}))
    cut: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary // RANKS, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        cut |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden // RANKS, hidden) for name in "qkv"}
        cut[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden // RANKS)
        cut |= {f"{prefix}.mlp.{name}_proj.weight": (inner // RANKS, hidden) for name in ("gate", "up")}
        cut[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner // RANKS)
        cut |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    cut |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary // RANKS, hidden)}
    order = [[name for name in cut if "norm" not in name], [name for name in cut if "norm" in name]]
    starts = (0, len(order[0]))
    groups = [
        {"lr": 0.01, "params": list(range(start, start + len(names)))}
        for start, names in zip(starts, order, strict=True)
    ]
    names = [name for group in order for name in group]
    for rank in range(RANKS):
        place = f"tp_rank_{rank:02d}_pp_rank_00.pt"
        for part in range(dp):
            generator = torch.Generator().manual_seed(rank * dp + part)

            def drawn(shape: tuple[int, ...], generator: torch.Generator = generator) -> torch.Tensor:
                rows = (-(-shape[0] // dp), *shape[1:])
                return torch.empty(rows, dtype=torch.float32).uniform_(-1, 1, generator=generator)

            base = {
                number: {"step": torch.tensor(1.0), "exp_avg": drawn(cut[name]), "exp_avg_sq": drawn(cut[name]).abs()}
                for number, name in enumerate(names)
            }
            state = {"state": {}, "param_groups": groups, "base_state": base}
            state["shape_info"] = {number: list(cut[name]) for number, name in enumerate(names)}
            state["sharded_master_weights"] = {number: drawn(cut[name]) for number, name in enumerate(names)}
            torch.save(state, tag / "optim" / f"dp_rank_{part:02d}_{place}")
        generator = torch.Generator().manual_seed(rank)
        weights = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if "norm" in name
            else torch.randint(0, 1 << 14, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
            for name, shape in cut.items()
        }
        torch.save(weights, tag / "model" / f"dp_rank_00_{place}")
    for name in ("checkpoint", "done"):
        (tag / name).write_text("1")


def make_small(folder: Path, count: int) -> None:
    """Very many tensors of 4 KB in one file of torch.save."""
    import torch

    folder.mkdir()
    names = (f"model.layers.{number // 10}.part{number % 10}.weight" for number in range(count))
    torch.save({name: torch.randn(1024) for name in names}, folder / "model.pt")


def made(folder: Path, make: Callable[..., None], *arguments: object) -> Path:
    """A folder that another process made: a child's peak memory is counted from its parent's."""
    maker = get_context("spawn").Process(target=make, args=(folder, *arguments))
    maker.start()
    maker.join()
    return folder


def measure_shards(folder: Path, layers: int, rounds: int) -> None:
    """A 7B-like model's tensor parallel shards, into a Hugging Face folder."""
    source = made(folder / "shards", make_shards, layers)
    measure("import of tp 8 shards", source, folder, rounds, "import", "--model-only", "--config", str(source))
    shutil.rmtree(source)
    shutil.rmtree(folder / "import-of-tp-8-shards")


def measure_zero(folder: Path, layers: int, hidden: int, rounds: int) -> None:
    """Tensor parallel shards with a ZeRO-1 optimizer of two data parallel ranks, into a Stepmark checkpoint."""
    source = made(folder / "zero", make_zero, layers, hidden, 2)
    measure(f"import of {layers} layers in tp 8 shards with ZeRO-1", source, folder, rounds, "import")
    shutil.rmtree(source)


def measure_small(folder: Path, count: int, rounds: int) -> None:
    """A state dict of very many small tensors, into a Hugging Face folder and into a checkpoint."""
    source = made(folder / "small", make_small, count)
    for name, options in (("a folder", ("--model-only",)), ("a checkpoint", ())):
        measure(f"import of {count} small tensors into {name}", source, folder, rounds, "import", *options)
        shutil.rmtree(folder / f"import of {count} small tensors into {name}".replace(" ", "-"))
    shutil.rmtree(source)


def measure_trainer(folder: Path, given: argparse.Namespace) -> None:
    """A checkpoint of transformers' Trainer, in and out, through all formats."""
    rounds = given.rounds
    source = made(folder / "source", make_trainer_folder, given.gigabytes)
    own = measure("import from transformers", source, folder, rounds, "import")
    shutil.rmtree(source)
    if given.only == "import":
        return
    measure("export to transformers", own, folder, rounds, "export", "--to", "hf-trainer")
    shutil.rmtree(folder / "export-to-transformers")
    store = measure("export to dcp", own, folder, rounds, "export", "--to", "dcp")
    measure("import from dcp", store, folder, rounds, "import")
    if given.dcp:
        save_with_torch(store, folder / "theirs")
        ratios = []
        for number in range(rounds):  # each is first in turn
            stores = (folder / "theirs", store)
            seconds = {path: load_with_torch(path) for path in (stores[::-1] if number % 2 else stores)}
            ratios.append(seconds[folder / "theirs"] / seconds[store])
        shutil.copy(store / "config.json", folder / "theirs")
        say(f"dcp.load of ours beside that of torch's own store: {in_words(ratios)} of the speed")
        shutil.rmtree(store)
        beside_torch(folder / "theirs", own, folder, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--layers", type=int, default=32, help="of the 7B-like model")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("import", "shards", "small", "trainer", "zero"), help="one part of it")
    parser.add_argument("--small", type=int, default=80_000, help="how many small tensors")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the model with ZeRO-1")
    parser.add_argument("--dcp", action="store_true", help="also dcp.load of our store beside torch's own")
    parser.add_argument("--save", action="store_true", help="append the results to results/interchange.csv")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        if given.only in (None, "small"):
            measure_small(Path(temporary), given.small, given.rounds)
        if given.only not in ("shards", "small", "zero"):
            measure_trainer(Path(temporary), given)
        if given.only in (None, "zero"):
            measure_zero(Path(temporary), given.layers, given.hidden, given.rounds)
        if given.only in (None, "shards"):
            shutil.rmtree(temporary)
            Path(temporary).mkdir()
            measure_shards(Path(temporary), given.layers, given.rounds)
    if given.save:
        save_results()


if __name__ == "__main__":
    main()
