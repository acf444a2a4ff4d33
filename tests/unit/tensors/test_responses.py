"""Stop strings in text that arrives token by token, and when responses were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from nemorl.base.process.timing import Span, Timed
from nemorl.types import SamplingParams
from nemorl_tensors.engines import responses
from nemorl_tensors.engines.responses import Response, StopStringMatcher


def _bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _end(text: str, *strings: str) -> int | None:
    """After how many bytes the matcher ends the text."""
    matcher = StopStringMatcher(strings, _bytes)
    return next((count for count, byte in enumerate(text.encode(), 1) if matcher.push(byte)), None)


def test_a_stop_string_may_span_tokens() -> None:
    assert _end("the answer is 42. END of it", "END") == len("the answer is 42. END")


def test_the_first_of_several_wins() -> None:
    assert _end("ab\n\ncd###", "###", "\n\n") == 4


def test_text_without_a_stop_string_goes_on() -> None:
    assert _end("no such thing here", "xyz", "hereabouts") is None


def test_characters_of_several_bytes_count_once_complete() -> None:
    assert _end("déjà vu", "à") == len("déjà".encode())


def test_a_one_character_stop_string_needs_no_memory() -> None:
    assert _end("abc", "c") == 3


def test_bytes_that_never_form_a_character_do_not_block_the_rest() -> None:
    matcher = StopStringMatcher(["END"], _bytes)
    ids = [*[0xFF] * 40, *b"END"]
    assert [matcher.push(byte) for byte in ids].index(True) == len(ids) - 1


def test_a_completion_says_how_long_it_waited_and_when_its_last_token_came(monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked for at 100; a place at 102; tokens at 103 and 105, where the second ends it.
    clock = iter([100.0, 102.0, 105.0])
    monkeypatch.setattr(responses.time, "monotonic", lambda: next(clock))
    response = Response((5,), SamplingParams(), 0, limit=2, stop_ids=frozenset(), decode=_bytes)
    response.begin()
    response.push(97, -1.0)
    response.push(98, -1.0)
    completion = response.completion()
    assert completion == replace(completion, span=Span(0.0, 0.0))  # times make no two completions different
    assert isinstance(completion, Timed)
    assert completion.span == (2.0, 5.0)
