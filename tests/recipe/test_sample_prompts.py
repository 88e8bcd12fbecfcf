"""`sample_prompts`: at each evaluation the run records what the model writes, as transformers generates it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepmark.cli.main import run as call
from stepmark.config.training_fields import TrainingFields
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import UsageError
from stepmark.evaluation.prompt_samples import PromptSampler, visible
from stepmark.filesystem.json_files import read_lines
from stepmark.report.page import write_report
from stepmark.runtime.eager import EagerRuntime
from tests.support.recipes import write_recipe

TOKENIZER = byte_tokenizer()
PROMPTS = ["the cat", "a"]
FIELDS: dict[str, Any] = {
    "sample_prompts": PROMPTS,
    "sample_tokens": 12,
    "max_steps": 30,
    "learning_rate": 0.02,
    "eval_strategy": "steps",
    "eval_steps": 15,
    "save_steps": 15,
    "disable_tqdm": True,
}


def test_samples_are_what_transformers_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    assert call(["train", str(write_recipe(tmp_path, **FIELDS))]) == 0
    run = tmp_path / "out"
    events = [event for event in read_lines(run / "events.jsonl") if event["event"] == "sample"]
    assert [(event["step"], event["prompt"]) for event in events] == [(s, p) for s in (15, 30) for p in PROMPTS]
    for event in events:
        checkpoint = run / f"checkpoint-{event['step']}"
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        ids = tokenizer(event["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)[0]
        assert event["text"] == tokenizer.decode(made[ids.shape[1] :], skip_special_tokens=True)
    assert any(event["text"] for event in events)
    assert "sample   the cat" in capsys.readouterr().err
    without = {"sample_prompts": None, "sample_tokens": None, "output_dir": str(tmp_path / "plain")}
    assert call(["train", str(write_recipe(tmp_path, **{**FIELDS, **without}))]) == 0
    losses = [
        [line.get("eval_loss") for line in read_lines(each / "metrics.jsonl")] for each in (run, tmp_path / "plain")
    ]
    assert losses[0] == losses[1]  # the run itself is the same with and without samples
    weights = [(each / "model.safetensors").read_bytes() for each in (run, tmp_path / "plain")]
    assert weights[0] == weights[1]
    page = write_report(run).read_text()
    assert '<section id="written">' in page
    assert "<b>the cat</b>" in page


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sample_prompts and eval_strategy: sample_prompts needs evaluations; set eval_strategy"),
        (
            {"eval_strategy": "epoch", "tensor_parallel_size": 2},
            "sample_prompts and tensor_parallel_size: prompts need a complete model",
        ),
        ({"eval_strategy": "epoch", "sample_prompts": [3]}, "sample_prompts: should be one or more texts, and is [3]"),
        ({"eval_strategy": "epoch", "sample_prompts": []}, "sample_prompts: should be one or more texts, and is []"),
        ({"sample_prompts": None, "sample_options": {"do_sample": True}}, "sample_options: is for sample_prompts"),
        ({"eval_strategy": "epoch", "sample_tokens": 0}, "sample_tokens: should be at least 1, and is 0"),
    ],
)
def test_what_cannot_be_sampled_is_said_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainingFields(**{"sample_prompts": "def ", **fields})
    assert message in str(error.value)


def test_prompts_have_to_fit_into_the_model() -> None:
    with pytest.raises(UsageError, match="are 40 tokens, and the model has 32 positions; shorten the prompt, or lower"):
        PromptSampler(TOKENIZER, ["a", "12345678"], 32, 32)
    with pytest.raises(UsageError, match="pass processing_class"):
        PromptSampler(None, ["a"], 4, None)


class Alphabet(torch.nn.Module):
    """Writes the letter that follows the one at each position, the end after d, and then goes on with q; nonsense while
    it is trained."""

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        following = torch.where(input_ids == ord("d"), TOKENIZER.eos_token_id, input_ids + 1)
        following = torch.where(input_ids == TOKENIZER.eos_token_id, ord("q"), following).clamp(max=len(TOKENIZER) - 1)
        logits = torch.nn.functional.one_hot(following, len(TOKENIZER)).float()
        return SimpleNamespace(logits=-logits if self.training else logits)


def test_texts_end_where_the_model_ends_them_and_training_goes_on_as_before() -> None:
    model, drawn = Alphabet(), torch.random.get_rng_state()
    sampler = PromptSampler(TOKENIZER, ["xa", "b", "x"], 5, None)
    ended = TOKENIZER.eos_token
    texts = [("bcd", f"bcd{ended}"), ("cd", f"cd{ended}"), ("yz{|}", "yz{|}")]
    assert sampler.texts(model, EagerRuntime(torch.device("cpu")), None) == texts
    assert model.training
    assert torch.equal(drawn, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "∅"),
        ("a\n\nb", "a↵\n↵\nb"),
        ("a  ", "a··"),
        (" a \n", " a·↵\n"),
        ("a\t\u200bb", r"a\t\u200bb"),
        ("é x", "é x"),
    ],
    ids=["nothing", "lines", "spaces", "both", "no width", "letters"],
)
def test_what_is_invisible_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "sample_options: set do_sample: true"),
        ({"do_sample": True, "num_beams": 2}, "sample_options: num_beams is unknown; it has do_sample, temperature"),
        ({"do_sample": True, "top_p": 2.0}, "sample_options: `top_p` has to be a float"),
    ],
)
def test_options_of_sampling_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PromptSampler(TOKENIZER, ["a"], 4, None, options)


class Uniform(torch.nn.Module):
    """Finds eight letters likely, the first twice as likely as the others, and all other tokens hardly."""

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        scores = torch.full((len(TOKENIZER),), -9.0)
        scores[ord("a") : ord("a") + 8] = 0.0
        scores[ord("a")] = math.log(2)
        return SimpleNamespace(logits=scores.expand(*input_ids.shape, -1))


def test_samples_have_the_models_probabilities_and_their_seed() -> None:
    def drawn(seed: int, **options: Any) -> str:
        sampler = PromptSampler(TOKENIZER, ["x"], 400, None, {"do_sample": True, **options})
        ((text, _),) = sampler.texts(Uniform(), EagerRuntime(torch.device("cpu")), None, seed)
        return text

    text = drawn(1)
    assert text == drawn(1) != drawn(2)
    assert abs(text.count("a") / len(text) - 2 / 9) < 0.08
    assert abs(text.count("b") / len(text) - 1 / 9) < 0.08
    assert set(drawn(1, top_p=0.2)) == {"a"}
    assert drawn(1, temperature=0.2).count("a") > 0.7 * 400  # 2^5 to 7


def test_a_resumed_run_repeats_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    options = {"sample_options": {"do_sample": True, "temperature": 2.0}}
    for name, steps in (("whole", (30,)), ("resumed", (15, 30))):
        for last in steps:
            fields = {**FIELDS, **options, "output_dir": str(tmp_path / name), "max_steps": last}
            more = {"resume_from_checkpoint": True, "lr_scheduler_type": "constant"}
            assert call(["train", str(write_recipe(tmp_path, **fields, **more))]) == 0
    texts = [
        [
            (line["step"], line["text"])
            for line in read_lines(tmp_path / name / "events.jsonl")
            if line["event"] == "sample"
        ]
        for name in ("whole", "resumed")
    ]
    assert texts[0] == texts[1]
    assert len({text for _, text in texts[0]}) == 4
