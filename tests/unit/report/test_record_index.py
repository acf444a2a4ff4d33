"""The index of records: facts worked out by hand, files that come, change and go, and searches that nothing breaks."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl_cli.report.records.reading import record_files
from nemorl_cli.report.records.tokens import Vocabulary, token_texts
from nemorl_cli.report.viewing import queries
from nemorl_cli.report.viewing.details import detail_at
from nemorl_cli.report.viewing.index import RecordIndex
from nemorl_cli.report.viewing.queries import Wanted, match_words
from record_files import write_records
from recorded_messages import Raises

ATTACK = '</script><img src=x onerror=alert(1)>\u202e\x1b[31m" OR 1=1 -- * NEAR('


def record(step: int, group: int, place: int, reward: float, **others: Any) -> dict[str, Any]:
    """Two tokens of the policy after one of the prompt. The trainer disagrees by 0.25 and 0.5 nats."""
    group_id = f"train-{step}-{group}"
    sequence = {
        "token_ids": [1, 2, 3],
        "mask": [False, True, True],
        "generation_logprobs": [0.0, -1.0, -2.0],
        "old_logprobs": [9.0, -1.25, -1.5],
        "loss_weights": [0.0, 0.25, 0.5],
    }
    return {
        "split": "train", "step": step, "group": group, "group_id": group_id, "sample_id": f"{group_id}-{place}",
        "prompt": f"the prompt of {group}", "response": f"response {place}", "answer": "4", "reward": reward,
        "correct": reward > 0, "advantage": 2.0 * reward - 1.0, "tokens": 2, "num_turns": 1, "finish_reason": "stop",
        "sequences": [sequence], **others,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups of two. Nobody solves group 1 of step 2."""
    rewards = {(1, 0): (1.0, 0.0), (1, 1): (1.0, 1.0), (2, 0): (0.75, 0.0), (2, 1): (0.0, -1.0)}
    rows = [record(*place, i, reward) for place, pair in rewards.items() for i, reward in enumerate(pair)]
    rows[0]["components"] = [{"name": "format", "value": 0.5}, {"name": "odd", "value": float("nan")}]
    rows[1]["components"] = [{"name": "format", "value": 0.75}]
    rows[7] |= {"finish_reason": "length", "filtered": "overlong"}
    write_records(tmp_path / "run", rows)
    return tmp_path / "run"


@pytest.fixture
def index(run: Path, tmp_path: Path) -> RecordIndex:
    made = RecordIndex(run, tmp_path / "cache" / "run.sqlite")
    assert made.update() == 2
    assert made.update() == 0
    return made


def ids(index: RecordIndex, **wanted: Any) -> list[str]:
    return [row["sample_id"].removeprefix("train-") for row in queries.responses(index, Wanted(**wanted))["rows"]]


def test_steps_are_summed_up(index: RecordIndex) -> None:
    first, second = queries.steps(index)
    assert (first["step"], first["records"], first["groups"], first["reward"], first["right"]) == (1, 4, 2, 0.75, 0.75)
    assert (first["all_wrong"], first["all_right"], first["truncated"]) == (0, 1, 0)
    assert (second["all_wrong"], second["all_right"], second["truncated"]) == (1, 0, 1)
    assert second["mismatch"] == 0.5  # |-1.5 - -2.0|; the prompt's 9 nats are no token of the policy


def test_the_gradients_weight_is_that_of_the_loss_times_the_advantage(index: RecordIndex) -> None:
    (row,) = (row for row in queries.responses(index, Wanted(step=2))["rows"] if row["sample_id"] == "train-2-1-1")
    assert row["advantage"] == -3.0
    assert row["gradient"] == pytest.approx(2.25)  # (0.25 + 0.5) * |-3|
    assert (row["group_right"], row["group_size"], row["right"]) == (0, 2, False)


def test_advantages_of_single_tokens_come_before_that_of_the_episode(tmp_path: Path) -> None:
    one = record(1, 0, 0, 1.0)
    one["sequences"] = [{**one["sequences"][0], "advantages": [0.0, 4.0, -2.0]}, {"token_ids": [7], "mask": [True]}]
    write_records(tmp_path / "run", [one, record(1, 0, 1, 0.0, sequences=[])])
    made = RecordIndex(tmp_path / "run", tmp_path / "x.sqlite")
    made.update()
    first, second = queries.responses(made, Wanted(sort="tokens"))["rows"]
    assert first["gradient"] is None  # the second sequence trains nothing that was recorded
    assert first["mismatch"] == 0.5
    assert (second["gradient"], second["mismatch"]) == (None, None)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"only": ["all_wrong"]}, ["2-1-0", "2-1-1"]),
        ({"only": ["all_right"]}, ["1-1-0", "1-1-1"]),
        ({"only": ["mixed", "wrong"]}, ["2-0-1", "1-0-1"]),
        ({"only": ["truncated"]}, ["2-1-1"]),
        ({"only": ["filtered"]}, ["2-1-1"]),
        ({"sort": "reward", "descending": False, "limit": 1}, ["2-1-1"]),
        ({"sort": "gradient", "limit": 1}, ["2-1-1"]),  # 2.25
        ({"sort": "part:format", "limit": 2}, ["1-0-1", "1-0-0"]),  # those without come last
        ({"split": "train", "step": 1, "search": '"prompt of 1"'}, ["1-1-0", "1-1-1"]),
        ({"search": '"prompt of 1" resp', "offset": 3}, ["1-1-1"]),
        ({"split": "validation"}, []),
        ({"search": "nowhere"}, []),
        ({"search": "**"}, []),  # no word at all
    ],
)
def test_responses_are_filtered_sorted_and_found(
    index: RecordIndex, wanted: dict[str, Any], expected: list[str]
) -> None:
    found = ids(index, **wanted)
    assert (found if wanted.get("sort") or wanted.get("step") else sorted(found)) == (
        expected if wanted.get("sort") or wanted.get("step") else sorted(expected)
    )


@pytest.mark.parametrize("search", [ATTACK, '"', "NEAR(a b)", "a AND", "text:x", "c : {", "'; drop table records", "-"])
def test_nothing_that_is_searched_for_is_an_operator(index: RecordIndex, search: str) -> None:
    assert ids(index, search=search) == []
    assert len(ids(index)) == 8


def test_words_the_last_of_which_may_be_a_beginning() -> None:
    assert match_words('the "left hand" ca') == '"the" "left hand" "ca"*'
    assert match_words('12+15 "no end') == '"12+15" "no end"'
    assert match_words(' "" + ') == ""


@pytest.mark.parametrize(("wanted", "fix"), [({"only": ["all_worng"]}, "all_wrong"), ({"sort": "rewrad"}, "reward")])
def test_unknown_filters_and_orders_are_named(
    index: RecordIndex, wanted: dict[str, Any], fix: str, raises: Raises
) -> None:
    with raises(UsageError, fix):
        queries.responses(index, Wanted(**wanted))


def test_the_parts_that_rewards_have_are_listed(index: RecordIndex) -> None:
    assert queries.parts(index) == ["format", "odd"]


def test_turns_with_times_are_spans_and_episodes_are_sorted_by_their_seconds(tmp_path: Path) -> None:
    def turn(author: str, began_s: float | None, ended_s: float | None) -> dict[str, Any]:
        return {"author": author, "text": "t", "began_s": began_s, "ended_s": ended_s}

    turns = [turn("prompt", None, None), turn("policy", -0.5, 1.0), turn("environment", 1.0, 1.25)]
    rows = [record(1, 0, place, 1.0, began_s=float(-place), ended_s=2.0, turns=turns) for place in range(2)]
    write_records(tmp_path / "run", [*rows, record(1, 0, 2, 1.0)])
    index = RecordIndex(tmp_path / "run", tmp_path / "run.sqlite")
    index.update()
    found = queries.responses(index, Wanted(sort="seconds"))["rows"]
    assert [row["seconds"] for row in found] == [3.0, 2.0, None]
    assert [row["spans"] for row in found] == [[[1, -0.5, 1.0], [0, 1.0, 1.25]]] * 2 + [None]
    assert "turns" not in found[0]


def test_all_turns_are_searched(tmp_path: Path) -> None:
    turns = [{"author": "environment", "text": "a hidden xylophone"}, {"author": "policy", "text": "fin"}]
    write_records(tmp_path / "run", [record(1, 0, 0, 1.0, num_turns=2, turns=turns), record(1, 0, 1, 1.0)])
    made = RecordIndex(tmp_path / "run", tmp_path / "x.sqlite")
    made.update()
    assert ids(made, search="XYLO") == ["1-0-0"]


def test_the_index_follows_the_files(run: Path, index: RecordIndex, tmp_path: Path) -> None:
    second = record_files(run / "records", step=2)[0].path
    write_records(run, [record(3, 0, 0, 1.0, response="later")])
    assert index.update(most=1) == 1
    assert ids(index, search="later") == ["3-0-0"]
    write_records(run, [record(2, 0, 0, 1.0, response="made again")])  # as after a restart
    assert index.update() == 1
    assert ids(index, step=2) == ["2-0-0"]
    second.unlink()
    assert index.update() == 1
    assert ids(index, step=2) == ids(index, search="again") == []
    assert [step["step"] for step in queries.steps(index)] == [1, 3]
    again = RecordIndex(run, tmp_path / "cache" / "run.sqlite")  # another process: nothing is read twice
    assert again.update() == 0
    assert len(ids(again)) == 5


def test_a_record_of_which_nothing_is_known_is_one_all_the_same(tmp_path: Path) -> None:
    write_records(tmp_path / "run", [{"split": "train", "step": 1}, {"split": "train", "step": 1, "sequences": [{}]}])
    made = RecordIndex(tmp_path / "run", tmp_path / "x.sqlite")
    made.update()
    (step,) = queries.steps(made)
    assert (step["records"], step["damage"], step["reward"], step["mismatch"]) == (2, None, None, None)
    assert len(queries.responses(made, Wanted(sort="reward"))["rows"]) == 2


def test_a_damaged_file_is_named_and_the_others_are_there(run: Path, tmp_path: Path) -> None:
    (run / "records/train/step_000001.parquet").write_bytes(b"PAR1 no")
    made = RecordIndex(run, tmp_path / "x.sqlite")
    made.update()
    first, second = queries.steps(made)
    assert first["damage"] is not None
    assert (second["damage"], second["records"]) == (None, 4)


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be one" * 50, b""])
def test_a_damaged_index_is_made_anew(run: Path, tmp_path: Path, content: bytes) -> None:
    database = tmp_path / "x.sqlite"
    database.write_bytes(content)
    made = RecordIndex(run, database)
    assert made.update() == 2
    assert len(ids(made)) == 8


def test_an_index_of_another_version_is_made_anew(run: Path, index: RecordIndex, tmp_path: Path) -> None:
    database = tmp_path / "cache" / "run.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("pragma user_version = 999")
    connection.close()
    assert RecordIndex(run, database).update() == 2


def test_a_process_that_dies_while_it_reads_a_file_leaves_no_half_of_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RecordIndex(run, tmp_path / "x.sqlite")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nemorl_cli.report.viewing.index._next_record", dies)
        with pytest.raises(KeyboardInterrupt):
            made.update()
    assert queries.steps(made) == []
    assert made.update() == 2


def test_a_record_is_found_whole(run: Path, index: RecordIndex) -> None:
    texts = {1: "<prompt>", 2: "a"}
    place = index.place_of("train-2-1-1", "train", 2)
    assert place is not None
    found = detail_at(place, texts)
    assert found is not None
    assert found["sequences"][0]["texts"] == ["<prompt>", "a", None]
    assert found["sequences"][0]["mask"] == [0, 1, 1]
    assert found["sequences"][0]["policy_logprobs"] is None
    assert found["filtered"] == "overlong"
    assert "group_right" not in found  # which one record cannot tell
    assert index.place_of("train-9-9-9", "train", 9) is None


def test_hostile_texts_come_back_as_they_are(tmp_path: Path) -> None:
    long = "x" * 2**20
    write_records(tmp_path / "run", [record(1, 0, 0, 1.0, response=ATTACK), record(1, 0, 1, 1.0, response=long)])
    made = RecordIndex(tmp_path / "run", tmp_path / "x.sqlite")
    made.update()
    first, second = queries.responses(made, Wanted(step=1))["rows"]
    assert first["response"] == ATTACK
    assert len(second["response"]) == 240  # lists hold beginnings
    place = made.place_of("train-1-0-1", "train", 1)
    assert place is not None
    whole = detail_at(place, {})
    assert whole is not None
    assert whole["response"] == long
    json.dumps(whole, allow_nan=False)


def test_each_token_is_written_once(tmp_path: Path) -> None:
    import pyarrow as pa
    from nemorl_cli.report.records.schema import SCHEMA

    asked: list[int] = []

    def decode(tokens: Any) -> str:
        asked.extend(tokens)
        return f"<{tokens[0]}>"

    def table(*tokens: int) -> pa.Table:
        return pa.Table.from_pylist([{"sequences": [{"token_ids": list(tokens)}, {"token_ids": [5]}]}, {}], SCHEMA)

    Vocabulary(tmp_path, decode).add(table(3, 4, 3))
    later = Vocabulary(tmp_path, decode)  # of a run that goes on
    later.add(table(4, 9))
    later.add(table(9))
    assert asked == [3, 4, 5, 9]
    assert token_texts(tmp_path) == {3: "<3>", 4: "<4>", 5: "<5>", 9: "<9>"}
