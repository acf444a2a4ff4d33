"""The words of the errors that users see most stand in one golden file, and nowhere in the tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from nemorl.errors import ConfigError, ConfigIssue, UsageError
from recorded_messages import COLLECTED, GOLDEN, TESTS, Raises, forgotten, read_messages, written_messages

FOREIGN = {"unit/megatron/test_megatron_model.py": ["not compiled with CUDA"]}
"""Sentences that a test looks for because somebody else wrote them: here PyTorch. This table only gets shorter."""


def sentences(file: Path) -> list[str]:
    """What is passed as ``match=`` or as a fact to ``raises``, if it holds a blank."""
    looked_for: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "match":
            looked_for.append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "raises":
            looked_for += node.args[1:]
    literals = [each.value for part in looked_for for each in ast.walk(part) if isinstance(each, ast.Constant)]
    return [text for text in literals if isinstance(text, str) and " " in text.strip()]


def test_no_test_looks_for_a_sentence_of_ours() -> None:
    found = {str(file.relative_to(TESTS)): sentences(file) for file in sorted(TESTS.rglob("test_*.py"))}
    assert {file: texts for file, texts in found.items() if texts} == FOREIGN, "use the fixture raises"


def test_every_recorded_message_has_its_test(request: pytest.FixtureRequest) -> None:
    messages = read_messages(GOLDEN.read_text(encoding="utf-8"))
    assert forgotten(messages, request.config.stash.get(COLLECTED, set())) == [], "run pytest --write-messages"


def test_tests_that_are_gone_are_told_from_those_left_out() -> None:
    names = ["unit/test_messages.py::test_a", "unit/test_messages.py::test_b[1]", "unit/test_gone.py::test_c"]
    assert forgotten(names, set()) == names[2:]
    assert forgotten(names, {"unit/test_messages.py::test_a"}) == names[1:]


def test_the_golden_file_is_read_as_it_was_written() -> None:
    messages = {"b.py::x": "UsageError: no\n\n  fix: yes", "a.py::y[2]": "E: same", "a.py::y[10]": "E: same"}
    text = written_messages(messages)
    assert read_messages(text) == messages
    assert text.count("E: same") == 1
    assert text.index("a.py") < text.index("b.py")


@pytest.fixture
def recorder() -> Raises:
    return Raises({Path("/place"): "<place>"}, "UsageError: <place>/a took <...> s")


def test_facts_and_paths_are_asserted_at_once(recorder: Raises) -> None:
    with recorder(UsageError, 7, "/place"):
        raise UsageError("7 s at /place")
    with recorder(ConfigError, 7, path=["policy.lr", "seed"]):
        raise ConfigError([ConfigIssue("policy.lr", "is 7"), ConfigIssue("seed", "is odd")])
    with pytest.raises(AssertionError, match="'7'"), recorder(UsageError, 7):
        raise UsageError("70 s")
    with pytest.raises(AssertionError, match=r"policy\.lr"), recorder(ConfigError, path="policy"):
        raise ConfigError([ConfigIssue("policy.lr", "is 7")])


def test_words_are_compared_without_what_differs_between_machines(recorder: Raises) -> None:
    with recorder(UsageError, varies=r"\d\.\d+"):
        raise UsageError("/place/a took 0.125 s")
    recorder.compare()


def test_other_words_fail_the_test_with_their_difference(recorder: Raises) -> None:
    with recorder(UsageError):
        raise UsageError("/place/a is slow")
    with pytest.raises(pytest.fail.Exception) as caught:
        recorder.compare()
    lines = str(caught.value).splitlines()
    assert "-UsageError: <place>/a took <...> s" in lines
    assert "+UsageError: <place>/a is slow" in lines


def test_a_test_that_the_golden_file_does_not_name_is_not_compared() -> None:
    recorder = Raises({}, None)
    with recorder(UsageError):
        raise UsageError("in other words")
    recorder.compare()
