"""Several seats of one policy: whose tokens are whose, who learns from what, and who is compared with whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from nemorl.base.process.timing import Span
from nemorl.errors import UsageError
from nemorl.types import Branch, Completion, Prompt, Sample, Samples, Score
from nemorl_grpo import GRPOConfig
from nemorl_grpo.variants.gdpo import components
from nemorl_ppo import PPOConfig
from nemorl_rl.agents.record import Call, dense_rewards, to_sample
from nemorl_rl.agents.seats import (
    Seated,
    SeatScores,
    as_one,
    rewards_of,
    seat_problems,
    seat_scores,
    trained_seats,
    with_earned,
)
from nemorl_rl.policy_gradient.advantages import group_advantages, over_valid
from nemorl_rl.policy_gradient.config import SeatBaseline
from nemorl_rl.policy_gradient.seats import by_seat
from nemorl_rl.rollouts.outcomes import OutcomeTable
from nemorl_rl.serving.requests import PlacedSample, TurnPlace
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from scripted_policy import Asked, ScriptedPolicy

PROMPT = Prompt(0, "p", (1,))


def call(number: int, prompt: tuple[int, ...], answer: int, seat: str = "", **facts: Any) -> Call:
    reason = facts.pop("reason", "stop")
    return Call(number, prompt, Completion((answer,), (-0.5,), reason), seat=seat, **facts)


def made(calls: list[Call], score: Score, prompt: Prompt = PROMPT) -> Sample:
    return to_sample(prompt, calls, score, "last", version=0, span=Span(0.0, 0.0))


def game(index: int, **rewards: float) -> Sample:
    """One answer of each seat, in this order."""
    calls = [call(number, (1, 10 + number), 20 + number, seat) for number, seat in enumerate(rewards)]
    return made(calls, seat_scores(rewards), replace(PROMPT, index=index))


# Tokens


def test_calls_of_two_seats_share_no_sequence_and_those_of_one_are_neighbours() -> None:
    # White asks with 1, is told 2; black asks with what white saw, and goes on from it: still a sequence of its own.
    calls = [
        call(0, (1,), 2, "white"),
        call(1, (1, 2), 3, "black"),
        call(2, (1, 2, 9), 4, "white"),
        call(3, (1, 2, 3, 9), 5, "black", reason="length"),
    ]
    sample = made(calls, Score(1.0))
    assert isinstance(sample, PlacedSample)
    assert [part.token_ids for part in sample.sequences] == [(1, 2, 9, 4), (1, 2, 3, 9, 5)]
    assert [part.response_mask for part in sample.sequences] == [
        (False, True, False, True),
        (False, False, True, False, True),
    ]
    assert sample.seats == ("white", "black")
    assert sample.turn_places == (
        TurnPlace(0, 1, 2), TurnPlace(1, 2, 3), TurnPlace(0, 3, 4), TurnPlace(1, 4, 5, is_cut=True)
    )  # fmt: skip


def test_an_episode_without_seats_names_none() -> None:
    sample = made([call(0, (1,), 2), call(1, (1, 2), 3)], Score(1.0))
    assert isinstance(sample, PlacedSample)
    assert (sample.seats, sample.token_ids) == ((), (1, 2, 3))


def test_what_an_untrained_seat_says_is_context() -> None:
    calls = [call(0, (1,), 2, "user", is_trained=False), call(1, (1, 2), 3, "solver")]
    sample = made(calls, replace(Score(1.0), turn_rewards=(7.0, 0.5)))
    assert isinstance(sample, PlacedSample)
    assert [part.response_mask for part in sample.sequences] == [(False, False), (False, False, True)]
    assert [part.generation_logprobs for part in sample.sequences] == [(0.0, 0.0), (0.0, 0.0, -0.5)]
    assert [part.turn_rewards for part in sample.sequences] == [(), ((2, 0.5),)]
    assert (sample.turn_places, sample.response_tokens) == ((TurnPlace(1, 2, 3),), 1)
    assert sample.score.metrics["delivered_tokens"] == 1


def test_a_seat_says_who_asks_and_a_role_that_is_not_trained_is_marked() -> None:
    asked: list[Asked] = []
    policy = ScriptedPolicy()
    policy.asked = asked
    watched = Seated(policy, untrained={"user"})

    async def play() -> None:
        for seat in ("solver/1", "user"):
            await Seated(watched, seat).chat([{"role": "user", "content": "?"}])
        await watched.complete((65,))

    asyncio.run(play())
    assert [(one.options.seat, one.options.is_trained) for one in asked] == [
        ("solver/1", True), ("user", False), ("", True)
    ]  # fmt: skip


def test_rewards_told_of_turns_are_one_per_turn() -> None:
    assert dense_rewards([]) == ()
    assert dense_rewards([(3, 1.0), (1, -0.5), (3, 1.0)]) == (0.0, -0.5, 0.0, 2.0)


# Scores


def test_the_episodes_reward_is_the_mean_over_seats_with_a_verdict() -> None:
    score = seat_scores({"a/1": {"right": 1.0, "short": 0.5}, "a/2": Score(9.0, valid=False), "b": 0.5})
    assert (score.reward, score.valid) == (1.0, True)  # (1.5 + 0.5) / 2
    assert dict(score.components) == {"right": 1.0, "short": 0.5}
    assert dict(score.metrics) == {"reward_of_a": 1.5, "reward_of_b": 0.5}
    assert rewards_of(score) == [1.5, 0.5]
    assert not seat_scores({"a": Score(1.0, valid=False)}).valid


def test_an_episode_of_no_seats_is_a_mistake(raises: Raises) -> None:
    with raises(UsageError, "seat"):
        seat_scores({})


def test_a_role_that_is_not_trained_has_no_part_in_the_reward() -> None:
    score = trained_seats(seat_scores({"white": 1.0, "black/1": -1.0}, turn_rewards=(0.5,)), {"black"})
    assert isinstance(score, SeatScores)
    assert (score.reward, list(score.seats), score.turn_rewards) == (1.0, ["white"], (0.5,))
    assert not trained_seats(score, {"white"}).valid
    assert trained_seats(Score(0.5), {"white"}) == Score(0.5)


def test_what_answers_were_given_besides_is_their_seats() -> None:
    score = with_earned(seat_scores({"white": 1.0, "black": 0.0, "judge": Score(0.0, valid=False)}), {"white": 0.5})
    assert isinstance(score, SeatScores)
    assert (score.reward, [one.reward for one in score.seats.values()]) == (0.75, [1.5, 0.0, 0.0])
    assert with_earned(Score(1.0), {"": 0.5, "white": -0.25}) == Score(1.25)


def test_a_frozen_seat_is_refused_by_name() -> None:
    (problem,) = seat_problems({"user": "untrained", "opponent": "frozen"})
    assert problem.path == "seats.opponent"
    assert "snapshots" in problem.message
    (problem,) = seat_problems({"solver/1": "untrained"})
    assert problem.fix == "say solver"


# Groups


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # Of one role against its mean: white (1 + 0) / 2, black (-1 + 0) / 2.
        ("role", [0.5, -0.5, -0.5, 0.5]),
        # Of all seats: their mean is 0.
        ("shared", [1.0, -1.0, 0.0, 0.0]),
        # No role has several seats in an episode: as by role.
        ("hierarchical", [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_who_is_compared_with_whom(baseline: SeatBaseline, expected: list[float]) -> None:
    games = Samples([game(3, white=1.0, black=-1.0), game(3, white=0.0, black=0.0)])
    seats = by_seat(games, baseline)
    assert seats.rewards == [1.0, -1.0, 0.0, 0.0]
    assert [seat.token_ids for seat in seats] == [part.token_ids for part in games.sequences]
    found = group_advantages(seats.rewards, seats.group_ids, normalize_std=False, leave_one_out=False)
    assert found == expected


def test_solvers_of_one_problem_are_compared_with_each_other_and_proposers_across_problems() -> None:
    names = ("proposer", "solver/1", "solver/2")
    calls = [call(number, (1, number), 5, name) for number, name in enumerate(names)]
    rewards = ((1.0, 1.0, 0.0), (0.0, 1.0, 1.0))
    games = [made(calls, seat_scores(dict(zip(names, each, strict=True)))) for each in rewards]
    seats = by_seat(Samples(games), "hierarchical")
    found = group_advantages(seats.rewards, seats.group_ids, normalize_std=False, leave_one_out=False)
    # Proposers: mean 0.5. Solvers: mean 0.5 in the first episode, 1 in the second.
    assert found == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    by_role = by_seat(Samples(games), "role")
    found = group_advantages(by_role.rewards, by_role.group_ids, normalize_std=False, leave_one_out=False)
    assert found == [0.5, 0.25, -0.75, -0.5, 0.25, 0.25]  # solvers: mean 0.75


def test_a_mean_over_seats_of_a_zero_sum_game_teaches_nothing() -> None:
    games = Samples([game(0, white=1.0, black=-1.0), game(0, white=-1.0, black=1.0)])
    assert group_advantages(games.rewards, games.group_ids) == [0.0, 0.0]
    seats = by_seat(games)
    assert group_advantages(seats.rewards, seats.group_ids) == [2.0, -2.0, -2.0, 2.0]


def test_seats_of_different_prompts_are_never_compared() -> None:
    seats = by_seat(Samples([game(0, white=1.0, black=0.0), game(1, white=0.0, black=1.0)]))
    assert len(set(seats.group_ids)) == 4


def test_episodes_without_seats_are_returned_as_they_are() -> None:
    samples = Samples([made([call(0, (1,), 2, "white"), call(1, (3,), 4, "black")], Score(1.0))])
    assert by_seat(samples) is samples, "who names seats and gives one reward gains no weight by it"


def test_a_seat_without_a_score_and_one_that_is_not_trained_have_no_verdict() -> None:
    calls = [call(0, (1,), 2, "white"), call(1, (3,), 4, "black"), call(2, (5,), 6, "user", is_trained=False)]
    seats = by_seat(Samples([made(calls, seat_scores({"white": 1.0, "user": 0.5}))]))
    assert [(seat.score.valid, seat.response_tokens) for seat in seats] == [(True, 1), (False, 1), (False, 0)]


def test_an_episode_that_failed_gives_each_seat_its_score() -> None:
    lost = made([call(0, (1,), 2, "white"), call(1, (3,), 4, "black")], Score(0.0, outcome="policy_timeout"))
    late = replace(game(0, white=1.0, black=-1.0), score=replace(game(0, white=1.0).score, valid=False))
    seats = by_seat(Samples([game(0, white=1.0, black=-1.0), lost, late]))
    assert [(seat.reward, seat.score.valid) for seat in seats[2:4]] == [(0.0, True)] * 2
    assert [seat.score.valid for seat in seats[4:]] == [False, False]
    assert [seat.score.outcome for seat in seats[2:4]] == ["policy_timeout"] * 2
    advantages = over_valid(seats, lambda judged: group_advantages(judged.rewards, judged.group_ids))
    assert advantages == [1.0, -1.0, -1.0, 1.0, 0.0, 0.0]


def test_an_end_that_costs_the_lowest_reward_costs_that_of_the_worst_seat() -> None:
    stalled = replace(game(0, white=1.0, black=1.0), score=replace(game(0, white=1.0).score, outcome="policy_timeout"))
    settled = OutcomeTable().settled([game(0, white=1.0, black=-1.0), stalled])
    assert isinstance(settled[0].score, SeatScores)
    assert settled[1].score == as_one(settled[1].score)
    assert [seat.reward for seat in by_seat(Samples(settled))] == [1.0, -1.0, -1.0, -1.0]


def test_a_seat_has_its_own_turns_and_its_own_end() -> None:
    calls = [
        call(0, (1,), 2, "white"),
        call(1, (8,), 3, "black", reason="length"),
        call(2, (1, 2, 9), 4, "white"),
        call(3, (7,), 5, "white"),
    ]
    white, black = by_seat(Samples([made(calls, seat_scores({"white": 1.0, "black": 0.0}))]))
    assert isinstance(white, PlacedSample)
    assert isinstance(black, PlacedSample)
    assert (white.turns, white.finish_reason, white.response) == (3, "stop", "last")
    assert white.branches == (Branch((7, 5), (False, True), (0.0, -0.5)),)
    assert white.turn_places == (TurnPlace(0, 1, 2), TurnPlace(0, 3, 4), TurnPlace(1, 1, 2))
    assert (black.turns, black.finish_reason, black.response) == (1, "length", "")
    assert black.turn_places == (TurnPlace(0, 1, 2, is_cut=True),)


def test_each_sequence_of_a_seat_knows_the_weights_of_its_tokens() -> None:
    def made_by(number: int, prompt: tuple[int, ...], *versions: int) -> Call:
        starts = tuple(range(len(versions)))
        answer = Completion((7,) * len(versions), (-0.5,) * len(versions), "stop", versions, starts)
        return Call(number, prompt, answer, seat="white")

    sample = made([made_by(0, (1,), 3), made_by(1, (2,), 4, 5)], seat_scores({"white": 1.0}))
    (white,) = by_seat(Samples([sample]))
    assert [part.token_versions for part in white.sequences] == [(3, 3), (3, 4, 5)]
    assert [part.token_versions for part in white.sequences] == [part.token_versions for part in sample.sequences]


def test_each_seat_weighs_as_much_in_the_loss() -> None:
    # White answers three times in three sequences, black once: a seat is what an episode is without seats.
    calls = [call(n, (1, n), 5, "white") for n in range(3)] + [call(3, (2,), 6, "black")]
    seats = by_seat(Samples([made(calls, seat_scores({"white": 1.0, "black": -1.0}))]))
    batch = TokenBatch.from_samples(seats, [1.0, -1.0], loss_aggregation="sequence")
    trained = batch.mask.nonzero().squeeze(1)
    assert batch.loss_weights[trained].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert batch["advantages"][trained].tolist() == [1.0, 1.0, 1.0, -1.0]


# In algorithms


def test_dynamic_sampling_keeps_a_prompt_where_a_role_differs() -> None:
    keep = GRPOConfig(model="m", dynamic_sampling=True).build().rollout_plan.keep
    assert keep is not None
    assert keep([game(0, white=1.0, black=-1.0), game(0, white=-1.0, black=1.0)]), "their means are equal"
    assert not keep([game(0, white=1.0, black=-1.0), game(0, white=1.0, black=-1.0)]), "each role's rewards are equal"
    shared = GRPOConfig(model="m", dynamic_sampling=True, seat_baseline="shared").build().rollout_plan.keep
    assert shared is not None
    assert shared([game(0, white=1.0, black=-1.0), game(0, white=1.0, black=-1.0)])


def test_each_reward_of_gdpo_is_a_seats_own() -> None:
    scores = [{"won": 1.0, "brief": 0.0}, {"won": 0.0, "brief": 1.0}]
    calls = [call(0, (1,), 2, "white"), call(1, (3,), 4, "black")]
    games = [
        made(calls, seat_scores({"white": own, "black": other})) for own, other in (scores, scores[::-1], scores)
    ]  # fmt: skip
    seats = by_seat(Samples(games))
    assert components(seats) == {"brief": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], "won": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]}


def test_ppo_pays_each_seat_at_its_own_end() -> None:
    trainer = PPOConfig(model="m", kl_penalty=0.0).build()
    calls = [call(0, (1,), 2, "white"), call(1, (3,), 4, "black"), call(2, (1, 2, 9), 5, "white")]
    seats = by_seat(Samples([made(calls, seat_scores({"white": 1.0, "black": -1.0}))]))
    batch = trainer.with_rewards(trainer.to_batch(seats))
    # white: 1 2 9 5, black: 3 4
    assert batch["rewards"].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, -1.0]
