"""`stepmark generate RUN_OR_CHECKPOINT [PROMPT …]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stepmark.errors import UsageError

HELP = "print what a model writes after prompts"
OPTIONS: dict[str, type] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"), float),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "num_return_sequences", "num_beams", "top_k"), int),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    path = "a run's folder (its newest checkpoint), a checkpoint-N folder, or a Hugging Face model folder"
    add("path", metavar="PATH", type=Path, help=path)
    add("prompt", metavar="PROMPT", nargs="*", help="a text to continue, or what a user says to a chat model")
    add("--prompts", type=Path, metavar="FILE", help="a text per line; .jsonl: a text or a list of messages per line")
    chat = "put texts into the chat template (default: as the run was trained, else if there is one)"
    add("--chat", nargs="?", const="true", choices=("true", "false"), help=chat)
    sampled = "draw tokens (default: as in the model's generation_config.json, else the most probable ones)"
    add("--do_sample", nargs="?", const="true", choices=("true", "false"), help=sampled)
    for name, kind in OPTIONS.items():
        add(f"--{name}", type=kind, metavar=kind.__name__.upper(), help="as in transformers' generate")
    add("--seed", type=int, default=42, metavar="INT", help="seed of each prompt's samples (default: 42)")
    device = "auto, cpu, or an accelerator of torch's (default: auto; instead of xla, cpu)"
    add("--device", default="auto", metavar="STR", help=device)
    add("--attn_implementation", metavar="NAME", help="attention, by transformers' name (default: as in the run)")
    add("--trust_remote_code", action="store_true", help="execute Python code that came with the model")
    base = "base model of an adapter: a folder or a name of the hub (default: as in the adapter's configuration)"
    add("--base-model", "--base_model", metavar="MODEL", help=base)
    add("--json", action="store_true", help="print one JSON object per text")


def run(parsed: argparse.Namespace) -> int:
    prompts: list[Any] = [*parsed.prompt, *(_read(parsed.prompts) if parsed.prompts is not None else ())]
    if not prompts:
        raise UsageError("PROMPT: there is none; give one or more, or --prompts FILE")
    options = {name: value for name in OPTIONS if (value := getattr(parsed, name)) is not None}
    if parsed.do_sample is not None:
        options["do_sample"] = parsed.do_sample == "true"
    from stepmark.watcher.generation import open_generator

    generate = open_generator(parsed, options, None if parsed.chat is None else parsed.chat == "true")
    several = len(prompts) > 1 or options.get("num_return_sequences", 1) > 1
    for prompt in prompts:
        texts = generate(prompt, parsed.seed, streams=not several and not parsed.json)
        for text in texts if several or parsed.json else ():
            head = f"--- {prompt if isinstance(prompt, str) else json.dumps(prompt)}\n"
            line = json.dumps({"prompt": prompt, "text": text, "seed": parsed.seed})
            print(line if parsed.json else head + text, flush=True)
    return 0


def _read(path: Path) -> list[Any]:
    """The prompts in a file: texts, or lists of messages. Raises UsageError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts: {path} cannot be read: {error}") from error
    found = [each.get("messages", each.get("prompt")) if isinstance(each, dict) else each for each in found]
    if not found or not all(each and isinstance(each, (str, list)) for each in found):
        raise UsageError(
            f"--prompts: {path} should have a text, or messages as a list or under `messages`, on each line"
        )
    return found
