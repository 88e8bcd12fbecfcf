"""Rows of chat data as conversations: messages in the forms that data sets have, or an instruction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepmark.errors import DataError

Message = dict[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
# Columns of instruction sets: the question, what belongs to it, the answer.
INSTRUCTIONS = (("prompt", "", "completion"), ("instruction", "input", "output"), ("question", "context", "answer"))
SHAREGPT = "conversations"
# Other names of roles, which ShareGPT's messages have in `from`.
ALIASES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", "bing", "bard"), ASSISTANT),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
_READ = ("tools", "chat_template_kwargs", "system")
# What would change what is trained on, and has another name here.
_UNREAD = {"functions": "name it tools", "history": "put those turns into the messages", "weight": "repeat the row"}
_UNREAD_OF_MESSAGES = dict.fromkeys(("train", "training", "trainable", "loss", "loss_mask"), "set weight: 0")


@dataclass(frozen=True)
class Chat:
    """A conversation: its messages, the tools that they may call, variables for the template, the numbers of messages
    without loss, and the columns of the row that are not read."""

    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    without_loss: frozenset[int] = frozenset()
    unread: tuple[str, ...] = ()


def read_chat(row: Any, column: str, where: str, answers_alone: bool) -> Chat:
    """The conversation in a row. With `answers_alone` there is no loss on answers in a `prompt`.

    Raises DataError, which begins with `where`, for a row without a conversation, or with a field that is not used.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: should be an object with columns, and is a {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}
    _refuse_unread(row, _UNREAD, where)
    name = next((each for each in (column, SHAREGPT) if each in row), None)
    found, prompt = (row[name], 0) if name is not None else _instruction(row, column, where)
    if not isinstance(found, (list, tuple)) or not found:
        raise DataError(f"{where}: {name or column} should be a list of messages with role and content")
    messages = [_message(each, f"{where}, message {number}") for number, each in enumerate(found, 1)]
    if row.get("system") and isinstance(row["system"], str) and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": row["system"]})
        prompt += prompt > 0
    weights = [message.pop("weight", 1) for message in messages]
    return Chat(
        messages,
        _parsed(row.get("tools"), list, f"{where}: tools"),
        _parsed(row.get("chat_template_kwargs"), dict, f"{where}: chat_template_kwargs") or {},
        frozenset(n for n, weight in enumerate(weights) if weight == 0 or (answers_alone and prompt > n)),
        tuple(key for key in row if key not in (name, *_READ)),
    )


def _instruction(row: Mapping[str, Any], column: str, where: str) -> tuple[list[Any], int]:
    """The messages of a question and its answer, each a text or messages; and the number of those of the question."""
    for question, more, answer in INSTRUCTIONS:
        asked, said = row.get(question), row.get(answer)
        if not isinstance(asked, (str, list)) or not isinstance(said, (str, list)):
            continue
        if isinstance(asked, str):
            asked = [{"role": "user", "content": "\n\n".join(filter(None, (asked, row.get(more))))}]
        said = [{"role": ASSISTANT, "content": said}] if isinstance(said, str) else said
        return [*asked, *said], len(asked)
    known = "; ".join(" and ".join((question, answer)) for question, _, answer in INSTRUCTIONS)
    raise DataError(
        f"{where}: has no {column}, and no instruction ({known}) or {SHAREGPT}; its columns are "
        f"{', '.join(map(str, row))}"
    )


def _message(given: Any, where: str) -> Message:
    """A message with `role` and `content`, without null values. Raises DataError for one without content."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role", given.get("from")), str):
        raise DataError(f"{where}: should have role and content (or from and value)")
    message = {key: value for key, value in given.items() if value is not None and key not in ("from", "value")}
    if "role" not in message:
        message["role"] = ALIASES.get(given["from"].lower(), given["from"])
    if message["role"] in ALIASES:
        raise DataError(f"{where}: role {message['role']!r} is unknown; name it {ALIASES[message['role']]!r}")
    content = given.get("content", given.get("value"))
    message["content"] = "" if content is None else content
    if content is None and not message.get("tool_calls"):
        raise DataError(
            f"{where}: content of the {message['role']} is null, without tool_calls; give it a text, or leave the "
            "message out"
        )
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: weight {weight!r} is not used; it should be 0 (no loss on the message) or 1")
    _refuse_unread(message, _UNREAD_OF_MESSAGES, where)
    return message


def _refuse_unread(values: Mapping[str, Any], unread: Mapping[str, str], where: str) -> None:
    for name in unread:
        if values.get(name) in (None, "", [], {}, 1):
            continue
        raise DataError(f"{where}: {name} is not used; {unread[name]}, or leave it out")


def _parsed(value: Any, kind: type, where: str) -> Any:
    """A list or object, which may be written as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if found is not None and not isinstance(found, kind):
        raise DataError(f"{where}: should be {'a list' if kind is list else 'an object'}, not {value!r:.60}")
    return found or None
