"""MarkedTemplate: a chat template that says of each character which message it was written for.

The loops of the template are marked in its syntax tree, so nothing is assumed of what it writes: not that it leaves
earlier turns alone, not that contents come out as they went in. What it writes without marks must be what it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around a mark. Unicode keeps these for uses like this one; no text holds them."""
MARK = re.compile(f"{OPEN}(-?\\d+),(-?\\d+),(-?\\d+){CLOSE}")
BEGIN, NAMED, END = "nemorl_begin", "nemorl_named", "nemorl_end"


@dataclass(frozen=True, slots=True)
class Segment:
    """Text between two marks."""

    start: int
    end: int
    message: int | None
    """Number of the message that it was written for; ``None`` outside of all."""


class MarkedTemplate:
    """Renders messages and tells whose each part of the text is."""

    def __init__(self, source: str) -> None:
        self._template = _marked(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> tuple[str, list[Segment]]:
        """
        Args:
            messages: In the form in which the template reads them.
            **variables: All else that the template is given.

        Returns:
            The text, and its parts in order; empty ones are left out.
        """
        listed = [dict(message) for message in messages]
        text = self._template.render(messages=listed, **variables, **_Marks(listed).functions())
        return _segments(text)


class _Marks:
    """The functions that a marked template calls. A loop over anything but messages writes nothing."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._begun: set[int] = set()

    def functions(self) -> dict[str, Any]:
        return {BEGIN: self._begin, NAMED: self._named, END: self._end}

    def _begin(self, loop: int, item: Any) -> str:
        return self._mark(loop, -1, item)

    def _named(self, loop: int, turn: int, item: Any, value: Any) -> str:
        """A loop over numbers is about the first message that it gives a name."""
        return "" if id(item) in self._numbers else self._mark(loop, turn, value)

    def _mark(self, loop: int, turn: int, value: Any) -> str:
        number = self._numbers.get(id(value))
        if number is None:
            return ""
        self._begun.add(loop)
        return f"{OPEN}{loop},{turn},{number}{CLOSE}"

    def _end(self, loop: int) -> str:
        if loop not in self._begun:
            return ""
        self._begun.discard(loop)
        return f"{OPEN}{loop},-1,-1{CLOSE}"


def _segments(marked: str) -> tuple[str, list[Segment]]:
    texts: list[str] = []
    found: list[Segment] = []
    open_loops: list[tuple[int, int, int]] = []
    at = size = 0
    for match in [*MARK.finditer(marked), None]:
        piece = marked[at : match.start() if match else len(marked)]
        if piece:
            texts.append(piece)
            found.append(Segment(size, size + len(piece), open_loops[-1][2] if open_loops else None))
            size += len(piece)
        if match is None:
            break
        at = match.end()
        loop, turn, message = (int(part) for part in match.groups())
        if turn >= 0 and any(entry[:2] == (loop, turn) for entry in open_loops):
            continue
        begun = next((place for place, entry in enumerate(open_loops) if entry[0] == loop), len(open_loops))
        open_loops = open_loops[:begun] + ([(loop, turn, message)] if message >= 0 else [])
    return "".join(texts), found


@lru_cache(maxsize=16)
def _marked(source: str) -> Template:
    # The environment that transformers renders with: its filters, functions and sandbox.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    tree = _Marking().visit(environment.parse(source))
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(None))


class _Marking(NodeTransformer):
    """Marks where each pass of a loop begins, and where the loop ends (``break`` and ``continue`` included)."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        self._loops += 1
        number = nodes.Const(self._loops)
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
            _mark_names(node.body, number, item)
            node.body.insert(0, _call(BEGIN, number, item))
        return [node, _call(END, number)]


def _mark_names(body: list[nodes.Node], loop: nodes.Const, item: nodes.Name) -> None:
    """After each assignment that belongs to this loop."""
    for place in range(len(body) - 1, -1, -1):
        node = body[place]
        if isinstance(node, nodes.If):
            for branch in (node, *node.elif_):
                _mark_names(branch.body, loop, item)
            _mark_names(node.else_, loop, item)
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            turn = nodes.Getattr(nodes.Name("loop", "load"), "index0", "load")
            body.insert(place + 1, _call(NAMED, loop, turn, item, nodes.Name(node.target.name, "load")))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Output:
    return nodes.Output([nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)])
