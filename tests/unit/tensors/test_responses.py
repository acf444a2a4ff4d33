"""Stop strings in text that arrives token by token."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl_tensors.engines.responses import StopStringMatcher


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
