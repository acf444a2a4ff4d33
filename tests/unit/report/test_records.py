"""Rollout records: what is in them, who can read them, and what befalls a run whose disk or files fail."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pytest
from datasets import load_dataset
from nemorl.base.process.timing import Span
from nemorl.types import Branch, Completion, Prompt, Sample, Samples, Score
from nemorl_cli.report.records.reading import FOLDER, read_records, record_files
from nemorl_cli.report.records.schema import HEAVY, SCHEMA
from nemorl_cli.report.records.selecting import Selection
from nemorl_cli.report.records.turns import Runs
from nemorl_cli.report.records.writing import Recorder
from nemorl_insight.diff.recorded import RecordedStep
from nemorl_rl.agents.record import Call, to_sample
from nemorl_rl.agents.seats import seat_scores
from nemorl_rl.policy_gradient.seats import by_seat
from nemorl_rl.policy_gradient.turn_credit import returns_to_go
from nemorl_rl.rollouts.recording import RecordingConfig
from nemorl_rl.serving.requests import TimedSample, TurnSpan
from nemorl_tensors import TokenBatch
from record_files import rows_of


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def sample(index: int, reward: float, *, valid: bool = True, finish: Any = "stop", **others: Any) -> Sample:
    prompt = Prompt(index, f"prompt {index}", (5, 6), answer="4")
    score = Score(reward, {"format": 0.5}, {"late": 1.0}, reward > 0, "4", valid)
    mask, logprobs = (False, False, True, True), (0.0, 0.0, -0.5, -1.0)
    return Sample(prompt, (5, 6, 7, 8), mask, logprobs, score, "seven eight", finish, weight_versions=(3,), **others)


def recorder(run_dir: Path, warnings: list[str] | None = None, every: int = 0, **options: Any) -> Recorder:
    warn = (warnings if warnings is not None else []).append
    config = RecordingConfig(**options)
    return Recorder(run_dir, config, validation_every=every, decode=decode, warn=warn)


def test_a_record_holds_what_the_update_was_made_of(tmp_path: Path) -> None:
    samples = Samples([sample(0, 1.0), sample(0, 0.0, finish="length"), sample(1, 0.0, valid=False), sample(1, 1.0)])
    batch = TokenBatch.from_samples(samples, [0.5, -0.5, 0.0, 2.0], drop=[False, True, True, False])
    batch = batch.with_tokens(reference_logprobs=batch["generation_logprobs"] + 0.1)
    keeper = recorder(tmp_path / "mine")
    keeper.rollout(samples, "train", 1)
    keeper.batch(samples, batch.minibatches(2))
    keeper.close()

    first, cut, unjudged, last = rows_of(tmp_path / "mine")
    assert [row["sample_id"] for row in (first, cut, unjudged, last)] == [
        "train-1-0-0", "train-1-0-1", "train-1-1-0", "train-1-1-1"
    ]  # fmt: skip
    assert (first["run"], first["split"], first["step"], first["group"]) == ("mine", "train", 1, 0)
    assert (first["prompt"], first["response"], first["answer"], first["given"]) == (
        "prompt 0",
        "seven eight",
        "4",
        "4",
    )
    assert (first["reward"], first["correct"], first["tokens"], first["total_tokens"]) == (1.0, True, 2, 4)
    assert first["components"] == [{"name": "format", "value": 0.5}]
    assert first["weight_versions"] == [3]
    assert [row["advantage"] for row in (first, cut, unjudged, last)] == [0.5, -0.5, 0.0, 2.0]
    assert [row["filtered"] for row in (first, cut, unjudged, last)] == [None, "overlong", "invalid", None]
    # k3 with r - p = 0.1 at both tokens: exp(0.1) - 0.1 - 1 = 0.005171
    assert first["kl"] == pytest.approx(0.005171, abs=1e-6)
    (sequence,) = last["sequences"]
    assert sequence["token_ids"] == [5, 6, 7, 8]
    assert sequence["mask"] == [False, False, True, True]
    assert sequence["generation_logprobs"] == [0.0, 0.0, -0.5, -1.0]
    assert sequence["reference_logprobs"] == pytest.approx([0.1, 0.1, -0.4, -0.9])
    assert sequence["loss_weights"] == [0.0, 0.0, 0.5, 0.5]  # two tokens train in the second minibatch
    assert sequence["advantages"] is None  # they are all 2.0
    assert sequence["old_logprobs"] is None
    assert [(turn["author"], turn["text"], turn["start"], turn["stop"]) for turn in first["turns"]] == [
        ("prompt", "5 6", 0, 2), ("policy", "seven eight", 2, 4)
    ]  # fmt: skip


def test_an_episode_of_several_sequences_is_one_record(tmp_path: Path) -> None:
    branch = Branch((5, 9, 4, 3), (False, True, False, True), (0.0, -2.0, 0.0, -3.0))
    samples = Samples([sample(0, 1.0, branches=(branch,), turn_rewards=((3, 0.25),)), sample(0, 0.0)])
    batch = TokenBatch.from_samples(samples, [1.0, -1.0])
    advantages = batch["advantages"].clone()
    advantages[5] = 7.0  # the branch's first token of the policy; its other keeps 1.0
    keeper = recorder(tmp_path)
    keeper.rollout(samples, "train", 1)
    keeper.batch(samples, [batch.with_tokens(advantages=advantages)])
    keeper.close()
    forked, plain = rows_of(tmp_path)
    assert [part["token_ids"] for part in forked["sequences"]] == [[5, 6, 7, 8], [5, 9, 4, 3]]
    assert forked["sequences"][0]["advantages"] == [1.0] * 4, "the mean over the episode does not say it"
    assert forked["sequences"][1]["advantages"] == [1.0, 7.0, 1.0, 1.0]
    assert forked["advantage"] == 2.5  # (1 + 1 + 7 + 1) / 4
    assert [(turn["author"], turn["sequence"], turn["text"]) for turn in forked["turns"]] == [
        ("prompt", 0, "5 6"), ("policy", 0, "7 8"),
        ("prompt", 1, "5"), ("policy", 1, "9"), ("environment", 1, "4"), ("policy", 1, "3"),
    ]  # fmt: skip
    assert [turn["reward"] for turn in forked["turns"]] == [None, 0.25, None, None, None, None]
    assert plain["advantage"] == -1.0
    assert (forked["tokens"], plain["tokens"]) == (4, 2)


def test_an_episode_of_several_seats_is_one_record_from_which_they_are_made_again(tmp_path: Path) -> None:
    # White answers, black answers what white said, white answers again; black is cut out of the baseline of white.
    asked = [((1,), 2, "white"), ((1, 9), 3, "black"), ((1, 2, 9), 4, "white")]
    calls = [
        Call(number, prompt, Completion((answer,), (-0.5,), "stop"), seat=seat, span=Span(number, number + 0.5))
        for number, (prompt, answer, seat) in enumerate(asked)
    ]
    prompt = Prompt(0, "", ())
    games = []
    for won in (1.0, -1.0):
        score = seat_scores({"white": won, "black": -won}, turn_rewards=(0.25, 0.0, 0.5))
        games.append(to_sample(prompt, calls, score, "last", version=0, span=Span(0.0, 3.0)))
    seats = by_seat(Samples(games))
    keeper = recorder(tmp_path)
    keeper.rollout(Samples(games), "train", 1, began_s=0.0)
    keeper.batch(Samples(games), [TokenBatch.from_samples(seats, [1.0, -1.0, -1.0, 1.0])])
    keeper.close()
    rows = rows_of(tmp_path)
    assert [sequence["seat"] for sequence in rows[0]["sequences"]] == ["white", "black"]
    assert rows[0]["seats"] == [{"name": "white", "value": 1.0}, {"name": "black", "value": -1.0}]
    assert [sequence["advantages"] for sequence in rows[0]["sequences"]] == [[1.0] * 4, [-1.0] * 3]
    assert [turn["text"] for turn in rows[0]["turns"]] == ["1", "2", "9", "4", "1 9", "3"]
    again = by_seat(RecordedStep(rows).samples)
    assert [(one.prompt.index, one.reward, one.token_ids) for one in again] == [
        (one.prompt.index, one.reward, one.token_ids) for one in seats
    ]
    assert [returns_to_go(one, one.reward, 0.5) for one in again] == [
        returns_to_go(one, one.reward, 0.5) for one in seats
    ]


def test_turns_are_the_runs_of_the_mask() -> None:
    mask = np.array([True, True, False, False, True, False])
    runs = Runs.of(mask, np.array([0, 3, 3, 6]))  # sequences of 3, 0 and 3 tokens
    assert list(zip(runs.sequence, runs.authors, runs.start, runs.stop, strict=True)) == [
        (0, "policy", 0, 2), (0, "environment", 2, 3),
        (2, "prompt", 0, 1), (2, "policy", 1, 2), (2, "environment", 2, 3),
    ]  # fmt: skip
    assert Runs.of(np.array([], bool), np.array([0])).authors == []


def test_a_record_says_when_its_turns_were_made(tmp_path: Path) -> None:
    # The step began at 100 of the clock: the episode at -1, ahead of it, and its last turn ended after 3 s.
    turns = [(2, 99.0, 101.0), (3, 101.0, 101.5), (4, 101.75, 103.0)]
    timed = TimedSample(
        Prompt(0, "p", (5,)), (5, 6, 7, 8), (False, True, False, True), (0.0, -1.0, 0.0, -1.0), Score(1.0), "8", "stop",
        span=Span(99.0, 103.5), turn_spans=tuple(TurnSpan(0, stop, Span(*times)) for stop, *times in turns),
    )  # fmt: skip
    keeper = recorder(tmp_path)
    keeper.rollout(Samples([timed, sample(0, 0.0)]), "train", 1, 100.0)
    keeper.rollout(Samples([timed]), "train", 2)
    keeper.close()
    known, untimed = rows_of(tmp_path)
    assert (known["began_s"], known["ended_s"]) == (-1.0, 3.5)
    assert [(turn["author"], turn["began_s"], turn["ended_s"]) for turn in known["turns"]] == [
        ("prompt", None, None), ("policy", -1.0, 1.0), ("environment", 1.0, 1.5), ("policy", 1.75, 3.0)
    ]  # fmt: skip
    (unknown,) = rows_of(tmp_path, step=2)  # whoever hands it over does not say when the step began
    for row in (untimed, unknown):
        assert {row[name] for row in (untimed, unknown) for name in ("began_s", "ended_s")} == {None}
        assert {turn["began_s"] for turn in row["turns"]} == {None}
    assert unknown["step_time"] is None


def test_rejected_groups_are_kept_beside_those_that_train(tmp_path: Path) -> None:
    keeper = recorder(tmp_path)
    keeper.rejected([sample(4, 0.0), sample(4, 0.0)], "equal_rewards")
    samples = Samples([sample(0, 1.0), sample(0, 0.0)])
    keeper.rollout(samples, "train", 1)
    keeper.batch(samples, [TokenBatch.from_samples(samples, [1.0, -1.0])])
    keeper.close()
    found = [(row["group_id"], row["filtered"], row["advantage"]) for row in rows_of(tmp_path)]
    assert found == [
        ("train-1-0", None, 1.0), ("train-1-0", None, -1.0),
        ("train-1-0r", "equal_rewards", None), ("train-1-0r", "equal_rewards", None),
    ]  # fmt: skip


def test_rejected_groups_of_a_step_that_trains_on_none_are_kept(tmp_path: Path) -> None:
    keeper = recorder(tmp_path)
    keeper.rejected([sample(4, 0.0), sample(4, 0.0)], "equal_rewards")
    keeper.rollout(Samples([]), "train", 1)
    keeper.close()
    found = [(row["step"], row["group_id"], row["filtered"]) for row in rows_of(tmp_path)]
    assert found == [(1, "train-1-0r", "equal_rewards")] * 2


def test_validation_sets_of_one_step_do_not_overwrite_one_another(tmp_path: Path) -> None:
    keeper = recorder(tmp_path)
    for reward in (0.0, 1.0):
        keeper.rollout(Samples([sample(0, reward)]), "validation", 10)
    keeper.close()
    found = [(record["group_id"], record["reward"]) for record in read_records(tmp_path)]
    assert found == [("validation-10-0", 0.0), ("validation-10.2-0", 1.0)]


# Readers that none of us wrote


def test_pandas_datasets_and_duckdb_read_records_in_one_line(tmp_path: Path) -> None:
    keeper, groups = recorder(tmp_path / "run"), 3
    for step in (1, 2):
        samples = Samples([sample(i // 2, float(i + step)) for i in range(2 * groups)])
        keeper.rollout(samples, "train", step)
        keeper.batch(samples, [TokenBatch.from_samples(samples, [0.5] * len(samples))])
    keeper.rollout(Samples([sample(0, 9.0)]), "validation", 2)
    keeper.close()
    run = str(tmp_path / "run")

    frame = pandas.read_parquet(f"{run}/records/train")
    dataset = load_dataset("parquet", data_files=f"{run}/records/train/*.parquet", split="train", cache_dir=run)
    table = duckdb.sql(f"select step, avg(reward), count(*) from '{run}/records/train/*.parquet' group by 1 order by 1")
    # rewards 1 … 6 in step 1 and 2 … 7 in step 2
    assert frame.groupby("step")["reward"].mean().to_dict() == {1: 3.5, 2: 4.5}
    assert dataset["reward"][:7] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 2.0]
    assert dataset[0]["sequences"][0]["token_ids"] == [5, 6, 7, 8]
    assert table.fetchall() == [(1, 3.5, 6), (2, 4.5, 6)]
    worst = duckdb.sql(f"select min(list_min(sequences[1].generation_logprobs)) from '{run}/records/*/*.parquet'")
    assert worst.fetchall() == [(-1.0,)]
    assert len(pandas.read_parquet(f"{run}/records")) == 13


def test_the_page_says_of_each_column_its_type() -> None:
    page = (Path(__file__).parents[3] / "docs/records.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", page, re.MULTILINE))
    assert {name: told.get(name) for name in SCHEMA.names if name not in HEAVY} == {
        field.name: str(field.type).replace("list<item: ", "list<") for field in SCHEMA if field.name not in HEAVY
    }
    inner = [*SCHEMA.field("turns").type.value_type, *SCHEMA.field("sequences").type.value_type]
    assert {field.name: told.get(field.name) for field in inner} == {
        field.name: str(field.type).replace("list<item: ", "list<") for field in inner
    }


# What is kept


@pytest.mark.parametrize(
    ("options", "validation_every", "kept"),
    [
        ({"every": 0}, 10, {1: 4, 2: 0, 9: 0, 10: 4, 11: 4, 12: 0}),
        ({"every": 0, "around": 2}, 10, {1: 4, 2: 4, 3: 0, 8: 0, 9: 4, 10: 4, 11: 4, 12: 4, 13: 0}),
        ({"every": 4, "groups": 2}, 0, {1: 0, 4: 2, 6: 0, 8: 2}),
        ({"groups": 9}, 0, {1: 4, 2: 4}),
    ],
)
def test_steps_around_validations_are_kept_whole_and_of_the_rest_a_sample(
    options: dict[str, int], validation_every: int, kept: dict[int, int], tmp_path: Path
) -> None:
    chosen = Selection(tmp_path, RecordingConfig(**options), validation_every)
    assert {step: len(chosen.places(step, 4)) for step in kept} == kept


def test_a_sample_of_groups_is_spread_over_the_batch_and_holds_whole_groups(tmp_path: Path) -> None:
    keeper = recorder(tmp_path, groups=2)
    keeper.rollout(Samples([sample(i // 3, 0.0) for i in range(12)]), "train", 1)
    keeper.close()
    assert [row["group"] for row in rows_of(tmp_path)] == [0, 0, 0, 2, 2, 2]


def test_over_budget_every_second_step_goes_and_what_stays_spans_the_run(tmp_path: Path) -> None:
    warnings: list[str] = []
    one = Samples([sample(0, 1.0)])
    keeper = recorder(tmp_path / "one", warnings)
    keeper.rollout(one, "train", 1)
    keeper.close()
    size = record_files(tmp_path / "one" / FOLDER)[0].path.stat().st_size
    keeper = recorder(tmp_path / "many", warnings, max_gib=5.5 * size / 2**30)
    for step in range(1, 17):
        keeper.rollout(one, "train", step)
    keeper.close()
    # The 6th file is over: steps 2, 4, 6 stay. With 8, 10, 12 they are 6 again: 4, 8, 12 stay, then 16.
    assert [file.step for file in record_files(tmp_path / "many" / FOLDER)] == [4, 8, 12, 16]
    assert warnings == []


def test_a_budget_that_validations_fill_keeps_some_of_them_up_to_the_last(tmp_path: Path) -> None:
    warnings: list[str] = []
    one = Samples([sample(0, 1.0)])
    keeper = recorder(tmp_path / "one", warnings)
    keeper.rollout(one, "validation", 1)
    keeper.close()
    size = record_files(tmp_path / "one" / FOLDER)[0].path.stat().st_size
    keeper = recorder(tmp_path / "many", warnings, every=10, max_gib=6.5 * size / 2**30)
    for step in range(10, 170, 10):
        keeper.rollout(one, "train", step)
        keeper.rollout(one, "validation", step)
    keeper.close()
    # The 7th file comes with step 40: the validations of 20 and 40 stay. It comes again with steps 80 and 160, when
    # every 4th and then every 8th stays. Training steps beside the others are kept in part then, until they are too
    # many: with step 50 every 4th stays, with step 100 every 8th.
    assert [file.step for file in record_files(tmp_path / "many" / FOLDER, split="validation")] == [80, 160]
    assert [file.step for file in record_files(tmp_path / "many" / FOLDER, split="train")] == [40, 80, 120, 160]
    assert warnings == []


# What goes wrong


def test_a_disk_that_refuses_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    warnings: list[str] = []
    keeper = recorder(tmp_path, warnings)
    for step in (1, 2, 3):
        keeper.rollout(Samples([sample(0, 1.0)]), "train", step)
    keeper.close()
    (warning,) = warnings
    assert warning.startswith("rollouts are not recorded: ")
    assert str(tmp_path / FOLDER) in warning


def test_a_record_of_a_later_step_that_the_disk_keeps_does_not_end_a_run_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = recorder(tmp_path, [])
    for step in (1, 2, 3):
        keeper.rollout(Samples([sample(0, 1.0)]), "train", step)
    keeper.flush()
    remove = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.stem.endswith("2"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    keeper.truncate_after(1)
    keeper.close()
    assert [file.step for file in record_files(tmp_path / FOLDER)] == [1, 2]  # until step 2 is made again


def test_a_damaged_file_is_skipped_and_named_and_a_draft_is_no_record(tmp_path: Path) -> None:
    keeper = recorder(tmp_path)
    for step in (1, 2):
        keeper.rollout(Samples([sample(0, float(step))]), "train", step)
    keeper.close()
    first, second = (file.path for file in record_files(tmp_path / FOLDER))
    first.write_bytes(first.read_bytes()[:-40])
    (second.parent / ".step_000003.parquet.17.draft").write_bytes(b"PAR1")
    damaged: list[Path] = []
    found = list(read_records(tmp_path, on_damage=lambda path, why: damaged.append(path)))
    assert [record["step"] for record in found] == [2]
    assert damaged == [first]


def test_text_that_utf8_cannot_hold_is_written(tmp_path: Path) -> None:
    keeper = recorder(tmp_path)
    odd = Sample(Prompt(0, "p", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "half \ud800", "stop")
    keeper.rollout(Samples([odd]), "train", 1)
    keeper.close()
    assert [record["response"] for record in read_records(tmp_path)] == ["half ?"]
