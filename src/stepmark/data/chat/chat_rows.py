"""Rows of chat data as conversations: messages in the forms that data sets have, or an instruction."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
_READ = ("tools", "chat_template_kwargs", "system", "system_prompt")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
# What would change what is trained on, and has another name here; and what of it says what is done anyway.
_MEDIA = "this trains on texts: describe it in one"
_UNREAD = {
    "functions": "name it tools",
    "history": "put those turns into the messages",
    "weight": "repeat the row",
    "loss_weight": "repeat the row",
    "mask": "set assistant_only_loss, or weight: 0 in messages",
    **dict.fromkeys(("label", "kto_tag"), "remove the row"),
    **dict.fromkeys(("images", "videos", "audios"), _MEDIA),
}
_HARMLESS: dict[str, Callable[[Any, bool], bool]] = {
    **dict.fromkeys(("weight", "loss_weight"), lambda value, _: value == 1),
    **dict.fromkeys(("label", "kto_tag"), lambda value, _: value is not False),
    "mask": lambda value, answers_alone: value is False or (answers_alone and str(value).lower() == "user"),
}
# Keys of a message that say whether it is trained, and those that say the opposite.
_TRAINED = ("train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "supervise", "label")
_LEFT_OUT = ("mask", "masked", "ignore")


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
    for key, instead in _UNREAD.items():
        value, is_harmless = row.get(key), _HARMLESS.get(key, lambda *_: False)
        if value not in _NOTHING and not is_harmless(value, answers_alone):
            raise DataError(f"{where}: {key} is not used; {instead}, or leave it out")
    name = next((each for each in (column, SHAREGPT) if each in row), None)
    found, prompt = (row[name], 0) if name is not None else _instruction(row, column, where)
    if not isinstance(found, (list, tuple)) or not found:
        raise DataError(f"{where}: {name or column} should be a list of messages with role and content")
    messages = [_message(each, f"{where}, message {number}") for number, each in enumerate(found, 1)]
    weights = [message.pop("weight", 1) for message in messages]
    silent = [weight == 0 or (answers_alone and prompt > n) for n, weight in enumerate(weights)]
    for number, (message, without) in enumerate(zip(messages, silent, strict=True), 1):
        trained = not without and (message["role"] == ASSISTANT or not answers_alone)
        _check_flags(message, trained, f"{where}, message {number}")
    system = row.get("system") or row.get("system_prompt")
    if system and isinstance(system, str) and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        silent.insert(0, prompt > 0 and answers_alone)
    return Chat(
        messages,
        _parsed(row.get("tools"), list, f"{where}: tools"),
        _parsed(row.get("chat_template_kwargs"), dict, f"{where}: chat_template_kwargs") or {},
        frozenset(n for n, without in enumerate(silent) if without),
        tuple(key for key in row if key not in (name, *_READ, *_UNREAD)),
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
    return message


def _check_flags(message: Message, trained: bool, where: str) -> None:
    """Raises DataError for a key that says something else than what is done."""
    for key in (*_TRAINED, *_LEFT_OUT, "train_detail"):
        value = message.pop(key, None)
        done = {**dict.fromkeys(_TRAINED, trained), **dict.fromkeys(_LEFT_OUT, not trained)}.get(key)
        if value not in _NOTHING and value != done:
            raise DataError(f"{where}: {key} is not used; {'set weight: 0, or ' if trained else ''}leave it out")


def _parsed(value: Any, kind: type, where: str) -> Any:
    """A list or object, which may be written as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if found is not None and not isinstance(found, kind):
        raise DataError(f"{where}: should be {'a list' if kind is list else 'an object'}, not {value!r:.60}")
    return found or None
