"""Checks of environments by whole episodes, of those that answer the policy and of those that drive it alike: what a
scripted conversation earns, what a prompt looks like afterwards, and what becomes of other forms of a right answer."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemorl.types import Prompt, Score

from nemorl_testing.agents import ScriptedPolicy, played
from nemorl_testing.environments import (
    TAME_RESPONSES,
    as_prompt,
    build,
    examples,
    is_finite,
    pool_of,
    prompts,
)
from nemorl_testing.kit import NotApplicable, Subject, expect

FORM_EXAMPLES = 3
"""Examples whose forms are tried."""
_WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

FORMS: Mapping[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "lower case": str.lower,
    "spaces around it": lambda text: f" \t\r\n{text}\u00a0\n\n",
    "cut in the middle": lambda text: text[: len(text) // 2],
    "cut before its end": lambda text: text[:-1],
    "its end alone": lambda text: text[-1:],
    "in a code fence": lambda text: f"```\n{text}\n```",
    "in a code fence that is not closed": lambda text: f"Here you are:\n~~~text\n{text}",
    "twice": lambda text: f"{text}\n{text}",
    "twice in one line": lambda text: text + text,
    "in bold": lambda text: f"**{text}**",
    "in a box": lambda text: f"\\boxed{{{text}}}",
    "as JSON": json.dumps,
    "after thinking": lambda text: f"<think>\nHm. {text}?\n</think>\n{text}",
    "before a long remark": lambda text: text + " And so on." * 5_000,
    "after a long remark": lambda text: "Well, " * 5_000 + text,
    "with wide digits": lambda text: text.translate(_WIDE),
    "with raised digits": lambda text: text.translate(_RAISED),  # str.isdigit says yes, int() no
    "divided by zero": lambda text: f"{text}/0",
    "to a power of powers": lambda text: f"{text}^{text}^9^9^9^9",
    "decomposed, with a mark on each character": lambda text: "".join(
        unicodedata.normalize("NFD", char) + "\u0301" for char in text[:500]
    ),
    "with invisible characters": lambda text: "\ufeff" + "\u200b".join(text[:500]),
    "with a null byte": lambda text: f"\x00{text}\x00",
}
"""What a policy that knows the answer makes of it, by name."""


@dataclass(frozen=True)
class Episode:
    """Outcome of one episode."""

    scores: Sequence[Score]
    """Of its turns; of an agent's, one."""
    turns: int
    """Replies that were asked for"""

    @property
    def total(self) -> float:
        return sum(score.reward for score in self.scores)

    @property
    def strange(self) -> list[str]:
        """Numbers that cannot be averaged."""
        named = [("reward", score.reward) for score in self.scores]
        named += [pair for score in self.scores for pair in {**score.components, **score.metrics}.items()]
        return [f"{name} = {value!r}" for name, value in named if not is_finite(value)]


def check_conversations_get_their_total(subject: Subject) -> None:
    """A scripted conversation goes on to its last reply, and earns in all what the author states. (DESIGN 5)"""
    stage = Stage(subject)
    scripts = [
        (as_prompt(given), _replies(said), wanted)
        for given, said, wanted in subject.settings.examples
        if stage.environment.drives_policy or not isinstance(said, str)
    ]
    if not scripts:
        raise NotApplicable("give examples=[(prompt, [reply, reply, …], expected total), …]")
    for prompt, replies, wanted in scripts:
        found = stage.play(prompt, replies)
        asked = f"{list(replies)!r:.200} to {prompt.text[:80]!r}"
        expect(found.turns >= len(replies), f"{asked}: it ended after {found.turns} of {len(replies)} replies")
        expect(not found.strange, f"{asked} gets {', '.join(found.strange)}")
        close = wanted is None or math.isclose(found.total, wanted, rel_tol=1e-6, abs_tol=1e-9)
        expect(close, f"{asked} earns {found.total} in all, expected {wanted}")


def check_prompts_are_left_as_they_are(subject: Subject) -> None:
    """An episode changes nothing in its prompt: all of a group, and every epoch, read the same row. (DESIGN 5)"""
    stage = Stage(subject)
    stated = [(given, said) for given, said, _ in subject.settings.examples]
    for given, said in [*stated, *((prompt, text) for prompt in prompts(subject) for text in TAME_RESPONSES)]:
        prompt = copy.deepcopy(as_prompt(given))
        before = copy.deepcopy(prompt)
        stage.play(prompt, _replies(said))
        expect(prompt == before, f"after {said!r:.80}, the prompt is {prompt!r:.400}, it was {before!r:.400}")


def check_any_form_of_an_example_gets_a_finite_score(subject: Subject) -> None:
    """Other forms of a stated response, fenced, cut or twice, and a row's numbers as numbers, raise nothing and get a
    finite score. (DESIGN 5)"""
    stage = Stage(subject)
    chosen = sorted(examples(subject), key=lambda example: -(example[2] or 0.0))[:FORM_EXAMPLES]
    if not chosen:
        raise NotApplicable("give examples=[(prompt, response, expected reward), …]")
    for given, response, _ in chosen:
        for form, prompt, text in _forms(as_prompt(given), response):
            found = stage.play(prompt, (text,))
            expect(not found.strange, f"{response[:60]!r} {form} gets {', '.join(found.strange)}")
        numeric = _with_numbers(as_prompt(given))
        as_text, as_number = (stage.play(prompt, (response,)).total for prompt in (as_prompt(given), numeric))
        expect(as_text == as_number, f"{response[:60]!r} earns {as_text}, and {as_number} for the row {numeric.row!r}")


class Stage:
    """A new environment, and what plays episodes of it."""

    def __init__(self, subject: Subject) -> None:
        self.environment = build(subject)
        self._pool = None
        if not self.environment.drives_policy:
            self._pool = subject.own(pool_of(self.environment), "close")

    def play(self, prompt: Prompt, replies: Sequence[str]) -> Episode:
        """One episode with a policy that says these replies in turn. An agent hears a single one over and over."""
        if self._pool is None:
            policy = ScriptedPolicy(replies[0] if len(replies) == 1 else replies)
            score = asyncio.run(played(self.environment, prompt, policy))
            return Episode([score], len(policy.asked))
        episode, scores = self._pool.start(prompt), list[Score]()
        for reply in replies:
            (step,) = self._pool.step([episode], [reply])
            scores.append(step.score)
            if step.done or step.observation is None:
                break
        return Episode(scores, len(scores))


def _replies(said: str | Sequence[str]) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(said)


def _forms(prompt: Prompt, response: str) -> Iterator[tuple[str, Prompt, str]]:
    """Name of a form, the prompt, and what is said."""
    for name, change in FORMS.items():
        if change(response).strip():  # blank responses are among the odd ones
            yield name, prompt, change(response)
    if prompt.answer is not None:
        yield "reduced to the answer", prompt, prompt.answer


def _with_numbers(prompt: Prompt) -> Prompt:
    """The prompt of a row whose columns hold numbers where they held their digits, as JSON files have them."""
    return replace(prompt, row={name: _as_number(value) for name, value in prompt.row.items()})


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
