"""Checks of environments: finite, repeatable scores for anything a policy may say, from any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments import EnvironmentPool

from nemorl_testing.blocking import blocking_calls
from nemorl_testing.kit import NotApplicable, Subject, expect

ODD_RESPONSES = (
    "",
    " \n\t",
    "\x00",
    "42 " * 20_000,
    "(" * 5_000,
    "数学の答えは四十二です。 ∑∫√ ½ ٤٢ 👩‍👩‍👧 e\u0301 \u202eabc\ufffd",
    "\\boxed{\\frac{1}{",
    '{"answer": [1, {"x": ',
    "<think>" * 50,
    "nan inf -inf 1e999 0x2a 1/0",
)
"""Responses of an untrained policy."""
TAME_RESPONSES = ("42", "I do not know.")
TIMEOUT_S = 60.0
THREADS = 8

Example = tuple[Any, str, float | None]
"""Prompt, response and reward of one turn."""


def check_examples_get_their_reward(subject: Subject) -> None:
    """Right and wrong answers get the rewards that the author states. (DESIGN 5)"""
    stated = [example for example in examples(subject) if example[2] is not None]
    if not stated:
        raise NotApplicable("give examples=[(prompt, response, expected reward), …]")
    for (prompt, response, wanted), step in zip(_pairs(stated), _steps(subject, stated), strict=True):
        close = wanted is not None and math.isclose(step.score.reward, wanted, rel_tol=1e-6, abs_tol=1e-9)
        expect(close, f"{response!r} to {prompt.text!r} scores {step.score.reward}, expected {wanted}")


def check_any_response_gets_a_finite_score(subject: Subject) -> None:
    """Empty, endless, broken and foreign responses get a finite score, in time; nothing raises. (DESIGN 5)"""
    cases = [(prompt, response, None) for prompt in prompts(subject) for response in ODD_RESPONSES]
    for (_, response, _), step in zip(cases, _steps(subject, cases), strict=True):
        score = step.score
        numbers = {"reward": score.reward, **score.components, **score.metrics}
        bad = [f"{name} = {value!r}" for name, value in numbers.items() if not is_finite(value)]
        expect(not bad, f"{response[:60]!r} scores {', '.join(bad)}")
        late = "environment_timeout" in score.metrics
        expect(not late, f"{response[:60]!r} (and others) took more than {TIMEOUT_S} s")


def check_scores_are_repeatable(subject: Subject) -> None:
    """The same response to the same prompt scores the same, again and in a new environment. (DESIGN 7.9)"""
    cases = _cases(subject)
    first, again = _steps(subject, cases), _steps(subject, cases)
    for (_, response, _), one, other in zip(cases, first, again, strict=True):
        expect(one.score == other.score, f"{response[:60]!r} scores {one.score}, then {other.score}")


def check_threads_do_not_change_scores(subject: Subject) -> None:
    """Scores from many threads at once are those of one thread. (DESIGN 5)"""
    environment = build(subject)
    pool = pool_of(environment, concurrency=1)
    cases = _cases(subject)
    wanted = [_step_in(pool, case).score for case in cases]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda case: _step_in(pool, case).score, cases * THREADS))
    for index, score in enumerate(found):
        expect(score == wanted[index % len(cases)], f"{score} from a thread, {wanted[index % len(cases)]} alone")


def check_async_code_never_blocks(subject: Subject) -> None:
    """An ``async def`` shares its event loop: it awaits instead of sleeping or asking a server in place. (DESIGN 5)"""
    with blocking_calls() as seen:
        _steps(subject, _cases(subject))
    expect(not seen, f"it calls {', '.join(sorted(seen))} on the event loop: await, or leave out async")


def check_episode_answers(subject: Subject) -> None:
    """start(prompt) gives a fresh episode; each answers alike and says how it goes on. (DESIGN 5)"""
    environment = build(subject)
    pool = pool_of(environment)
    for case in _cases(subject)[:4]:
        one, other = _step_in(pool, case), _step_in(pool, case)
        expect(isinstance(one, Step) and isinstance(one.score, Score), f"step() returned {one!r}")
        expect(one == other, f"two episodes of one prompt answer {one} and {other}")
        talks = one.observation is None or isinstance(one.observation, str)
        expect(talks and isinstance(one.done, bool), f"observation {one.observation!r}, done {one.done!r}")
        expect(one.done or one.observation is not None, "the episode goes on, but there is nothing to answer")


def check_close_twice_is_harmless(subject: Subject) -> None:
    """The environment derives from nemorl's base, closes unused and used, and twice. (DESIGN 5)"""
    unused, used = build(subject), build(subject)
    expect(isinstance(used, Environment), f"{type(used).__name__} does not derive from nemorl.Environment")
    if not used.drives_policy:
        _step_in(pool_of(used), _cases(subject)[0])
    for environment in (unused, used):
        environment.close()
        environment.close()


def as_prompt(given: Any, index: int = 0) -> Prompt:
    """Text, a mapping of ``Prompt`` fields, or a ``Prompt``."""
    if isinstance(given, Prompt):
        return given
    fields: Mapping[str, Any] = {"text": given} if isinstance(given, str) else given
    row = {"prompt": fields.get("text", ""), "answer": fields.get("answer")}
    return Prompt(**{"index": index, "text": "", "token_ids": (1,), "row": row, **fields})


def build(subject: Subject) -> Any:
    """A new environment, closed when the checks end."""
    subject.require_modules()
    return subject.own(subject.config.build(), "close")


def is_finite(value: object) -> bool:
    """A number that can be averaged."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def examples(subject: Subject) -> list[Example]:
    """The author's examples of one turn. Conversations are played by ``episodes``."""
    return [(given, said, wanted) for given, said, wanted in subject.settings.examples if isinstance(said, str)]


def prompts(subject: Subject) -> list[Prompt]:
    """The prompt of the author's first example, or a sum."""
    return [as_prompt(given) for given, *_ in subject.settings.examples[:1]] or [
        as_prompt({"text": "1+1=", "answer": "2"})
    ]


def _cases(subject: Subject) -> list[Example]:
    """The first response of each example, and responses of any policy."""
    stated = ((given, said if isinstance(said, str) else said[0]) for given, said, _ in subject.settings.examples)
    tame = ((prompts(subject)[0], response) for response in TAME_RESPONSES)
    return [(given, said, None) for given, said in (*stated, *tame)]


def _pairs(cases: Sequence[Example]) -> list[tuple[Prompt, str, float | None]]:
    return [(as_prompt(given, index), response, wanted) for index, (given, response, wanted) in enumerate(cases)]


def _steps(subject: Subject, cases: Sequence[Example]) -> list[Step]:
    """The first turn of every case, one after the other, in a new environment."""
    pool = pool_of(build(subject), concurrency=1)
    pairs = _pairs(cases)
    return pool.step([pool.start(prompt) for prompt, *_ in pairs], [response for _, response, _ in pairs])


def pool_of(environment: Environment, *, concurrency: int = 16) -> EnvironmentPool:
    """The pool that steps its episodes, as in a run."""
    if environment.drives_policy:
        raise NotApplicable("it drives the policy, and does not answer it")
    return EnvironmentPool(environment, timeout_s=TIMEOUT_S, concurrency=concurrency)


def _step_in(pool: EnvironmentPool, case: Example) -> Step:
    return pool.step([pool.start(as_prompt(case[0]))], [case[1]])[0]
