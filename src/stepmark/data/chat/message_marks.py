"""Where each message of a conversation is in the text that a chat template renders.

A copy of the template writes marks around its loops over messages. They are noncharacters of Unicode, which no text
has, and the number of a message is a key of it, so that a template may reorder, leave out or change messages.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

NUMBER = "stepmark_number"  # the key; names that begin with "_" are not readable in a template
_OPEN, _CLOSE, _EACH, _SET, _STOP = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
PROBE = "\ufdd5"
_MARKS = re.compile(f"([{_OPEN}{_CLOSE}]|[{_EACH}{_SET}]\\d*{_STOP})")


class MarkedTemplate:
    """A chat template: the copy with marks (`tree`), the `variables` that it reads besides messages, and the `strings`
    in it. Raises jinja2.TemplateError for invalid syntax."""

    def __init__(self, source: str) -> None:
        from transformers.utils import chat_template_utils

        compiler: Any = chat_template_utils
        environment = compiler._compile_jinja_template(source).environment  # the tags that the library knows
        self.source = source
        self.tree = environment.parse(source)
        given = {*environment.globals, "messages", "add_generation_prompt"}
        self.variables = find_undeclared_variables(self.tree) - given
        self.strings = {each.value for each in self.tree.find_all(nodes.Const) if isinstance(each.value, str)}
        _mark(self.tree)
        self.tree.set_environment(environment)

    @property
    def marks_answers(self) -> bool:
        """Whether it has generation marks of its own."""
        return "{% generation" in self.source or "{%- generation" in self.source

    def names(self, key: str) -> bool:
        """Whether it reads a key of messages, under any of the names that transformers gives to reasoning."""
        from transformers.utils import chat_template_utils

        same = getattr(chat_template_utils, "_REASONING_FIELDS", ())
        return any(each in self.source for each in (same if key in same else (key,)))


def unmarked(marked: str) -> tuple[str, list[tuple[int, int, int | None]]]:
    """The text without marks, and its parts in order: where each begins and ends, and the message that it is of."""
    text, parts = "", []
    loops: list[int | None] = [None]
    for piece in _MARKS.split(marked):
        owner = next((each for each in reversed(loops) if each is not None), None)
        if piece == _OPEN:
            loops.append(None)
        elif piece == _CLOSE:
            loops.pop()
        elif piece[:1] == _EACH or (piece[:1] == _SET and owner is None and len(loops) > 1):
            loops[-1] = int(piece[1:-1]) if piece[1:-1] else None
        elif piece and piece[0] != _SET:
            parts.append((len(text), len(text) + len(piece), owner))
            text += piece
    return text, parts


def _mark(tree: nodes.Template) -> None:
    """Adds marks: where a loop begins and ends, where each of its turns begins, and where a variable is set."""
    for node in [tree, *tree.find_all(nodes.Node)]:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, field, [each for child in value for each in _marked(child)])
        if isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
            node.body.insert(0, _number_of(node.target.name, _EACH))


def _marked(child: Any) -> list[Any]:
    if isinstance(child, nodes.For):
        return [_output(nodes.TemplateData(_OPEN)), child, _output(nodes.TemplateData(_CLOSE))]
    if isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name):
        return [child, _number_of(child.target.name, _SET)]
    return [child]


def _number_of(name: str, kind: str) -> nodes.Output:
    variable = nodes.Name(name, "load")
    number = nodes.CondExpr(
        nodes.Test(variable, "mapping", [], [], None, None), nodes.Getattr(variable, NUMBER, "load"), nodes.Const("")
    )
    return _output(nodes.TemplateData(kind), number, nodes.TemplateData(_STOP))


def _output(*parts: nodes.Expr) -> nodes.Output:
    return nodes.Output(list(parts))
