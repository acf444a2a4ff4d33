"""Reading JSON that anybody may have written: every value is asked for by type, and errors name its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemorl_rl.agents.contract import CallOptions
from nemorl_rl.rollouts.seeding import derive_seed

from nemorl_agents.gateway.errors import RequestError, bad_field

MOST_STOPS = 16
MOST_SAMPLES = 128
LARGEST = 2**63 - 1
TEMPLATE_OPTIONS = "chat_template_kwargs"
MOST_VARIABLES = 8
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"))
"""Variables of a template that a request says in other ways, or not at all."""


def parsed(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object.

    Raises:
        RequestError: It is none, or holds what no text may hold.
    """
    try:
        body = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, f"the body is no JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is {kind(body)}, not a JSON object", code="invalid_json")
    if b"\\u" in raw and not all(map(_is_text, _texts(body))):
        raise RequestError(400, "the body holds half of a surrogate pair, which is no text", code="invalid_json")
    return body


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def text_at(value: Any, place: str) -> str:
    """A string.

    Raises:
        RequestError: It is something else; so do the others.
    """
    if not isinstance(value, str):
        raise bad_field(place, f"must be a string, not {kind(value)}")
    return value


def object_at(value: Any, place: str) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise bad_field(place, f"must be an object, not {kind(value)}")
    return value


def list_at(value: Any, place: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise bad_field(place, f"must be a list, not {kind(value)}")
    return value


def flag_at(value: Any, place: str) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise bad_field(place, f"must be true or false, not {kind(value)}")
    return value


def whole_at(value: Any, place: str, low: int, high: int = LARGEST) -> int:
    """A whole number between two, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"of at least {low}" if high == LARGEST else f"from {low} to {high}"
        raise bad_field(place, f"must be a whole number {bounds}, not {shown(value)}")
    return value


def number_at(value: Any, place: str, low: float, high: float) -> float:
    """A finite number between two, both included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise bad_field(place, f"must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """A value, short enough for an error."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def stops_at(value: Any, place: str) -> tuple[str, ...]:
    """A string or several, each of which ends an answer."""
    stops = [value] if isinstance(value, str) else list_at(value, place)
    if len(stops) > MOST_STOPS:
        raise bad_field(place, f"holds {len(stops)} strings", fix=f"give at most {MOST_STOPS}")
    found = tuple(text_at(stop, f"{place}[{i}]") for i, stop in enumerate(stops))
    if "" in found:
        raise bad_field(place, "holds an empty string, which would end every answer at once")
    return found


def call_options(
    body: Mapping[str, Any],
    *,
    limits: Sequence[str],
    stop: str,
    number: int = 0,
    json_schema: str | None = None,
) -> CallOptions:
    """How a call is answered, from the fields that all APIs share.

    Args:
        body: Its honoured fields.
        limits: Names of the field for the longest answer; the smallest of them holds.
        stop: Name of the field for strings that end it.
        number: Of this answer among several to one request; a seed gives each another one.
        json_schema: That the answer satisfies, as JSON.
    """
    longest = [whole_at(body[name], name, 1) for name in limits if name in body]
    seed = whole_at(body["seed"], "seed", -LARGEST) if "seed" in body else None
    return CallOptions(
        max_new_tokens=min(longest) if longest else None,
        stop=stops_at(body[stop], stop) if stop in body else (),
        seed=derive_seed("answer", number, seed) if seed is not None and number else seed,
        temperature=number_at(body["temperature"], "temperature", 0, 2) if "temperature" in body else None,
        top_p=number_at(body["top_p"], "top_p", 1e-6, 1) if "top_p" in body else None,
        top_k=whole_at(body["top_k"], "top_k", 1) if "top_k" in body else None,
        json_schema=json_schema,
        template_options=_template_options(body.get(TEMPLATE_OPTIONS, {})),
    )


def _template_options(value: Any) -> str | None:
    """Variables of the chat template in one way of writing; ``None`` where there are none."""
    given = object_at(value, TEMPLATE_OPTIONS)
    if len(given) > MOST_VARIABLES or OWN_VARIABLES & given.keys():
        fix = f"give at most {MOST_VARIABLES} variables of its own"
        raise bad_field(TEMPLATE_OPTIONS, f"holds {shown(sorted(given))}", fix=fix)
    return json.dumps(given, sort_keys=True) if given else None


def samples(body: Mapping[str, Any]) -> int:
    """``n``: answers to one prompt."""
    return whole_at(body.get("n", 1), "n", 1, MOST_SAMPLES)
