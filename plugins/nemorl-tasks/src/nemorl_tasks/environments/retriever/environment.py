"""The conversation with the search engine: results for searches, a grade for the answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

from nemorl.base.text.reading import expanded
from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments.sources import as_environment

from nemorl_tasks.environments.retriever.corpus import Corpus, read_documents

if TYPE_CHECKING:
    from nemorl_tasks.environments.retriever.config import RetrieverConfig

NOTHING_FOUND = "Nothing was found."
MOST_ANSWERS = 2
"""Answers that a response may give: a first one and a second thought."""
MAX_CALL_CHARS = 2000
"""The part of a response, from its end, in which a search is looked for. What comes before is reasoning."""


class Retriever(Environment):
    """Conversations with a search engine."""

    name = "retriever"

    def __init__(self, config: RetrieverConfig) -> None:
        self._config = config
        grader = as_environment(config.grader)
        if grader is None:
            raise UsageError("nothing scores the answers", fix="set environment.grader")
        self._grader = grader
        self.batched = grader.batched
        documents = read_documents(expanded(config.corpus), config.text_column, config.title_column)
        self._corpus = Corpus(documents, k1=config.k1, b=config.b)

    def start(self, prompt: Prompt) -> _Session:
        return _Session(self._config, self._corpus, self._grader.start(prompt))

    def close(self) -> None:
        self._grader.close()


class _Session:
    def __init__(self, config: RetrieverConfig, corpus: Corpus, grading: Episode) -> None:
        self._config, self._corpus, self._grading = config, corpus, grading
        self._call = re.compile(rf"<{config.call_tag}>([^<>]*)</{config.call_tag}>\Z")
        self._searches = 0

    def step(self, response: str) -> Step | Awaitable[Step]:
        """The documents found for a search, or the verdict on a final answer."""
        call = self._call.search(response[-MAX_CALL_CHARS:].rstrip())
        if call is None:
            verdict = self._grading.step(final_answer(response))
            return _counted_later(verdict) if isinstance(verdict, Awaitable) else _counted(verdict)
        self._searches += 1
        if self._searches > self._config.max_searches:
            return Step(Score(0.0, metrics=_counts(searches=1), correct=False))
        found = self._corpus.search(call[1], self._config.num_results)
        counts = _counts(searches=1, empty=int(not found))
        return Step(Score(0.0, metrics=counts, correct=False), self._observation(found), done=False)

    def _observation(self, found: list[str]) -> str:
        tag, limit = self._config.result_tag, self._config.max_result_chars
        texts = [text if len(text) <= limit else f"{text[:limit]}…" for text in found]
        inside = "\n\n".join(f"({number}) {text}" for number, text in enumerate(texts, start=1)) or NOTHING_FOUND
        return self._config.observation(f"<{tag}>\n{inside}\n</{tag}>")


def final_answer(response: str) -> str:
    """The content of the last ``<answer>`` element; of a response without one, all of it. One that tries out several
    answers gives none.

    >>> final_answer("<answer>Bonn</answer> no, <answer>Berlin</answer>"), final_answer("<answer>" * 3 + "Berlin")
    ('Berlin', '')
    """
    _, *elements = response.split("<answer>")
    answers = [inside.partition("</answer>")[0].strip() for inside in elements]
    if len(answers) > MOST_ANSWERS:
        return ""
    return answers[-1] if answers else response


def _counts(searches: int = 0, empty: int = 0) -> dict[str, float]:
    return {"searches": float(searches), "empty_searches": float(empty)}


def _counted(verdict: Step) -> Step:
    score = replace(verdict.score, metrics={**verdict.score.metrics, **_counts()})
    return Step(score)


async def _counted_later(verdict: Awaitable[Step]) -> Step:
    return _counted(await verdict)
