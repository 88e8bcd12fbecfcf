"""`stepmark generate`: what transformers' own generate writes, of a run's newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepmark.cli.main import run as call
from stepmark.filesystem.printable import printable
from tests.support.recipes import TINY, write_recipe

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIELDS: dict[str, Any] = {
    "max_steps": 2,
    "save_steps": 1,
    "learning_rate": 0.1,
    "disable_tqdm": True,
    "config_overrides": {**TINY, "n_positions": 64, "initializer_range": 1.0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPMARK_CACHE", str(folder / "cache"))
        assert call(["train", str(write_recipe(folder, **FIELDS))]) == 0
    return folder / "out"


def written(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    capsys.readouterr()
    assert call(["generate", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def of_transformers(folder: Path, text: str, seed: int = 42, **options: Any) -> list[str]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(seed)
    made = model.generate(**given, pad_token_id=tokenizer.pad_token_id, **options)
    return [tokenizer.decode(row[given.input_ids.shape[1] :], skip_special_tokens=True) for row in made]


def test_texts_are_those_of_transformers(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = trained / "checkpoint-2"
    assert written(capsys, trained, "the cat") == written(capsys, newest, "the cat")
    greedy = of_transformers(newest, "the cat", max_new_tokens=16)
    assert written(capsys, trained, "the cat", "--max_new_tokens", 16) == greedy
    assert written(capsys, trained / "checkpoint-1", "the cat", "--max_new_tokens", 16) != greedy
    sampling: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "num_return_sequences": 3, "max_new_tokens": 16}
    flags = [part for name, value in sampling.items() for part in (f"--{name}", value)]
    for seed in (1, 2):
        wanted = of_transformers(newest, "the cat", seed, do_sample=True, **sampling)
        made = written(capsys, trained, "the cat", "a", "--do_sample", *flags, "--seed", seed)
        assert made[:3] == wanted
        assert len(set(wanted)) > 1
        assert made[3:] == written(capsys, trained, "a", "--do_sample", *flags, "--seed", seed)  # whatever comes before


def test_text_is_printed_as_it_comes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printable(written(capsys, trained, "the cat")[0])
    for more in ((), ("--num_beams", "1")):
        capsys.readouterr()
        assert call(["generate", str(trained), "the cat", "--device", "cpu", *more]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert call(["generate", str(trained), "the cat", "a", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"--- the cat\n{text}\n--- a\n")


def test_prompts_of_a_file_and_conversations(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, table = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("the cat\n\na\n")
    messages = [{"role": "user", "content": "the cat"}]
    rows = ["the cat", messages, {"messages": messages}, {"prompt": "a"}]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = written(capsys, trained, "--prompts", lines)
    assert texts == [*written(capsys, trained, "the cat"), *written(capsys, trained, "a")]
    assert call(["generate", str(trained), "--prompts", str(table)]) == 2
    assert "no chat template takes these messages" in capsys.readouterr().err
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(trained).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    wanted = of_transformers(model, "<user>the cat\n<assistant>", max_new_tokens=8)
    (text, *chats, other) = written(capsys, model, "--prompts", table, "--max_new_tokens", 8)
    assert [text, *chats] == wanted * 3  # a chat model without a run: texts are what a user says
    assert other != wanted[0]
    plain = of_transformers(model, "the cat", max_new_tokens=8)
    assert written(capsys, model, "the cat", "--max_new_tokens", 8, "--chat", "false") == plain
    table.write_text('{"text": 3}\n')
    assert call(["generate", str(model), "--prompts", str(table)]) == 2
    assert "should have a text, or messages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT: there is none"),
        (["a", "--temperature", "0.5"], "--temperature: no tokens are drawn; add --do_sample"),
        (["a", "--max_new_tokens", "64"], "64 and the prompt's 1 tokens are more than the model's 64 positions"),
        (["a", "--num_return_sequences", "2"], "transformers refuses to generate"),
        (["a", "--device", "xla"], "xla"),
        (["a", "--prompts", "missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_what_cannot_be_generated(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert call(["generate", str(trained), *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.prove
def test_of_shards_and_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = {**shape, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5}
    new = {"config_name": "llama", "config_overrides": llama, "attn_implementation": "eager"}
    whole, merged = tmp_path / "whole", tmp_path / "merged"
    adapted = {"config_name": None, "config_overrides": None, "model_name_or_path": str(whole), "peft": "lora"}
    texts = []
    for fields, model, more in ((new, whole, []), (adapted, merged, ["--merge-adapters"])):
        run = tmp_path / f"run-{model.name}"
        given = {**FIELDS, **fields, "tensor_parallel_size": 2, "output_dir": str(run)}
        assert call(["train", str(write_recipe(tmp_path, **given)), "--nproc", "2"]) == 0
        assert call(["consolidate", str(run / "checkpoint-2"), str(model), *more]) == 0
        texts.append(written(capsys, run, "the cat", "--do_sample"))
        assert texts[-1] == written(capsys, model, "the cat", "--do_sample")
    assert texts[0] != texts[1]
