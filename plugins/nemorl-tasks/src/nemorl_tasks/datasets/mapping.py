"""From a table's columns to nemorl's row: ``prompt``, ``answer``, ``response``, ``messages``, ``chosen``, ``rejected``.

The same code checks the first row when the config loads and converts every row when it is read. Other columns are
kept as they are, for reward functions that ask for them by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import ConfigIssue, DataError

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem"),
    "answer": ("answer", "expected_answer"),
    "response": ("response", "completion"),
    "messages": ("messages",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
"""Where a key is looked for when its column is not named, in this order."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w .-]*)\}")


@dataclass(frozen=True)
class ColumnMapping:
    """Which column plays which part."""

    KEYS: ClassVar[tuple[str, ...]] = tuple(USUAL_NAMES)

    columns: dict[str, str | None]
    """Key -> column named by the user; ``None`` finds it by its usual names."""
    prompt_template: str | None = None
    chat: bool = False
    system_prompt: str | None = None

    def problems(self, row: Mapping[str, Any], *, where: str, source: str) -> Iterator[ConfigIssue]:
        """Reasons why this row cannot become one of nemorl's; ``where`` is the config field that names the source."""
        names = list(row)
        missing = [(f"{key}_column", name) for key, name in self.columns.items() if name and name not in names]
        missing += [("prompt_template", name) for name in self._placeholders() if name not in names]
        for field, name in missing:
            message = f"{source} has no column {name!r} (it has {_listed(names)})"
            yield ConfigIssue(field, message, did_you_mean(name, names) or "name one of its columns")
        if missing:
            return
        yield from self._shape_problems(names, where, source)
        try:
            self.convert(row, number=0, source=source)
        except DataError as error:
            yield ConfigIssue(where, error.message, error.fix)

    def _shape_problems(self, names: list[str], where: str, source: str) -> Iterator[ConfigIssue]:
        def has(key: str) -> bool:
            return self._column(key, names) is not None

        if has("chosen") != has("rejected"):
            present, absent = ("chosen", "rejected") if has("chosen") else ("rejected", "chosen")
            message = f"{source} has {present} responses but no {absent} ones (it has {_listed(names)})"
            yield ConfigIssue(where, message, f"name that column: {absent}_column: …")
        elif not (has("prompt") or has("messages") or has("chosen") or self.prompt_template is not None):
            hints = (did_you_mean(name, names) for key in ("prompt", "messages") for name in USUAL_NAMES[key])
            hint = next((hint for hint in hints if hint), "")
            message = f"{source} has no column for the prompt or the conversation (it has {_listed(names)})"
            yield ConfigIssue(where, message, f"name it: prompt_column or messages_column. {hint}".strip())

    def convert(self, row: Mapping[str, Any], *, number: int, source: str) -> dict[str, Any]:
        """One table row as a nemorl row.

        Raises:
            DataError: A mapped column is missing or holds the wrong type; says which row (counted from 0).
        """
        result = dict(row)
        names = list(row)

        def fail(column: str, expected: str) -> DataError:
            value = row[column]
            message = f"{source}, row {number}: column {column!r} should hold {expected}, "
            return DataError(
                message + f"but holds {type(value).__name__} {value!r:.80}",
                fix="correct the row, or map another column",
            )

        for key in self.KEYS:
            column = self._column(key, names)
            if column is None or (key == "prompt" and self.prompt_template is not None):
                continue
            if column not in row:
                raise _no_column(row, column, f"{source}, row {number}", fix="complete the row")
            value = row[column]
            if value is None and self.columns.get(key) is None and key != "prompt":
                continue  # a table of several shapes, such as preferences beside demonstrations
            if key == "answer":
                result[key] = None if value is None else number_or_text(value)
            elif isinstance(value, str) and key != "messages":
                result[key] = value
            elif _is_messages(value):
                result[key] = [_message(message) for message in value]
            else:
                raise fail(column, "a list of chat messages" if key == "messages" else "text or chat messages")
        self._fill_prompt(result, row, number, source)
        return result

    def _fill_prompt(self, result: dict[str, Any], row: Mapping[str, Any], number: int, source: str) -> None:
        """The parts that several columns decide: templates, shared conversation starts, the system message."""
        if self.prompt_template is not None:
            result["prompt"] = fill_template(self.prompt_template, row, f"{source}, row {number}")
        if isinstance(result.get("chosen"), list) and isinstance(result.get("rejected"), list):
            shared, result["chosen"], result["rejected"] = _split_pair(
                result["chosen"], result["rejected"], f"{source}, row {number}"
            )
            if "prompt" not in result or shared:
                result["prompt"] = shared
        if result.get("chosen") is not None and result.get("prompt") is None:
            raise DataError(
                f"{source}, row {number}: a preference without a prompt (columns {_listed(list(row))})",
                fix="name its column: prompt_column",
            )
        if self.chat and isinstance(result.get("prompt"), str):
            result["prompt"] = [{"role": "user", "content": result["prompt"]}]
        for key in ("prompt", "messages"):
            conversation = result.get(key)
            if not self.system_prompt or not isinstance(conversation, list):
                continue
            if not conversation or conversation[0]["role"] != "system":
                result[key] = [{"role": "system", "content": self.system_prompt}, *conversation]

    def _column(self, key: str, names: list[str]) -> str | None:
        named = self.columns.get(key)
        return named or next((name for name in USUAL_NAMES[key] if name in names), None)

    def _placeholders(self) -> list[str]:
        return placeholders(self.prompt_template or "")


def placeholders(template: str) -> list[str]:
    """The columns that a template names, in order: ``["question"]`` of ``"Q: {question} \\boxed{}"``."""
    return [match[1] for match in _PLACEHOLDER.finditer(template) if match[1]]


def fill_template(template: str, row: Mapping[str, Any], place: str) -> str:
    """The text with columns of the row in place of their names in braces; ``{{x}}`` is a literal ``{x}``.

    Raises:
        DataError: the row lacks one; names those it has.
    """
    for name in placeholders(template):
        if name not in row:
            raise _no_column(row, name, place, fix="complete the row")
    return _PLACEHOLDER.sub(lambda match: str(row[match[1]]) if match[1] else match[0][0], template)


def look_up(row: Mapping[str, Any], column: str, place: str) -> Any:
    """The value of a column, of a part of one (``answers.text.0``), or a text filled from several (``Q: {question}``).

    Raises:
        DataError: it is not there; names what is.
    """
    if not column:
        return ""
    if "{" in column:
        return fill_template(column, row, place)
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            fix = "these are rows of another dataset: name the right one, or map its columns (columns: {prompt: …})"
            raise _no_column(row, column, place, fix=fix)
    return value


def _no_column(row: Mapping[str, Any], column: str, place: str, *, fix: str) -> DataError:
    names = [str(name) for name in row]
    message = f"{place}: no column {column!r} (it has {_listed(names)})"
    return DataError(message, fix=did_you_mean(column, names) or fix)


def _listed(names: list[str]) -> str:
    return ", ".join(str(name) for name in names) or "none"


def number_or_text(value: Any) -> str:
    """``72.0`` was an integer before some table library met a missing value."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and isinstance(item.get("role"), str) and _says(item) for item in value)
    )


def _says(message: Mapping[str, Any]) -> bool:
    """Text, parts of content, or calls of tools."""
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the empty fields that a table needs for rows which have them."""
    return {key: value for key, value in message.items() if value is not None}


def _split_pair(
    chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], place: str
) -> tuple[list[dict[str, Any]], Any, Any]:
    """Two conversations that differ in the last message -> (what they share, last of chosen, last of rejected)."""
    if chosen[:-1] != rejected[:-1]:
        raise DataError(
            f"{place}: chosen and rejected differ before their last message",
            fix="give two responses to the same conversation",
        )
    return chosen[:-1], response_of(chosen[-1]), response_of(rejected[-1])


def response_of(message: Mapping[str, Any]) -> str | list[Mapping[str, Any]]:
    """The text of a message; the message itself, as a list of one, where it holds more (calls, reasoning)."""
    bare = {name for name, value in message.items() if value is not None} <= {"role", "content"}
    return message["content"] if bare and isinstance(message.get("content"), str) else [message]
