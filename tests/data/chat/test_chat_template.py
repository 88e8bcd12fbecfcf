"""Rows of chat data under templates that are built as those of well-known models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from stepmark import Conversations
from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.chat_template import ChatTokenizer
from stepmark.data.prepared_data import prepare
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import DataError, UsageError

# The last answer shows its thinking, earlier ones do not; tools and the first system message are before the loop.
THINKING = """
{%- if tools %}{{ '[system]' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '[end]' }}
{%- elif messages[0].role == 'system' %}{{ '[system]' + messages[0].content + '[end]' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for message in messages[::-1] %}{% if message.role == 'user' and ns.asked < 0 %}
{%- set ns.asked = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '[' + message.role + ']' + content + '[end]' }}
{%- elif message.role == 'tool' %}{{ '[user]<result>' + content + '</result>[end]' }}
{%- elif message.role == 'assistant' %}
{{- '[assistant]' }}
{%- if loop.index0 > ns.asked and loop.last %}{{ '<think>' + (message.reasoning_content or '') + '</think>' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}{% set call = call.function or call %}
{{- '<call>' + call.name + (call.arguments if call.arguments is string else call.arguments | tojson) + '</call>' }}
{%- endfor %}{{ '[end]' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}
"""
# The last answer ends otherwise than those before it, a peek is taken at later messages, and a preamble is added.
CHANNELS = """
{%- macro head(role) %}{{ '<start>' + role }}{% endmacro %}
{{- '<start>system<say>Reasoning: ' + effort | default('low') + '<stop>' }}{% set turns = messages %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set turns = messages[1:] %}{% endif %}
{%- for turn in turns %}{% set later = namespace(found=false) %}
{%- for next in turns[loop.index:] %}{% if next.role == 'assistant' %}{% set later.found = true %}{% endif %}
{%- endfor %}
{{- head(turn.role) }}{% if turn.role == 'assistant' %}
{%- if not later.found and turn.thinking %}{{ '<aside>' + turn.thinking + '<stop>' + head('assistant') }}{% endif %}
{{- '<say>' + turn.content + ('<return>' if loop.last and not add_generation_prompt else '<stop>') }}
{%- else %}{{ '<say>' + turn.content + '<stop>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
# What ends the text follows the loop, and roles that it does not know are left out.
ENDED = """
{%- for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] + '<|end|>' }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
"""
# Messages are alternate and looked up by number; the prompt begins the thinking that answers in the text do not have.
NUMBERED = """
{%- for i in range(messages | length) %}{% set message = messages[i] %}
{%- if (message.role == 'user') != (i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- ('<U>' if message.role == 'user' else '<A>') + message.content.split('</think>')[-1] | trim + '<eos>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}
"""
CHATML = """
{%- for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '<e>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(arguments: Any) -> dict[str, Any]:
    return said("assistant", None, tool_calls=[{"function": {"name": "weather", "arguments": arguments}}])


CHAT = [said("user", "hi"), said("assistant", "yo"), said("user", "why"), said("assistant", "so")]
THOUGHT = [*CHAT[:1], said("assistant", "yo", thinking="a"), CHAT[2], said("assistant", "so", reasoning_content="b")]
TOOL_USE = [CHAT[0], called({"city": "Rome"}), said("tool", "20 C"), said("assistant", "warm"), *CHAT[2:]]


def read(template: str, row: Any, *, answers_alone: bool = True) -> tuple[str, list[str]]:
    """The text of a row, and the parts of it that are targets."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    ids, targets = ChatTokenizer(tokenizer, "messages", answers_alone)(row, "row 7")
    runs = itertools.groupby(zip(ids, targets, strict=True), key=lambda pair: pair[1])
    return tokenizer.decode(ids), [tokenizer.decode([each for each, _ in run]) for target, run in runs if target]


@pytest.mark.parametrize(
    ("template", "messages", "answers"),
    [
        (THINKING, CHAT, ["yo[end]", "<think></think>so[end]"]),
        (THINKING, THOUGHT, ["yo[end]", "<think>b</think>so[end]"]),
        (THINKING, [said("system", "be kind"), *CHAT], ["yo[end]", "<think></think>so[end]"]),
        (THINKING, CHAT[1:], ["yo[end]", "<think></think>so[end]"]),
        (CHANNELS, CHAT, ["<say>yo<stop>", "<say>so<return>"]),
        (CHANNELS, THOUGHT, ["<say>yo<stop>", "<aside>b<stop><start>assistant<say>so<return>"]),
        (CHANNELS, [said("system", "be kind"), *CHAT[1:]], ["<say>yo<stop>", "<say>so<return>"]),
        (ENDED, CHAT, ["yo<|end|>", "so<|end|><|endoftext|>"]),
        (NUMBERED, CHAT, ["yo<eos>", "so<eos>"]),
        (NUMBERED, [CHAT[0], said("assistant", "<think>a</think> <b")], ["<b<eos>"]),
        (CHATML, CHAT, ["yo<e>\n", "so<e>\n"]),
        (
            CHATML,
            [said("user", "yo"), said("assistant", "yo"), said("assistant", "\nyo\n")],
            ["yo<e>\n", "\nyo\n<e>\n"],
        ),
    ],
)
def test_answers_of_every_turn_are_targets(template: str, messages: Any, answers: list[str]) -> None:
    text, found = read(template, {"messages": messages})
    assert found == answers
    tokenizer = byte_tokenizer()
    assert text == tokenizer.apply_chat_template(
        [{key: each for key, each in message.items() if key != "weight"} for message in messages],
        chat_template=template,
        tokenize=False,
    )


def test_marks_of_a_template_decide() -> None:
    template = CHATML.replace("+ m.content", "}}{% generation %}{{ m.content }}{% endgeneration %}{{ ''")
    assert read(template, {"messages": CHAT[:2]})[1] == ["hi", "yo"]
    weighted = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert read(template, {"messages": weighted})[1] == ["hi", "why", "so"]


def test_tools_and_variables_of_a_row_reach_the_template() -> None:
    row = {"messages": TOOL_USE, "tools": TOOLS, "id": 3}
    text, answers = read(THINKING, row)
    assert text.startswith("[system]" + json.dumps(TOOLS[0]) + "[end][user]hi[end]")
    assert answers == ['<call>weather{"city": "Rome"}</call>[end]', "warm[end]", "<think></think>so[end]"]
    assert read(THINKING, {**row, "tools": json.dumps(TOOLS)}) == (text, answers)
    assert read(THINKING, {**row, "tools": []})[0].startswith("[user]hi[end]")
    quiet = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert read(THINKING, quiet)[1] == ["yo[end]", "so[end]"]
    assert "Reasoning: high" in read(CHANNELS, {"messages": CHAT, "chat_template_kwargs": {"effort": "high"}})[0]


def test_arguments_that_would_be_written_as_a_string_are_refused() -> None:
    row = {"messages": [CHAT[0], called('{"city": "Rome"}')]}
    assert '<call>weather{"city": "Rome"}</call>' in read(THINKING, row)[0]
    twice = THINKING.replace("call.arguments if call.arguments is string else ", "")
    with pytest.raises(DataError, match="^row 7, message 2: arguments"):
        read(twice, row)


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m.content +", "m.content ~")])
def test_a_message_of_weight_0_has_no_loss(template: str) -> None:
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, {**CHAT[2], "weight": 0}, {**CHAT[3], "weight": 1}]
    assert read(template, {"messages": messages})[1] == ["so<e>\n"]
    everything = read(template, {"messages": messages}, answers_alone=False)[1]
    assert everything == ["<s>user\nhi<e>\n", "<s>assistant\nso<e>\n"]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, ["yo<e>\n"]),
        ({"messages": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]}, ["yo<e>\n"]),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, ["yo<e>\n"]),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, ["so<e>\n"]),
        ({"prompt": "hi", "completion": CHAT[1:2]}, ["yo<e>\n"]),
        ({"prompt": CHAT[:3], "completion": "so", "system": "be kind"}, ["so<e>\n"]),
    ],
)
def test_forms_of_other_data_sets(row: dict[str, Any], answers: list[str]) -> None:
    text, found = read(CHATML, row)
    assert found == answers
    assert "<s>user\nhi<e>\n<s>assistant\nyo<e>\n" in text or "hi<e>\n<s>assistant\nyo<e>\n" in text
    assert text.startswith("<s>system\nbe kind<e>\n") == ("system" in row)


def test_recipes_read_them_from_tables(tmp_path: Path) -> None:
    """Tables of Arrow have a null for every key that another row has."""
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": TOOL_USE, "tools": TOOLS}, {"messages": [CHAT[0], called({"unit": "C"})], "tools": None}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    expected = [sample["input_ids"].tolist() for sample in Conversations(rows, tokenizer)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for source in ({"train_file": "rows.jsonl"}, {"train_file": "rows.parquet"}, {"dataset_name": "saved"}):
        named = {field: str(tmp_path / name) for field, name in source.items()}
        config = DataArguments(**named, messages_column="messages", block_size=2000, validation_split_percentage=0)
        found = prepare(config, tokenizer, folder=tmp_path / "cache").train
        assert [sample["input_ids"].tolist() for sample in found] == expected


@pytest.mark.parametrize(
    ("template", "row", "culprit"),
    [
        (CHATML, {"messages": [said("user", None)]}, "message 1: content of the user is null"),
        (CHATML, {"messages": [said("human", "hi")]}, "'human'"),
        (CHATML, {"messages": [said("critic", "hi")]}, "'critic'"),
        (CHATML, {"conversations": [{"from": "narrator", "value": "hi"}]}, "'narrator'"),
        (ENDED, {"messages": [CHAT[0], said("tool", "20 C")]}, "message 2: .* leaves out what the tool"),
        (ENDED, {"messages": [said("system", "be kind"), *CHAT]}, "message 1: .* leaves out what the system"),
        (ENDED, {"messages": CHAT, "tools": TOOLS}, "tools"),
        (ENDED, {"messages": [CHAT[0], called({"city": "Rome"})]}, "message 2: .* tool_calls"),
        (ENDED, {"messages": [CHAT[0], said("assistant", "yo", reasoning_content="a")]}, "reasoning_content"),
        (ENDED, {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": True}}, "'enable_thinking'"),
        (THINKING, {"messages": CHAT, "enable_thinking": False}, "'enable_thinking'"),
        (THINKING, {"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "'messages'"),
        (THINKING, {"messages": [said("user", [{"type": "text", "text": "hi"}]), CHAT[1]]}, "message 1: .* user"),
        (THINKING, {"messages": CHAT, "tools": "weather"}, "tools: not valid JSON"),
        (THINKING, {"messages": CHAT, "functions": TOOLS}, "functions"),
        (CHATML, {"messages": [said("user", [{"type": "text", "text": "hi"}])]}, "str"),
        (CHATML.replace("+ m.content +", "~ m.content ~"), {"messages": [said("user", [{"text": "hi"}])]}, "parts"),
        (CHATML, {"messages": [*CHAT[:1], {**CHAT[1], "weight": 0.5}]}, "message 2: weight 0.5"),
        (CHATML, {"messages": [*CHAT[:1], {**CHAT[1], "train": False}]}, "message 2: train"),
        (NUMBERED, {"messages": CHAT[1:]}, "roles must alternate.*begins with the assistant"),
        ("{% for m in messages %}{{ m.text + '' }}{% endfor %}", {"messages": CHAT}, "'text'"),
    ],
)
def test_what_a_template_does_not_take_is_named(template: str, row: dict[str, Any], culprit: str) -> None:
    with pytest.raises(DataError, match=f"^row 7.*{culprit}"):
        read(template, row)
    with pytest.raises(DataError, match=culprit):
        read(template, row, answers_alone=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ messages[loop.index0 - 1].content + '>' + m.content }}"
        "{% endif %}{% endfor %}",
        "{{ messages | map(attribute='content') | join('|') }}",
        CHATML.replace("'<s>assistant\n'", "'<answer>'"),
    ],
)
def test_answers_that_a_template_does_not_show_are_an_error(template: str) -> None:
    with pytest.raises(UsageError, match="^assistant_only_loss: .*row 7"):
        read(template, {"messages": CHAT})
    assert read(template, {"messages": CHAT}, answers_alone=False)[1]


def test_a_template_that_is_no_jinja_is_an_error() -> None:
    with pytest.raises(UsageError, match="^tokenizer: .*endfor"):
        read("{% for m in messages %}", {"messages": CHAT})


def test_tokens_across_the_border_of_an_answer_belong_to_it() -> None:
    """Of a tokenizer that joins a space with the word after it, and says so by offsets that leave the space out."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "Ask", ":", "ĠAnswer", "Ġhi", "Ġyo", "Ġ", ".", "Ċ"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Ask: ' if m.role == 'user' else ' Answer: ' }}{{ m.content + '.' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' Answer: ' }}{% endif %}"
    )
    ids, targets = ChatTokenizer(tokenizer, "messages", True)({"messages": CHAT[:2]}, "row 1")
    assert [words[each] for each, target in zip(ids, targets, strict=True) if target] == ["Ġyo", "."]
