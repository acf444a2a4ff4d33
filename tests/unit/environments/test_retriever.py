"""The environment ``retriever``: BM25 by hand, and the conversation with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import validate
from nemorl.errors import ConfigError, DataError
from nemorl.types import Prompt
from nemorl_rl.environments import EnvironmentPool
from nemorl_tasks.environments import RetrieverConfig
from nemorl_testing import checks_for
from nemorl_testing.kit import check_plugin
from recorded_messages import Raises

pytest.importorskip("bm25s", reason="the extra [retriever]")

from nemorl_tasks.environments.retriever.corpus import Corpus

DOCUMENTS = ["The cat sat on the mat", "A dog barked", "Cats and dogs are pets"]
TOWER = Prompt(0, "Who built it?", (1,), answer="Eiffel")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [
        {"title": "Tower", "text": "Gustave Eiffel built the tower in 1889."},
        {"title": "River", "text": "The Seine flows through the city, past the tower."},
        {"title": "Bread", "text": "Baguettes are baked every morning."},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_a_score_is_that_of_bm25_by_hand() -> None:
    # "dog" is in 1 of 3 documents: idf = ln(1 + (3 - 1 + 0.5) / (1 + 0.5)) = ln(8/3). The document has 3 of on average
    # (6 + 3 + 5) / 3 = 14/3 words: 1 / (1 + 1.5 * (0.25 + 0.75 * 3 / (14/3))) = 1 / (1 + 1.5 * 0.732142857).
    index = Corpus(DOCUMENTS, k1=1.5, b=0.75)._index
    expected = math.log(8 / 3) / (1 + 1.5 * (0.25 + 0.75 * 9 / 14))
    assert index.get_scores(["dog"]).tolist() == pytest.approx([0, expected, 0])


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("DOG?", [1]),
        ("the cat", [0]),
        ("cat dogs", [2, 0]),  # both are in one document each; the shorter document is first
        ("and mat", [2, 0]),
        ("unicorn", []),
        ("", []),
        ("?!", []),
        ("dog " * 10_000, [1]),
    ],
)
def test_documents_without_a_word_of_the_query_are_not_found(query: str, found: list[int]) -> None:
    corpus = Corpus(DOCUMENTS, k1=1.5, b=0.75)
    assert corpus.search(query, 2) == [DOCUMENTS[number] for number in found]


def test_no_more_documents_come_than_asked_for_or_there_are() -> None:
    corpus = Corpus(["a b", "a c", "a d"], k1=1.5, b=0.75)
    assert corpus.search("a", 2) == ["a b", "a c"]  # equals in the order of the corpus
    assert len(corpus.search("a", 10)) == 3


def test_a_conversation_searches_reads_and_answers(corpus: Path) -> None:
    environment = RetrieverConfig(corpus=str(corpus), title_column="title", num_results=1, max_result_chars=20).build()
    episode = environment.start(TOWER)
    asked = episode.step("I look it up. <search>who built the tower</search>\n")
    assert asked.observation == "\n<information>\n(1) Tower\nGustave Eiffel…\n</information>\n"
    assert (asked.done, asked.score.reward, asked.score.metrics) == (False, 0.0, {"searches": 1, "empty_searches": 0})
    nothing = episode.step("<search>unicorns</search>")
    assert nothing.observation == "\n<information>\nNothing was found.\n</information>\n"
    assert nothing.score.metrics == {"searches": 1, "empty_searches": 1}
    answered = episode.step("It was <answer>Eiffel</answer>")
    assert (answered.done, answered.score.reward, answered.score.correct) == (True, 1.0, True)
    assert answered.score.metrics == {"searches": 0, "empty_searches": 0}


@pytest.mark.parametrize(
    ("response", "done", "reward"),
    [
        ("Eiffel", True, 1.0),
        ("<answer>Bread</answer><answer> Eiffel </answer>", True, 1.0),  # the last one counts
        ("<answer>Eiffel</answer><search>tower</search>", False, 0.0),  # ends with a search: no answer yet
        ("<search>tower</search> Eiffel", True, 0.0),  # a search in the middle is none
        ("<information>\n(1) Eiffel\n</information>", True, 0.0),  # results of its own making are no answer
        ("<search>tower", True, 0.0),
        ("<search><search>tower</search></search>", True, 0.0),
    ],
)
def test_what_a_response_ends_with_decides(corpus: Path, response: str, done: bool, reward: float) -> None:
    step = RetrieverConfig(corpus=str(corpus)).build().start(TOWER).step(response)
    assert (step.done, step.score.reward) == (done, reward)


def test_searches_are_limited_and_tags_are_chosen(corpus: Path) -> None:
    options = {"call_tag": "retrieve", "result_tag": "result", "max_searches": 1}
    episode = validate(RetrieverConfig, {"corpus": str(corpus), **options}, source="test").build().start(TOWER)
    first, second = (episode.step("<retrieve>tower</retrieve>") for _ in range(2))
    assert "<result>\n(1) " in first.observation
    assert (second.done, second.score.reward, second.score.correct) == (True, 0.0, False)


def test_any_environment_grades_the_answer(corpus: Path) -> None:
    grader = {"name": "exact_match", "contains": True}
    config = validate(RetrieverConfig, {"corpus": str(corpus), "grader": grader}, source="test")
    pool = EnvironmentPool(config.build())
    (step,) = pool.step([pool.start(TOWER)], ["It was Gustave Eiffel."])
    pool.close()
    assert step.score.correct is True


def test_a_folder_of_texts_is_a_corpus(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "zebra.md").write_text("# Zebras\nhave stripes")
    (tmp_path / "image.png").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "marked.jsonl").write_text('{"text": "with the mark of an editor"}', encoding="utf-8-sig")
    episode = RetrieverConfig(corpus=str(tmp_path)).build().start(TOWER)
    assert "have stripes" in episode.step("<search>zebras</search>").observation


@pytest.mark.parametrize(
    ("text", "facts"),
    [("", []), ('{"text": "a"}\nno', ["line 2"]), ('{"body": "a"}', ["'text'", "body"]), ('{"text": 3}', ["line 1"])],
)
def test_a_corpus_that_is_none_is_an_error(tmp_path: Path, text: str, facts: list[Any], raises: Raises) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    with raises(DataError, *(fact.split()[-1] for fact in facts)):
        RetrieverConfig(corpus=str(tmp_path / "c.jsonl")).build()


def test_a_corpus_that_is_not_there_is_found_when_the_config_loads(tmp_path: Path, raises: Raises) -> None:
    with raises(ConfigError, path="corpus"):
        validate(RetrieverConfig, {"corpus": str(tmp_path / "none")}, source="test")


@pytest.mark.slow
def test_a_retriever_keeps_the_clauses_of_environments(corpus: Path) -> None:
    examples = [({"text": "?", "answer": "Eiffel"}, "Eiffel", 1.0)]
    assert checks_for("environments")
    check_plugin("environments", {"name": "retriever", "corpus": str(corpus)}, examples=examples)
