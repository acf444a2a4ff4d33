"""One-turn graders of a few lines, mostly for use as parts of a composition."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import regex
from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.rollouts.prompts import required_answer

if TYPE_CHECKING:
    from nemorl_tasks.environments.config import CodeJaccardConfig, ExactMatchConfig, FormatConfig, RepetitionConfig


class ExactMatch(Environment):
    """1 when the response is the answer."""

    name = "exact_match"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        wanted, given = required_answer(prompt, self.name), response.strip()
        if self._config.ignore_case:
            wanted, given = wanted.casefold(), given.casefold()
        is_right = wanted in given if self._config.contains else wanted == given
        return Score(float(is_right), correct=is_right)


class Format(Environment):
    """1 when the whole response has a form, or shares of it."""

    name = "format"
    has_side_effects = False

    def __init__(self, config: FormatConfig) -> None:
        self._config = config
        self._pattern = None if config.pattern is None else BoundedPattern(config.pattern)
        self._shares = config.shares or {tag: 1 / len(config.tags) for tag in config.tags}

    def score(self, prompt: Prompt, response: str) -> float | Score:
        if len(response) > self._config.max_chars:
            return 0.0
        if self._pattern is not None:
            return _matched(self._pattern, response)
        if self._config.credit == "whole":
            return float(_has_tags(response, self._config.tags))
        return partial_credit(response, self._shares, single_tags=self._config.credit == "tags")


class CodeJaccard(Environment):
    """Words in common with a reference."""

    name = "code_jaccard"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: CodeJaccardConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> float:
        wanted, given = required_answer(prompt, self.name), response.strip()
        if self._config.ignore_case:
            wanted, given = wanted.lower(), given.lower()
        similarity = jaccard(set(wanted.split()), set(given.split()))
        if self._config.length_penalty:
            similarity *= min(len(wanted), len(given)) / max(len(wanted), len(given))
        return similarity


def jaccard(one: AbstractSet[str], other: AbstractSet[str]) -> float:
    """Share of the elements of two sets that are in both: |A ∩ B| / |A ∪ B|; 0 for two empty ones.

    Example:
        >>> jaccard({"a", "+", "b"}, {"a", "-", "b"})
        0.5
    """
    return len(one & other) / len(one | other) if one or other else 0.0


class Repetition(Environment):
    """A penalty for repeated runs of words."""

    name = "repetition"

    def __init__(self, config: RepetitionConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> float:
        units = response.lower().split() if self._config.of == "words" else list("".join(response.lower().split()))
        return -self._config.max_penalty * repeated_share(units, self._config.run_length)


def repeated_share(units: Sequence[str], run_length: int) -> float:
    """Share of the runs of so many units that repeat an earlier one: 1 - distinct / all (arXiv:2502.03373, appendix C).

    Example:
        >>> repeated_share("a b a b a b".split(), 2)  # ab, ba, ab, ba, ab: 2 of 5 are distinct
        0.6
    """
    runs = [tuple(units[start : start + run_length]) for start in range(len(units) - run_length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def partial_credit(response: str, shares: Mapping[str, float], *, single_tags: bool = False) -> float:
    """The shares of the elements that a response has, in any order and with anything around them.

    An element counts when its tags occur once each, in order, with text between them. What occurs twice earns nothing,
    or the reward could be had by repeating it.

    Args:
        response: What the policy wrote.
        shares: Element -> what it is worth.
        single_tags: Pay half of an element's share for each of its two tags that occurs once.
    """
    earned = 0.0
    for tag, share in shares.items():
        start, end = f"<{tag}>", f"</{tag}>"
        once = [response.count(text) == 1 for text in (start, end)]
        if single_tags:
            earned += share * sum(once) / 2
        elif all(once) and start in response.partition(end)[0]:
            earned += share * has_content(response.partition(start)[2].partition(end)[0])
    return earned


def has_content(text: str) -> bool:
    """Something can be seen in it: a letter, digit, punctuation mark or symbol, not only spaces, controls and marks."""
    return any(unicodedata.category(char)[0] in "LNPS" and char not in _BLANK for char in text)


_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Fillers of Hangul and the empty Braille cell: letters and symbols by category, and nothing to be seen."""


def _matched(pattern: BoundedPattern, response: str) -> Score:
    """A response that would keep the search busy earns nothing, and is counted."""
    try:
        return Score(float(pattern.matches(response)), metrics={"pattern_timeout": 0.0})
    except PatternTimeoutError:
        return Score(0.0, metrics={"pattern_timeout": 1.0})


def _has_tags(response: str, tags: tuple[str, ...]) -> bool:
    """Whether the response is the elements in order, each once and filled, with only space around. Linear time."""
    rest = response.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if response.count(start) != 1 or response.count(end) != 1 or not rest.startswith(start):
            return False
        inside, _, rest = rest[len(start) :].partition(end)
        rest = rest.lstrip()
        if not has_content(inside):
            return False
    return not rest


MATCH_TIMEOUT_S = 0.2
"""Of one match. An honest pattern takes microseconds."""


class PatternTimeoutError(Exception):
    """A match was given up: nobody knows whether the text has the form."""


class BoundedPattern:
    """A pattern in which a dot matches line ends too. Other threads run while it searches.

    Raises:
        ValueError: It is no regular expression.
    """

    def __init__(self, pattern: str, *, timeout_s: float = MATCH_TIMEOUT_S) -> None:
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(str(error)) from error
        self._timeout_s = timeout_s

    def matches(self, text: str) -> bool:
        """The whole text has the form.

        Raises:
            PatternTimeoutError: The search took longer than the pattern's time.
        """
        try:
            return self._pattern.fullmatch(text, timeout=self._timeout_s, concurrent=True) is not None
        except TimeoutError as error:
            raise PatternTimeoutError(f"no verdict after {self._timeout_s:g} s of searching") from error
