"""Rows of chat data as token ids: messages or an instruction, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepmark.errors import DataError, UsageError

Message = Mapping[str, Any]

ASSISTANT = "assistant"
# Columns of instruction sets: the question, what belongs to it, the answer.
INSTRUCTIONS = (("prompt", "", "completion"), ("instruction", "input", "output"), ("question", "context", "answer"))


class ChatTokenizer:
    """Makes token ids of rows, and says which of them are targets.

    A row has a list of messages, each with `role` and `content`, in `messages_column`; or an instruction, as `prompt`
    and `completion`, `instruction`, `input` and `output`, or `question`, `context` and `answer`, which becomes a user's
    message and an answer. With `assistant_only_loss` the targets are what the assistant says, with its end of turn.

    Raises UsageError for a tokenizer without a chat template.
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
        template = str(tokenizer.chat_template)
        self._marks_answers = "{% generation" in template or "{%- generation" in template

    def __call__(self, row: Any, where: str) -> tuple[list[int], list[bool]]:
        """The token ids of a row, and which are targets. `where` names the row.

        Raises:
            DataError: The row is not a conversation.
            UsageError: The template does not show which tokens are the assistant's.
        """
        messages = _messages(row, self._column, where)
        if not self._answers_alone:
            ids = self._ids(messages)
            return ids, [True] * len(ids)
        if self._marks_answers:
            found = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]
        return self._answers_by_prefix(messages, where)

    def _answers_by_prefix(self, messages: list[Message], where: str) -> tuple[list[int], list[bool]]:
        """For templates that do not mark answers: an answer is what its message adds to the conversation before it,
        with the prompt for an answer."""
        ids = self._ids(messages)
        targets = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._ids(messages[:index], add_generation_prompt=True)
            through = self._ids(messages[: index + 1])
            if ids[: len(through)] != through or through[: len(before)] != before:
                raise UsageError(
                    f"assistant_only_loss: the tokenizer's chat template does not show which tokens of {where} are the "
                    "assistant's; put {% generation %} … {% endgeneration %} around the answers in it"
                )
            targets[len(before) : len(through)] = [True] * (len(through) - len(before))
        return ids, targets

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return list(self._tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options))


def _messages(row: Any, column: str, where: str) -> list[Message]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: should be an object with columns, and is a {type(row).__name__}")
    found = row.get(column)
    if found is None:
        return _instruction(row, column, where)
    messages = list(found) if isinstance(found, (list, tuple)) else []
    if not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise DataError(f"{where}: {column} should be a list of messages with role and content")
    return messages


def _instruction(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    for question, more, answer in INSTRUCTIONS:
        if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
            asked = "\n\n".join(filter(None, (row[question], row.get(more))))
            return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": row[answer]}]
    known = "; ".join(" and ".join((question, answer)) for question, _, answer in INSTRUCTIONS)
    raise DataError(
        f"{where}: has no {column}, and no instruction ({known}); its columns are {', '.join(map(str, row))}"
    )
