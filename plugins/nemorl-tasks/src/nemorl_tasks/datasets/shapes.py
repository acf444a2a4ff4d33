"""From a row of a published dataset to nemorl's row, as its preset says.

A row is prepared (its parts get nemorl's names), then finished by :class:`ColumnMapping`, which every table goes
through: chat, system messages, the shared start of two conversations.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemorl.errors import DataError

from nemorl_tasks.datasets.derived import derived, inside_tag
from nemorl_tasks.datasets.mapping import ColumnMapping, fill_template, look_up, number_or_text
from nemorl_tasks.datasets.media_rows import media_of, placed, with_parts
from nemorl_tasks.datasets.preset_file import Choices, Pair, Preset, Turns

MULTIPLE_CHOICE = (
    "{question}\n\n{options}\n\nReason step by step. Then end your response with a line of the form 'Answer: X', "
    "where X is the letter of the right option, one of {letters}."
)
"""The prompt of a multiple-choice question, unless the preset or the user has another."""
ROLES = ("system", "user", "assistant", "tool")
MORE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
"""Of a message, beside its role and content, where a chat template may show them."""
MEDIA = re.compile(r"<(image|video|audio|sound|speech)>")
"""Where a text conversation points to a picture or a sound, which it cannot hold."""


@dataclass(frozen=True)
class PresetMapping:
    """How the rows of a preset become nemorl's. Picklable."""

    preset: Preset
    finish: ColumnMapping
    """Chat, system message, and what all tables have in common."""
    prompt_template: str | None = None
    """In place of the preset's."""
    seed: int = 0
    """Of the order of options."""
    media_folder: str | None = None
    """Of the files that rows name."""

    def convert(self, row: Mapping[str, Any], *, number: int, source: str) -> dict[str, Any]:
        """One row of the table as a nemorl row.

        Raises:
            DataError: a column is missing or holds something else; says which row (counted from 0).
        """
        place = f"{source}, row {number}"
        preset = self.preset
        media = media_of(row, preset.media, self.media_folder, place)
        row = derived(row, preset, media, place)
        result = dict(row)
        for key, column in preset.columns.items():
            result[key] = look_up(row, column, place)
        if preset.turns is not None:
            result["messages"] = _conversation(row, preset.turns, place)
        for key in ("answer",) if preset.answer_tag is None else ("answer", "response"):
            if isinstance(result.get(key), str):
                result[key] = self._answer(result[key], place)
        if preset.media:
            media, result["prompt"] = placed(media, str(result["prompt"]), place)
        if preset.pair is not None:
            result.update(_pair(row, preset.pair, place))
        if preset.choices is not None:
            order = random.Random(f"{self.seed}/{number}") if preset.choices.shuffle else None
            result.update(_choices(row, preset.choices, order, place))
            result["question"] = result.pop("prompt")
        self._ask(result, place)
        result = self.finish.convert(result, number=number, source=source)
        if preset.media:
            result["prompt"] = [*result["prompt"][:-1], with_parts(result["prompt"][-1], media)]
            for source_column in {item.column for item in preset.media}:
                result.pop(source_column, None)  # what is in the prompt is not kept a second time
        return result

    def _answer(self, text: str, place: str) -> str:
        if self.preset.answer_after is not None:
            _, mark, after = text.rpartition(self.preset.answer_after)
            if not mark:
                raise DataError(
                    f"{place}: the answer has no {self.preset.answer_after!r} before it: {text[-60:]!r}",
                    fix="complete the row",
                )
            return after.strip()
        if self.preset.answer_tag is not None:
            return inside_tag(text, self.preset.answer_tag)
        return last_boxed(text, place) if self.preset.answer_boxed else text

    def _ask(self, row: dict[str, Any], place: str) -> None:
        """Put the template and the row's own system message around the prompt."""
        template = self.prompt_template or self.preset.prompt_template
        if template is None and self.preset.choices is not None:
            template = MULTIPLE_CHOICE
        prompt, system = row.get("prompt"), row.pop("system", None) if "system" in self.preset.columns else None
        if isinstance(prompt, list) and prompt and template is not None:
            last = prompt[-1]  # the task is what was said last
            text = fill_template(template, {**row, "prompt": last["content"]}, place)
            row["prompt"] = [*prompt[:-1], {**last, "content": text}]
        elif template is not None:
            row["prompt"] = fill_template(template, row, place)
        if system is not None and "prompt" in row:
            asked = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
            row["prompt"] = [{"role": "system", "content": str(system)}, *asked]
        elif system is not None and row.get("messages"):
            row["messages"] = [{"role": "system", "content": str(system)}, *row["messages"]]


def last_boxed(text: str, place: str) -> str:
    """The content of the last ``\\boxed{…}`` of a solution, braces counted.

    Example:
        >>> last_boxed("so it is \\\\boxed{\\\\frac{1}{2}}.", "row 0")
        '\\\\frac{1}{2}'
    """
    start = max(text.rfind(command) for command in ("\\boxed{", "\\fbox{"))
    bare = re.search(r".*\\boxed (\S)", text, re.DOTALL)  # a few of MATH have no braces: \boxed 2
    depth, begin = 0, text.find("{", start)
    for position in range(begin, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position].strip()
    if bare is not None:
        return bare[1]
    raise DataError(f"{place}: the solution has no \\boxed{{…}}: {text[-60:]!r}", fix="complete the row")


def _conversation(row: Mapping[str, Any], turns: Turns, place: str) -> list[dict[str, Any]]:
    messages = []
    given = look_up(row, turns.column, place)
    if not isinstance(given, list) or not given:
        raise DataError(f"{place}: column {turns.column!r} holds no conversation", fix="complete the row")
    for message in given:
        if not isinstance(message, Mapping) or turns.role not in message or turns.content not in message:
            fields = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(
                f"{place}: a message has no {turns.role!r} and {turns.content!r} (it has {fields})",
                fix="complete the row",
            )
        said, role = _said(message[turns.content], place), str(message[turns.role])
        role = turns.roles.get(role, role)
        if role not in ROLES:
            raise DataError(f"{place}: nobody is called {role!r}", fix=f"use {', '.join({**turns.roles, 'user': ''})}")
        if media := MEDIA.search(said):
            raise DataError(f"{place}: {media[0]} in a message: this reads text alone", fix="leave such rows out")
        more = {name: message[name] for name in MORE_FIELDS if message.get(name)}
        messages.append({**more, "role": role, "content": said})
    return messages


def _said(content: Any, place: str) -> str:
    if content is None or isinstance(content, str | int | float):
        return "" if content is None else str(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    raise DataError(f"{place}: a message holds {content!r:.80}: this reads text alone", fix="leave such rows out")


def _pair(row: Mapping[str, Any], pair: Pair, place: str) -> dict[str, Any]:
    first, second, preference = (look_up(row, name, place) for name in (pair.first, pair.second, pair.preference))
    try:
        number = float(preference)  # files have it as text
    except (TypeError, ValueError):
        number = 0.0
    if not number < 0 and not number > 0:
        raise DataError(f"{place}: {pair.preference} = {preference!r} prefers neither response", fix="drop such rows")
    chosen, rejected = (first, second) if number < 0 else (second, first)
    return {"chosen": chosen, "rejected": rejected, "response": chosen, "answer": chosen}


def _choices(row: Mapping[str, Any], choices: Choices, order: random.Random | None, place: str) -> dict[str, Any]:
    """``options`` as lines of text, ``letters``, and the right letter as ``answer``."""
    if isinstance(choices.options, str):
        given = look_up(row, choices.options, place)
    else:
        given = [look_up(row, name, place) for name in choices.options]
    if not isinstance(given, list):
        raise DataError(f"{place}: {given!r:.80} is no list of options", fix="correct the row")
    options = {number: str(option).strip() for number, option in enumerate(given) if option not in (None, "")}
    right = _right_option(row, choices, place)
    if right not in options or len(options) > len(string.ascii_uppercase):
        raise DataError(f"{place}: option {right} of {len(options)} cannot be right", fix="correct the row")
    numbers = list(options)
    if order is not None:
        order.shuffle(numbers)
    letters = string.ascii_uppercase[: len(options)]
    lines = [f"{letter}) {options[number]}" for letter, number in zip(letters, numbers, strict=True)]
    return {"options": "\n".join(lines), "letters": letters, "answer": letters[numbers.index(right)]}


def _right_option(row: Mapping[str, Any], choices: Choices, place: str) -> int:
    right = choices.correct if isinstance(choices.correct, int) else look_up(row, choices.correct, place)
    said = number_or_text(right).strip().upper()
    if said.isdecimal():
        return int(said)
    if len(said) != 1 or said not in string.ascii_uppercase:
        raise DataError(f"{place}: {right!r} is neither a letter nor a number of an option", fix="correct the row")
    return string.ascii_uppercase.index(said)
