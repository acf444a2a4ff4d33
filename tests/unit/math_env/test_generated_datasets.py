import pickle
import re
import subprocess
import sys

import pytest
from nemorl_math_env import ArithmeticConfig, MathConfig, WordProblemsConfig
from nemorl_math_env.splits import choose, share
from nemorl_math_env.templates import TEMPLATES
from pydantic import ValidationError
from recorded_messages import Raises

ALL = ("+", "-", "*")


def test_a_row_serves_reinforcement_and_supervised_learning():
    row = ArithmeticConfig(max_value=0, num_train=1, num_validation=0).build("train")[0]
    assert row == {"prompt": "0+0=", "answer": "0", "response": "0", "problem": "0+0"}


def test_answers_are_right_for_every_operation():
    rows = ArithmeticConfig(operations=ALL, max_digits=2, num_train=300, num_validation=100).build("train")
    for row in rows:
        left, operation, right = re.fullmatch(r"(\d+)([-+*])(\d+)", row["problem"]).groups()
        expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operation]
        assert row["answer"] == row["response"] == str(expected)
        assert expected >= 0
    assert {re.search(r"\d([-+*])", row["problem"])[1] for row in rows} == set(ALL)


def test_the_whole_space_is_generated_once_and_no_more():
    # 0..9: 10 * 11 / 2 = 55 unordered pairs.
    config = ArithmeticConfig(max_digits=1, num_train=45, num_validation=10)
    rows = [*config.build("train"), *config.build("validation")]
    pairs = {tuple(sorted(map(int, row["problem"].split("+")))) for row in rows}
    assert len(rows) == len(pairs) == 55


def test_negative_differences_cover_all_ordered_pairs():
    # 3 * 3 = 9 ordered pairs of 0..2; without negatives 3 * 4 / 2 = 6.
    config = ArithmeticConfig(operations=("-",), max_value=2, allow_negative=True, num_train=9, num_validation=0)
    assert sorted(int(row["answer"]) for row in config.build("train")) == [-2, -1, -1, 0, 0, 0, 1, 1, 2]


def test_too_many_problems_is_a_config_error_with_the_numbers(raises: Raises):
    with raises(ValidationError, 500, 100, 600, 55, path="num_train"):
        ArithmeticConfig(max_digits=1)
    with raises(ValidationError, path="num_train"):
        WordProblemsConfig(num_train=2000)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"operations": ("+", "+")}, "operations"),
        ({"instruction": "Compute"}, "instruction"),
        ({"max_digits": 2, "max_value": 50}, "max_value"),
        ({"min_value": 200}, "min_value"),
        ({"operations": ()}, "operations"),
        ({"operations": ("/",)}, "operations"),
    ],
)
def test_impossible_arithmetic_is_reported_at_its_field(options, path):
    with pytest.raises(ValidationError) as caught:
        ArithmeticConfig(**options)
    assert caught.value.errors()[0]["loc"][0] == path


def test_an_empty_marker_is_reported(raises: Raises):
    with raises(ValidationError, path="answer_markers"):
        MathConfig(answer_markers=("answer is", " "))


@pytest.mark.parametrize(
    "config", [ArithmeticConfig(operations=ALL), *(WordProblemsConfig(difficulty=d) for d in (1, 2, 3))]
)
def test_splits_are_disjoint_full_and_distinct(config):
    train, validation = ([row["problem"] for row in config.build(split)] for split in ("train", "validation"))
    assert (len(set(train)), len(set(validation))) == (500, 100)
    assert not set(train) & set(validation)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows_in_another_process():
    code = (
        "from nemorl_math_env import *; r = ArithmeticConfig(operations=('+', '*')).build('train'); "
        "w = WordProblemsConfig().build('train'); print([r[i]['prompt'] for i in range(9)], w[7]['problem'])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    rows = ArithmeticConfig(operations=("+", "*")).build("train")
    assert str([rows[i]["prompt"] for i in range(9)]) in outputs.pop()


def test_another_seed_gives_other_rows():
    first, second = (list(ArithmeticConfig(seed=seed).build("train")) for seed in (0, 1))
    assert first != second


def test_the_validation_problems_do_not_depend_on_the_amount_of_training_data():
    small, large = (list(ArithmeticConfig(num_train=n).build("validation")) for n in (10, 1000))
    assert small == large


def test_there_is_no_split_that_was_not_asked_for():
    assert ArithmeticConfig(num_validation=0).build("validation") is None
    assert ArithmeticConfig().build("test") is None
    assert WordProblemsConfig().build("test") is None


def test_chat_prompts_are_messages():
    row = ArithmeticConfig(chat=True, max_value=0, num_train=1, num_validation=0).build("train")[0]
    assert row["prompt"] == [{"role": "user", "content": "What is 0+0? Reply with the number only."}]
    story = WordProblemsConfig().build("train")[0]
    assert story["prompt"][0]["content"] == f"{story['problem']} Solve the problem. End with 'Answer: <number>'."
    bare = WordProblemsConfig(chat=False, instruction="").build("train")[0]
    assert bare["prompt"] == f"{bare['problem']}\n"


def test_rows_survive_pickling():
    rows = WordProblemsConfig().build("train")
    assert list(pickle.loads(pickle.dumps(rows[:5]))) == list(rows)[:5]


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_the_worked_solutions_add_up(difficulty):
    # Every line 'a op b = c' of a response is true, there are `difficulty` of them, and the last is the answer.
    environment = MathConfig().build()
    for row in WordProblemsConfig(difficulty=difficulty, num_train=400, num_validation=0).build("train"):
        *lines, last = row["response"].split("\n")
        assert len(lines) == difficulty
        for line in lines:
            left, operation, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", line).groups()
            left, right = int(left), int(right)
            assert {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operation] == int(
                result
            )
        assert last == f"Answer: {row['answer']}"
        assert result == row["answer"]
        assert environment.outcome(row["answer"], row["response"]) == "right"


def test_difficulty_one_is_twelve_or_more_stories_with_small_numbers():
    assert sum(template.steps == 1 for template in TEMPLATES) >= 12
    rows = WordProblemsConfig(num_train=1000, num_validation=0).build("train")
    assert max(int(row["answer"]) for row in rows) <= 72  # 6 * 12
    assert max(len(row["problem"]) for row in rows) < 110


def test_shares_are_even_up_to_each_capacity():
    assert share(10, [2, 9, 9]) == [2, 4, 4]
    assert share(3, [1, 1, 1]) == [1, 1, 1]


def test_choose_can_take_everything():
    train, validation = choose(10, 7, 3, "seed")
    assert sorted(train + validation) == list(range(10))


def test_importing_the_configs_imports_nothing_heavy():
    code = "import sys, nemorl_math_env; print([m for m in ('torch','mpmath','pebble','sympy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
