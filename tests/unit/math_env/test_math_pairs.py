import random
from collections.abc import Iterable

import pytest
from answer_pairs import Pair, changed_truths, generated_pairs, whole_responses, written_pairs
from nemorl_math_env import MathConfig, worker
from nemorl_math_env.answers import canonical, decide, final_answer, is_number, reference_answer

PIECES = [
    *(
        "\\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "^",
        "_",
        "!",
        "'",
        "\\sqrt",
        "\\pi",
        "x",
        "2",
        "10",
        ".5",
        "+",
        "-",
    ),
    *(
        "*",
        "/",
        "=",
        "<",
        ",",
        ";",
        " and ",
        " or ",
        "\\cup",
        "\\in",
        "\\pm",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
    ),
    *(
        "\\\\",
        "\\text{",
        "cm",
        "%",
        "$",
        "°",
        "e",
        "i",
        "\\infty",
        "\\sin",
        "\\log_",
        "½",
        "²",
        "√",
        " ",
        "\n",
        "million",
    ),
    *(
        "Answer: ",
        "\\boxed{",
        "####",
        "Eq(",
        "not",
        "\\lfloor",
        "0.\\overline{3}",
        "\x00",
        "१",
        "∞",
        "1e400",
        "/0",
        "!!",
    ),
]


def accepts(truth: str, response: str) -> bool:
    """What the environment does, with the worker's part in this process."""
    truth = reference_answer(truth)
    given = final_answer(response, numeric=is_number(truth))
    if given is None:
        return False
    decided = decide(truth, given)
    by_algebra = worker.grade(truth, given) == "right"
    assert decided in (None, by_algebra), f"the fast path disagrees about {given!r} for {truth!r}"
    return by_algebra


def wrongly_judged(pairs: Iterable[Pair]) -> list[Pair]:
    return [pair for pair in pairs if accepts(pair.truth, pair.response) != pair.is_right]


def test_no_hand_written_pair_is_judged_wrongly():
    pairs = written_pairs()
    assert len({(pair.truth, pair.response) for pair in pairs}) >= 800
    assert sum(pair.is_right for pair in pairs) >= 300
    assert wrongly_judged(pairs) == []


@pytest.mark.parametrize("name", ["response_pairs.txt", "response_pairs_later.txt", "response_pairs_last.txt"])
def test_no_wrong_response_is_paid_and_hardly_a_right_one_refused(name):
    pairs = whole_responses(name)
    wrongly = wrongly_judged(pairs)
    assert [pair for pair in wrongly if not pair.is_right] == []
    assert len(wrongly) <= 0.02 * sum(pair.is_right for pair in pairs), wrongly


def test_one_change_to_a_right_answer_makes_it_wrong_and_a_rewriting_does_not():
    pairs = generated_pairs(seed=1, rounds=6)
    assert len(pairs) > 600
    assert wrongly_judged(pairs) == []


def test_a_right_answer_with_another_symbol_digit_or_sign_is_wrong():
    pairs = list(changed_truths())
    assert len(pairs) > 100
    assert wrongly_judged(pairs) == []


def test_every_answer_is_right_for_itself():
    assert [
        truth for truth in {pair.truth for pair in written_pairs()} if not accepts(truth, rf"\boxed{{{truth}}}")
    ] == []


def test_undone_arithmetic_is_right_where_it_is_asked_for():
    undone = [pair for pair in written_pairs() if pair.category == "unevaluated"]
    assert len(undone) >= 7
    for pair in undone:
        given = final_answer(pair.response) or ""
        assert decide(pair.truth, given) is False
        assert worker.grade_unevaluated(pair.truth, given) == "right"
    assert worker.grade_unevaluated("19", "12+8") == "wrong"


@pytest.mark.slow
def test_noise_is_read_without_an_error_and_earns_nothing():
    rng = random.Random(0)
    for _ in range(60):
        noise = "".join(rng.choice(PIECES) for _ in range(rng.choice((3, 8, 30, 200))))
        for text in (noise, rng.choice(PIECES) * 200):
            for truth in ("7", "x^2+7", r"\frac{\sqrt{7}}{2}"):
                canonical(text, truth=truth)
                assert decide(truth, text) is not True
                assert not accepts(truth, text)
            worker.grade(text, text)


@pytest.mark.parametrize(
    ("answer", "truth", "vote"),
    [
        ("2y", "2", "2y"),
        ("2", "2y", "2"),
        ("0.50", None, "1/2"),
        (r"\frac{2}{4}", None, "1/2"),
        ("5 cm", "7", "5"),  # the unit is understood
        ("5 cm", "7 cm", "5"),
        ("5 m", "7 cm", "5 metre"),
        ("10 AM", None, "10 am"),
        ("10 PM", None, "10 pm"),
        ("x = 3", "4", "3"),
        ("2, 1", "1, 3", "1 , 2"),
        ("(2, 1)", "(1, 3)", "(2, 1)"),
        ("5!", "120", "5!"),
        ("3i", "3", "3i"),
        ("X", "x", "X"),
    ],
)
def test_votes_are_merged_only_for_equal_answers(answer, truth, vote):
    assert canonical(answer, truth=truth) == vote


def test_a_noun_of_the_question_is_a_unit_and_other_words_are_not():
    from nemorl.types import Prompt

    environment = MathConfig().build()
    prompt = Prompt(0, "How many paper clips does she have? She had 3 dozen.", (), answer="12")
    rewards = {
        response: environment.score(prompt, rf"\boxed{{12 {response}}}").reward  # type: ignore[union-attr]
        for response in ("paper clips", "clips", "dozen clips", "horseflies", "clips or 13")
    }
    environment.close()
    assert rewards == {"paper clips": 1, "clips": 1, "dozen clips": 0, "horseflies": 0, "clips or 13": 0}
