"""Rewards that become 0 for how an episode is written: by hand, and as NeMo RL's own function has it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError, UsageError
from nemorl.types import Branch, Prompt, Sample, Score
from nemorl_rl.agents.seats import SeatScores, seat_scores
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.messages import parts
from nemorl_rl.rollouts.reward_penalties import PenaliseEpisodes, RewardPenalties
from penalty_batches import BATCHES, CLOSE, EOS, EPISODES, OPEN, UNWANTED, batch, decode
from recorded_messages import Raises

RECORD = json.loads(Path(__file__).with_name("reward_penalties.json").read_text())
FAULTS = ("duplicated_reasoning", "empty_final_answer", "unwanted_token", "malformed_think_tag")
ALL: dict[str, Any] = {
    "duplicated_reasoning": True,
    "empty_final_answer": True,
    "malformed_think_tag": True,
    "unwanted_tokens": [UNWANTED],
}
THINK = ("<think>", "</think>")


def penalise(*, has_ids: bool = True, **faults: Any) -> PenaliseEpisodes:
    return PenaliseEpisodes(RewardPenalties(**faults), decode, frozenset({EOS}), (OPEN, CLOSE) if has_ids else None)


@pytest.mark.parametrize("case", [name for name in RECORD if name != "source"])
def test_rewards_and_counts_are_those_of_nemo_rl(case: str) -> None:
    flags, known = case.split(", ")
    asked = {name: value for name, value in ALL.items() if name in flags.split("+")}
    judge = penalise(has_ids=known == "ids", **asked)
    penalised = 0
    for number in range(BATCHES):
        found = [judge(sample) for sample in batch(number)]
        assert [one.reward for one in found] == RECORD[case]["rewards"][number]
        counts = [sum(fault in one.score.metrics for one in found) for fault in FAULTS]
        assert counts == RECORD[case]["counts"][number]
        penalised += sum(bool(one.score.metrics) for one in found)
    assert 20 < penalised < BATCHES * EPISODES  # neither none nor all


def sample(*ids: int, context: tuple[int, ...] = (0, OPEN), **fields: Any) -> Sample:
    score = Score(0.8, {"right": 0.8}, {"late": 1.0}, True, **fields.pop("score", {}))
    tokens, mask = (*context, *ids), (False,) * len(context) + (True,) * len(ids)
    return Sample(Prompt(0, "?", context), tokens, mask, (0.0,) * len(tokens), score, "", "stop", **fields)


def test_a_faulty_episode_earns_nothing_and_says_why() -> None:
    found = penalise(**ALL)(sample(4, CLOSE, 4, EOS, turn_rewards=((5, 0.8),)))  # "a</think>a"
    assert (found.reward, found.score.components, found.turn_rewards) == (0.0, {"right": 0.0}, ())
    assert found.score.metrics == {"late": 1.0, "duplicated_reasoning": 1.0}
    assert found.score.correct  # what it answered is right all the same
    sound = sample(4, CLOSE, 5, EOS)
    assert penalise(**ALL)(sound) is sound


def test_an_episode_without_a_verdict_stays_without_one() -> None:
    failed = sample(4, CLOSE, score={"valid": False, "outcome": "infrastructure"})
    assert penalise(**ALL)(failed) is failed


def test_all_sequences_of_an_episode_are_looked_at() -> None:
    branch = Branch((0, UNWANTED), (False, True), (0.0, -1.0))
    found = penalise(unwanted_tokens=[UNWANTED])(sample(4, CLOSE, 5, branches=(branch,)))
    assert found.reward == 0.0
    # As a part of a prompt the token is nobody's fault.
    seen = Branch((UNWANTED, 4), (False, True), (0.0, -1.0))
    assert penalise(unwanted_tokens=[UNWANTED])(sample(4, CLOSE, 5, branches=(seen,))).reward == 0.8


def test_nothing_that_a_turn_or_a_seat_of_a_faulty_episode_earned_is_left() -> None:
    judge = penalise(unwanted_tokens=[UNWANTED])
    branch = Branch((0, UNWANTED), (False, True), (0.0, -1.0), turn_rewards=((1, 0.3),))
    found = judge(sample(4, CLOSE, 5, turn_rewards=((4, 0.5),), branches=(branch,)))
    assert [part.turn_rewards for part in found.sequences] == [(), ()]
    played = judge(replace(sample(UNWANTED), score=seat_scores({"white": 1.0, "black": -1.0})))
    assert (played.reward, isinstance(played.score, SeatScores)) == (0.0, False)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("so</think>4", True, ("so", "4", False)),
        ("<think>so</think>4", False, ("so", "4", False)),
        ("so", True, ("so", "", False)),  # cut while it was reasoning
        ("4", False, ("", "4", False)),
        ('so</think><tool_call>{"name": "f"}</tool_call>', True, ("so", "", True)),
        ("so</think><tool_call>f</tool_call>", True, ("so", "<tool_call>f</tool_call>", False)),  # no call: it is text
    ],
)
def test_the_parts_of_a_message(text: str, is_open: bool, expected: tuple[str, str, bool]) -> None:
    assert parts(text, THINK, ["tool_call"], is_open=is_open) == expected


def test_the_tokens_of_tags_are_those_of_the_tokenizer(tiny_model: Path, raises: Raises) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    (five,) = tokenizer.encode_observation("5")
    asked = RewardPenalties(malformed_think_tag=True, thinking_tags=("5", "55"))
    assert PenaliseEpisodes.of(asked, tokenizer).think_ids is None  # one of them is no single token
    both = asked.model_copy(update={"think_close_id": 3})
    assert PenaliseEpisodes.of(both, tokenizer).think_ids == (five, 3)
    with raises(UsageError):
        PenaliseEpisodes.of(asked.model_copy(update={"think_open_id": 3}), tokenizer)


def test_penalties_for_nothing_are_refused(raises: Raises) -> None:
    with raises(ConfigError):
        load_config({"model": "m", "algorithm": "grpo", "rollouts": {"reward_penalties": {"unwanted_tokens": []}}})
