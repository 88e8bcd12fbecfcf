"""Rows of chat data → token ids by the tokenizer's chat template, and which of them are targets."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from stepmark.data.chat.chat_rows import ASSISTANT, ROLES, Chat, read_chat
from stepmark.data.chat.message_marks import NUMBER, PROBE, MarkedTemplate, unmarked
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.error_advice import explained

Spans = list[tuple[int, int]]
_SAID = ("reasoning_content", "reasoning", "thinking", "function_call")  # keys of a message that say something
_REMEDY = "change the row, leave it out, or set chat_template_path to a template that takes it"


class ChatTokenizer:
    """Converts rows to token ids, and says which of them are targets.

    The forms of rows are those of `Conversations`. With `assistant_only_loss` the targets are the assistant's messages,
    including the end of turn: what the template's `generation` blocks enclose, else what the template writes for the
    message, without the generation prompt. A message with `weight: 0` has no targets.

    Raises UsageError for a tokenizer without a chat template that can be read.
    """

    def __init__(self, tokenizer: Any, messages_column: str, assistant_only_loss: bool) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(
                "tokenizer: has no chat template, which says how messages become text; set chat_template_path, "
                "or in Python tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._column = messages_column
        self._answers_alone = assistant_only_loss
        self.unread = Counter[str]()  # keys that nothing has read, with the number of their rows
        self._template = lru_cache(MarkedTemplate)
        try:
            self._template(tokenizer.get_chat_template())
        except Exception as error:  # of Jinja, and of the tokenizer where it has several without a default
            line = " ".join(str(error).split())[:200]
            raise UsageError(f"tokenizer: its chat template cannot be used ({line}); set chat_template_path") from error

    def __call__(self, row: Any, where: str) -> tuple[list[int], list[bool]]:
        """The token ids of a row, and which of them are targets. `where` names the row in messages.

        Raises:
            DataError: The row is not a conversation, or the template rejects it or leaves out some of it.
            UsageError: The template does not show which tokens are the assistant's.
        """
        chat = read_chat(row, self._column, where, self._answers_alone)
        with explained(partial(_not_taken, chat, where)):
            template = self._template(self._tokenizer.get_chat_template(None, chat.tools))
            _check_variables(chat, template, self._tokenizer.special_tokens_map, where)
            said = {key for message in chat.messages for key in message if key not in ("role", "content")}
            self.unread.update({*chat.unread, *(key for key in said if not template.names(key))})
            shown = self._shown(chat, template)
            _check_shown(shown, where)
            encoding = self._tokenizer(shown.text, add_special_tokens=False)
            tokens = _Tokens(shown.text, list(encoding["input_ids"]), encoding if encoding.is_fast else self._tokenizer)
            return tokens.ids, self._targets(shown, template, tokens, where)

    def _targets(self, shown: _Shown, template: MarkedTemplate, tokens: _Tokens, where: str) -> list[bool]:
        messages = shown.chat.messages
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not self._answers_alone:
            targets = [True] * len(tokens.ids)
        elif template.marks_answers:
            found = self._tokenizer.apply_chat_template(
                messages, tools=shown.chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                **shown.chat.variables,
            )  # fmt: skip
            targets = [bool(each) for each in found["assistant_masks"]]
        else:
            spans = [span for number in answers for span in self._answer(shown, template, number, where)]
            _check_apart(shown, spans, where)
            targets = tokens.within(spans, where)
        silent = [n for n in shown.chat.without_loss if n in answers or not self._answers_alone]
        if any(not shown.spans(number) for number in silent):
            raise _unclear(where, "weight")
        without = tokens.within([span for number in silent for span in shown.spans(number)], where)
        return [target and not left_out for target, left_out in zip(targets, without, strict=True)]

    def _answer(self, shown: _Shown, template: MarkedTemplate, number: int, where: str) -> Spans:
        """Where the template writes an answer, without the generation prompt."""
        said, prompt = shown.of(number), self._prompt(shown.chat, template, number)
        head = prompt
        if prompt is None or not said.startswith(prompt):
            # Some prompts are longer than what precedes an answer of an earlier turn (they open a thinking block), and
            # some templates write the beginning of the text with its first message.
            messages = [*shown.chat.messages]
            messages[number] = {**messages[number], "content": PROBE}
            probed = self._marked(replace(shown.chat, messages=messages), template).of(number)
            head = _head(prompt, probed[: probed.find(PROBE)]) if PROBE in probed and prompt is not None else None
        if not said or head is None or not said.startswith(head):
            raise _unclear(where, "assistant_only_loss")
        spans: Spans = []
        left = len(head)
        for start, stop in shown.spans(number):
            begin = min(start + left, stop)
            spans.append((begin, stop))
            left -= begin - start
        return spans

    def _prompt(self, chat: Chat, template: MarkedTemplate, number: int) -> str | None:
        """The generation prompt that the template writes before an answer; None where it is not clear."""
        before = chat.messages[:number]
        for messages in (before, [*before, {"role": "user", "content": "."}]):
            if messages:  # a template may write the first ones elsewhere
                shown = self._marked(replace(chat, messages=messages), template, add_generation_prompt=True)
                ends = [stop for _, stop, owner in shown.parts if owner == len(messages) - 1]
                if ends:
                    return shown.text[ends[-1] :]
        return None

    def _shown(self, chat: Chat, template: MarkedTemplate) -> _Shown:
        shown, text = self._marked(chat, template), self._rendered(chat, None)
        return shown if shown.text == text else _Shown(chat, text, [(0, len(text), None)])

    def _marked(self, chat: Chat, template: MarkedTemplate, **options: Any) -> _Shown:
        numbered = [{**message, NUMBER: number} for number, message in enumerate(chat.messages)]
        return _Shown(chat, *unmarked(self._rendered(replace(chat, messages=numbered), template.tree, **options)))

    def _rendered(self, chat: Chat, template: Any, **options: Any) -> str:
        options |= {**chat.variables, "chat_template": template, "tokenize": False}
        return str(self._tokenizer.apply_chat_template(chat.messages, tools=chat.tools, **options))


@dataclass(frozen=True)
class _Shown:
    """A conversation as a template renders it: the text, and its parts, each with the number of its message."""

    chat: Chat
    text: str
    parts: Sequence[tuple[int, int, int | None]]

    def spans(self, number: int) -> Spans:
        """Where a message is; to the last answer belongs what the template ends with."""
        found = [(start, stop) for start, stop, owner in self.parts if owner == number]
        if found and number == len(self.chat.messages) - 1 and self.parts[-1][2] is None:
            found.append(self.parts[-1][:2])
        return found

    def of(self, number: int) -> str:
        """The text of a message."""
        return "".join(self.text[start:stop] for start, stop in self.spans(number))


class _Tokens:
    """The tokens of a text, and where each begins, whitespace before it apart."""

    def __init__(self, text: str, ids: list[int], source: Any) -> None:
        """`source`: the encoding, or a tokenizer that does not say where tokens are."""
        self.ids, self._text, self._source = ids, text, source

    @cached_property
    def _starts(self) -> list[int] | None:
        if not hasattr(self._source, "encodings"):
            return None
        starts, end = [], 0
        for begin, stop in self._source.encodings[0].offsets:
            begin, end = min(begin, end), max(stop, end)
            token = self._text[begin:end]
            starts.append(begin + (len(token) - len(token.lstrip()) if token.strip() else 0))
        return starts

    def within(self, spans: Spans, where: str) -> list[bool]:
        """Which tokens begin in one of the spans. Raises UsageError where a tokenizer without offsets joins them."""
        found = [False] * len(self.ids)
        for start, stop in spans:
            first, last = self._index(start, where), self._index(stop, where)
            found[first:last] = [True] * (last - first)
        return found

    def _index(self, place: int, where: str) -> int:
        if self._starts is not None:
            return bisect_left(self._starts, place)
        before = list(self._source(self._text[:place], add_special_tokens=False)["input_ids"])
        if self.ids[: len(before)] != before:
            raise _unclear(where, "assistant_only_loss")
        return len(before)


def _not_taken(chat: Chat, where: str, error: Exception) -> DataError:
    """What a template raises, by what it calls itself, or because a type is wrong; names the row."""
    first = next((each["role"] for each in chat.messages if each["role"] not in ("system", "developer")), None)
    more = "it begins with the assistant: put a user's message first; or " if first == ASSISTANT else ""
    line = " ".join(str(error).split())[:200]
    return DataError(f"{where}: the chat template does not take it ({line}); {more}{_REMEDY}")


def _check_variables(chat: Chat, template: MarkedTemplate, special: Any, where: str) -> None:
    """Raises DataError for what the template does not read, or would read by another name."""
    variables = template.variables - {*special}
    if chat.tools and "tools" not in variables:
        raise DataError(f"{where}: tools: the chat template does not use them; {_REMEDY}")
    for name in sorted({*chat.variables} - (variables - {"tools"})):
        raise DataError(f"{where}: chat_template_kwargs: {name!r} is no variable of the chat template; leave it out")
    for name in sorted(variables.intersection(chat.unread)):
        raise DataError(
            f"{where}: column {name!r} is a variable of the chat template, and is not passed to it; move it into "
            "chat_template_kwargs, or rename it"
        )
    for number, message in enumerate(chat.messages, 1):
        here = f"{where}, message {number}"
        if message["role"] not in {*ROLES, *template.strings}:
            raise DataError(f"{here}: role {message['role']!r} is unknown; roles are {', '.join(ROLES[:5])}")
        for name in _SAID:
            if message.get(name) and not template.names(name):
                raise DataError(f"{here}: {name}: the chat template does not use it; {_REMEDY}")


def _check_shown(shown: _Shown, where: str) -> None:
    """Raises DataError where the template leaves out a message, or some of it."""
    if not any(owner is not None for _, _, owner in shown.parts):
        return
    for number, message in enumerate(shown.chat.messages):
        content, place, here = message["content"], shown.of(number), f"{where}, message {number + 1}"
        parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list) else []
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        # A text that has its place may be changed on purpose, such as thinking that is left out.
        unsure = not place or not isinstance(content, str)
        if unsure and any(each.strip() not in (place or shown.text) for each in texts):
            raise DataError(f"{here}: the chat template leaves out what the {message['role']} says; {_REMEDY}")
        if isinstance(content, (list, dict)) and str(content) in shown.text:
            raise DataError(f"{here}: the chat template does not take parts; make content a text")
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if str(function.get("name")) not in place:
                raise DataError(f"{here}: the chat template leaves out tool_calls; {_REMEDY}")
            given = function.get("arguments")
            if isinstance(given, str) and '"' in given and json.dumps(given, ensure_ascii=False)[1:-1] in place:
                raise DataError(
                    f"{here}: arguments of tool_calls are JSON, which the chat template writes as a string; make them"
                    " an object"
                )


def _check_apart(shown: _Shown, answers: Spans, where: str) -> None:
    """Raises UsageError where a message that has no place of its own is within an answer's."""
    rest, end = "", 0
    for start, stop in answers:
        rest, end = rest + shown.text[end:start] + "\n", stop
    rest += shown.text[end:]
    for number, message in enumerate(shown.chat.messages):
        content = message["content"]
        if not shown.of(number) and isinstance(content, str) and content.strip() not in rest:
            raise _unclear(where, "assistant_only_loss")


def _head(prompt: str, before: str) -> str | None:
    """What of `before`, which a template writes before an answer, it also writes as the prompt; whole lines where both
    go on differently. None where that is nothing."""
    if before.endswith(prompt):
        return before
    length = next((n for n, (one, other) in enumerate(zip(prompt, before, strict=False)) if one != other), None)
    common = before[: len(prompt) if length is None else length]
    if common != before:
        common = common[: common.rfind("\n") + 1]
    return common if common.strip() or common == before else None


def _unclear(where: str, field: str) -> UsageError:
    return UsageError(
        f"{field}: the tokenizer's chat template does not show which tokens of {where} are of which message; put "
        "{% generation %} … {% endgeneration %} around the answers in it"
    )
