"""Conversations as training samples."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from stepmark import Conversations, Trainer, TrainingArguments
from stepmark.errors import DataError, UsageError
from tests.support.models import build
from tests.support.programs import tiny_model

WORDS = ["<pad>", "<user>", "<assistant>", "<end>", "hello", "there", "how", "are", "you", "fine", "thanks", "?"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = TEMPLATE.replace(
    "<{{ message.role }}> {{ message.content }} <end> ",
    "<{{ message.role }}> {% if message.role == 'assistant' %}{% generation %}{{ message.content }} <end>"
    "{% endgeneration %} {% else %}{{ message.content }} <end> {% endif %}",
)
CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "how are you ?"},
    {"role": "user", "content": "fine"},
    {"role": "assistant", "content": "thanks"},
]
TEXT = "<user> hello there <end> <assistant> how are you ? <end> <user> fine <end> <assistant> thanks <end>"
ANSWERS = [False] * 5 + [True] * 5 + [False] * 4 + [True] * 2


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    found.chat_template = template
    return found


def decoded(ids: torch.Tensor) -> str:
    return " ".join(WORDS[number] for number in ids)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_only_answers_are_targets(template: str) -> None:
    data = Conversations([{"messages": CHAT}], tokenizer(template), assistant_only_loss=True)
    sample = data[0]
    assert decoded(sample["input_ids"]) == TEXT
    assert (sample["labels"] != -100).tolist() == ANSWERS
    assert torch.equal(sample["labels"][sample["labels"] != -100], sample["input_ids"][torch.tensor(ANSWERS)])
    everything = Conversations([{"messages": CHAT}], tokenizer(template))
    assert torch.equal(everything[0]["labels"], everything[0]["input_ids"])
    assert everything.fingerprint != data.fingerprint


def test_a_file_of_conversations_and_instructions(tmp_path: Path) -> None:
    rows = [
        {"chat": CHAT[:2]},
        {"prompt": "hello", "completion": "there"},
        {"instruction": "hello", "input": "there", "output": "thanks"},
        {"question": "how", "answer": "fine"},
    ]
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data = Conversations(path, tokenizer(), messages_column="chat")
    assert [decoded(sample["input_ids"]) for sample in data] == [
        "<user> hello there <end> <assistant> how are you ? <end>",
        "<user> hello <end> <assistant> there <end>",
        "<user> hello there <end> <assistant> thanks <end>",
        "<user> how <end> <assistant> fine <end>",
    ]


def test_what_is_cut_and_left_out_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"prompt": "hello there how are you", "completion": "fine"}]
    with caplog.at_level(logging.WARNING, "stepmark"):
        data = Conversations(rows, tokenizer(), max_length=7, assistant_only_loss=True)
    assert (len(data), data.truncated, data.tokens_left_out, data.rows_left_out) == (2, 3, 9 + 3 + 3, 1)
    assert decoded(data[0]["input_ids"]) == "<user> hello there <end> <assistant> how are"
    assert "of 3, 3 cut to 7 tokens, 15 tokens left out; 1 without a target left out" in caplog.text


@pytest.mark.parametrize(
    ("rows", "template", "error", "message"),
    [
        ([{"messages": CHAT}], None, UsageError, "^tokenizer: has no chat template"),
        ([{"text": "hello"}], TEMPLATE, DataError, "^row 1: has no messages, and no instruction .* columns are text"),
        ([{"messages": "hello"}], TEMPLATE, DataError, "^row 1: messages should be a list of messages with role"),
        ([{"messages": CHAT}, 3], TEMPLATE, DataError, "^row 2: should be an object"),
        ([{"messages": CHAT[:1]}], TEMPLATE, DataError, "none of 1 rows has a target"),
    ],
)
def test_what_is_no_conversation_is_named(rows: Any, template: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Conversations(rows, tokenizer(template), assistant_only_loss=True)
    with pytest.raises(DataError, match="^conversations: there is no file /no/file.jsonl"):
        Conversations("/no/file.jsonl", tokenizer())


def test_a_run_counts_the_answers_alone(tmp_path: Path) -> None:
    data = Conversations([{"messages": CHAT}, {"messages": CHAT[:2]}], tokenizer(), assistant_only_loss=True)
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", disable_tqdm=True, per_device_eval_batch_size=2)
    trainer = Trainer(tiny_model(), args, eval_dataset=data, processing_class=tokenizer())
    found = trainer.evaluate()["eval_loss"]
    total, count = 0.0, 0
    with torch.no_grad():
        for sample in data:
            logits = trainer.model.eval()(input_ids=sample["input_ids"][None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, sample["labels"][1:], reduction="none")
            total, count = total + float(losses.sum()), count + int((sample["labels"][1:] != -100).sum())
    assert count == 12
    assert found == pytest.approx(total / count, rel=1e-5)


# Packing


def turns(*answers: str) -> list[dict[str, Any]]:
    return [{"prompt": "hello", "completion": answer} for answer in answers]


def test_conversations_in_a_block_do_not_see_each_other() -> None:
    data = Conversations(
        turns("fine", "thanks fine"), tokenizer(), max_length=16, assistant_only_loss=True, packing=True
    )
    (block,) = list(data)
    assert decoded(block["input_ids"]) == (
        "<user> hello <end> <assistant> fine <end> <user> hello <end> <assistant> thanks fine <end> <pad> <pad> <pad>"
    )
    assert block["position_ids"].tolist() == [*range(6), *range(7), *range(3)]
    assert (block["labels"] != -100).tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3 + [False] * 3
    sees = block["attention_mask"]
    assert sees.shape == (1, 16, 16)
    assert sees.dtype == torch.bool
    expected = torch.block_diag(*(torch.ones(size, size).tril() for size in (6, 7, 3)))
    assert torch.equal(sees[0], expected.bool())


def test_the_first_token_of_a_packed_conversation_is_no_target() -> None:
    (block,) = list(Conversations(turns("fine", "thanks"), tokenizer(), max_length=12, packing=True))
    assert (block["labels"] == -100).nonzero().flatten().tolist() == [0, 6]


def test_packed_blocks_have_every_conversation_once() -> None:
    rows = turns(*(" ".join(["fine"] * (1 + number % 5)) for number in range(40)))
    alone = Conversations(rows, tokenizer())
    packed = Conversations(rows, tokenizer(), max_length=20, packing=True)
    assert packed.conversations == 40
    assert len(packed) <= 19
    words = "".join(decoded(block["input_ids"]).replace("<pad>", "") for block in packed)
    assert words.count("<user>") == 40
    assert words.count("fine") == sum(decoded(sample["input_ids"]).count("fine") for sample in alone)
    assert packed.fingerprint not in (alone.fingerprint, Conversations(rows, tokenizer(), max_length=21).fingerprint)
    with pytest.raises(UsageError, match="packing and max_length: .* set max_length"):
        Conversations(rows, tokenizer(), packing=True)


def small(family: str) -> Any:
    if family in ("llama", "gpt2", "qwen3"):
        return build(family)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4} if family == "stablelm" else {}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](vocab_size=67, pad_token_id=0, **shape))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox", "phi", "olmo2", "stablelm", "granite"])
def test_packed_conversations_train_as_each_alone(tmp_path: Path, family: str) -> None:
    """The gradient of a step is that of the same conversations unpacked: nothing leaks from one to the next."""
    rows = turns(*(" ".join(WORDS[4 + (number + each) % 8] for each in range(1 + number % 3)) for number in range(8)))
    losses, weights = [], []
    for packing in (False, True):
        data = Conversations(rows, tokenizer(), max_length=24, assistant_only_loss=True, packing=packing)
        model = small(family)
        args = TrainingArguments(
            output_dir=str(tmp_path / f"{packing}"),
            max_steps=1,
            per_device_train_batch_size=len(data),
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            device="cpu",
        )
        trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer())
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        weights.append(torch.cat([value.flatten() for value in trainer.model.parameters()]))
    assert len(data) < 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


SAYS = [("user", "hello", {}), ("assistant", "how", {}), ("user", "are", {}), ("assistant", "you", {})]


def row_with(message: dict[str, Any], number: int = 1, **columns: Any) -> dict[str, Any]:
    """A conversation with further keys in a message and in the row."""
    messages = [{"role": role, "content": said} for role, said, _ in SAYS]
    messages[number] |= message
    return {"messages": messages, **columns}


@pytest.mark.parametrize("key", ["loss_scale", "loss_weight", "label", "supervise", "train", "loss"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_says_that_a_message_is_not_trained_is_refused(key: str, alone: bool) -> None:
    remedy = f"^row 1, message 2: {key} is not used; set weight: 0, or leave it out"
    for value in (False, 0, 0.0, 0.5, "none"):
        with pytest.raises(DataError, match=remedy):
            Conversations([row_with({key: value})], tokenizer(), assistant_only_loss=alone)
    for value in (None, [], "", True, 1, 1.0):  # what is done anyway
        Conversations([row_with({key: value})], tokenizer(), assistant_only_loss=alone)
    questions = [row_with({key: False}, number=2)]
    if alone:  # no loss on it anyway
        Conversations(questions, tokenizer(), assistant_only_loss=True)
        with pytest.raises(DataError, match=f"^row 1, message 3: {key} is not used; leave it out"):
            Conversations([row_with({key: True}, number=2)], tokenizer(), assistant_only_loss=True)
    else:
        with pytest.raises(DataError, match=f"^row 1, message 3: {key} is not used; set weight: 0"):
            Conversations(questions, tokenizer())
    Conversations([row_with({key: False, "weight": 0})], tokenizer(), assistant_only_loss=alone)


@pytest.mark.parametrize("key", ["mask", "masked", "ignore"])
def test_what_says_that_a_message_is_left_out_is_refused(key: str) -> None:
    for value in (True, 1, "yes"):
        with pytest.raises(DataError, match=f"^row 1, message 2: {key} is not used; set weight: 0"):
            Conversations([row_with({key: value})], tokenizer(), assistant_only_loss=True)
    Conversations([row_with({key: False}), row_with({key: True}, 2)], tokenizer(), assistant_only_loss=True)


def test_details_of_a_message_are_refused() -> None:
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    with pytest.raises(DataError, match="^row 1, message 2: train_detail is not used; set weight: 0"):
        Conversations([row_with({"train_detail": detail})], tokenizer())
    Conversations([row_with({"train_detail": []})], tokenizer())


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ({"mask": "Assistant"}, "set assistant_only_loss, or weight: 0 in messages"),
        ({"label": False}, "remove the row"),
        ({"kto_tag": False}, "remove the row"),
        ({"loss_weight": 0.5}, "repeat the row"),
        ({"images": ["a.png"]}, "this trains on texts: describe it in one"),
        ({"videos": ["a.mp4"]}, "this trains on texts"),
        ({"audios": "a.wav"}, "this trains on texts"),
    ],
)
def test_a_column_that_would_change_what_is_trained_is_refused(
    columns: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    (name,) = columns
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, [row_with({}), row_with({}, **columns)])))
    with pytest.raises(DataError, match=rf"chats.jsonl, row 2: {name} is not used; {remedy}.*, or leave it out"):
        Conversations(path, tokenizer(), assistant_only_loss=True)


def test_a_column_that_says_what_is_done_anyway_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    columns = {
        "mask": False,
        "label": True,
        "kto_tag": True,
        "loss_weight": 1,
        "images": [],
        "videos": None,
        "audios": "",
    }
    Conversations([row_with({}, **columns)], tokenizer())
    Conversations([row_with({}, mask="User")], tokenizer(), assistant_only_loss=True)
    with pytest.raises(DataError, match="mask is not used"):
        Conversations([row_with({}, mask="User")], tokenizer())
    assert caplog.messages == []


def test_what_nothing_reads_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row_with({"name": "Bob"}, 2, score=0.5, id=1), row_with({}, score=0.7), row_with({}, score=None)]
    Conversations(rows, tokenizer())
    assert caplog.messages == ["conversations: nothing reads score (2 rows), id (1 rows), name (1 rows)"]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_column_is_the_first_message(column: str) -> None:
    data = Conversations([row_with({}, **{column: "fine"})], tokenizer(TEMPLATE))
    first = [WORDS[number] for number in data[0]["input_ids"]][:3]
    assert first[1:] == ["fine", "<end>"]
