"""What each variant of GRPO makes of rewards, by hand; and which knobs it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import nemorl
import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError, UsageError
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_grpo.variants.maxrl import mean_normalized
from nemorl_rl.policy_gradient.advantages import batch_normalized, over_valid
from nemorl_rl.policy_gradient.config import CORRECTION_BOUNDS
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_rl.policy_gradient.updates import transformed
from nemorl_tensors import KLTerm, TokenBatch
from recorded_messages import Raises

NAMES = {
    "grpo": "GRPO",
    "dapo": "DAPO",
    "dr_grpo": "DrGRPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "rloo": "RLOO",
    "reinforce_plus_plus": "ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "ReinforcePlusPlusBaseline",
    "gdpo": "GDPO",
    "maxrl": "MaxRL",
}
"""Algorithm -> what its classes are called."""


def trainer(algorithm: str, **knobs: Any) -> Any:
    """A trainer that has its loss, without a run."""
    built = load_config({"algorithm": algorithm, "model": "some/model", **knobs}).build()
    built.setup()
    return built


def sample(
    reward: float, tokens: int = 2, *, index: int = 0, cut: bool = False, components: dict[str, float] | None = None
) -> Sample:
    return Sample(
        prompt=Prompt(index, "?", (1,)),
        token_ids=(1, *[2] * tokens),
        response_mask=(False, *[True] * tokens),
        generation_logprobs=(0.0,) * (1 + tokens),
        score=Score(reward, components or {}),
        response="",
        finish_reason="length" if cut else "stop",
    )


def one_group(*rewards: float) -> Samples:
    return Samples([sample(reward) for reward in rewards])


# Credit


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # mean 0.25, unbiased std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
        ("dapo", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("gspo", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("cispo", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),  # no std
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),  # against the other three
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),  # 0.75 / 0.25 and -0.25 / 0.25
        # mean 0, biased std sqrt((0.5625 + 3 * 0.0625) / 4) = 0.433013
        ("reinforce_plus_plus_baseline", [1.732047, -0.577349, -0.577349, -0.577349]),
        ("reinforce_plus_plus", [1.0, 0.0, 0.0, 0.0]),  # the reward; the rest happens per token
    ],
)
def test_one_right_answer_of_four(algorithm: str, expected: list[float]) -> None:
    assert trainer(algorithm, overlong_penalty=None).compute_advantages(one_group(1, 0, 0, 0)) == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("algorithm", sorted(set(NAMES) - {"reinforce_plus_plus", "gdpo"}))
def test_equal_rewards_teach_nothing(algorithm: str) -> None:
    assert trainer(algorithm, overlong_penalty=None).compute_advantages(one_group(1, 1, 1, 1)) == [0.0] * 4


@pytest.mark.parametrize("algorithm", sorted(set(NAMES) - {"reinforce_plus_plus", "gdpo"}))
def test_advantages_are_clipped_last(algorithm: str) -> None:
    clipped = trainer(algorithm, overlong_penalty=None, advantage_clip_high=0.125)
    found = over_valid(one_group(1, 0, 0, 0), clipped.compute_advantages, None, 0.125)
    assert max(found) == 0.125
    assert min(found) < 0


def test_maxrl_weighs_rare_successes_more() -> None:
    # Success rates 1/4 and 3/4: a right answer is worth (1 - 1/4) / (1/4) = 3, or (1 - 3/4) / (3/4) = 1/3.
    assert mean_normalized([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4) == pytest.approx(
        [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1]
    )
    assert mean_normalized([0, 0, 2, 0], [0, 0, 1, 1]) == [0, 0, 1, -1]


def test_maxrl_refuses_negative_rewards(raises: Raises) -> None:
    with raises(UsageError, "-1", "reward_scaling"):
        trainer("maxrl").compute_advantages(one_group(1, -1))
    assert trainer("maxrl", reward_scaling={"source_min": -1.0}).compute_advantages(one_group(1, -1)) == [1.0, -1.0]


def test_batch_normalization_counts_tokens() -> None:
    # 0.5 thrice, -0.5 once, 1 and -1 twice: mean 1 / 8 = 0.125, variance
    # (3 * 0.140625 + 0.390625 + 2 * 0.765625 + 2 * 1.265625) / 8 = 0.609375, std 0.780625.
    assert batch_normalized([0.5, -0.5, 1, -1], [3, 1, 2, 2]) == pytest.approx(
        [0.480384, -0.800640, 1.120896, -1.441152], abs=1e-5
    )
    assert batch_normalized([0.7, 0.7], [1, 5]) == pytest.approx([0, 0], abs=1e-12)
    assert batch_normalized([1, 2], [0, 0]) == [0, 0]


def test_reinforce_plus_plus_baseline_scales_by_the_whole_batch() -> None:
    # Two groups, rewards against their means: the numbers of the test above.
    samples = Samples([sample(1, 3), sample(0, 1), sample(4, 2, index=1), sample(2, 2, index=1)])
    found = trainer("reinforce_plus_plus_baseline").compute_advantages(samples)
    assert found == pytest.approx([0.480384, -0.800640, 1.120896, -1.441152], abs=1e-5)


def test_responses_that_train_nothing_do_not_count_in_the_batch() -> None:
    # Without the third: 0.5 and -0.5 at 2 tokens each, std 0.5. Its own value is scaled alike and not used.
    samples = Samples([sample(1), sample(0), sample(9, cut=True, index=1), sample(9, cut=True, index=1)])
    found = trainer("reinforce_plus_plus_baseline", overlong_filtering=True).compute_advantages(samples)
    assert found[:2] == pytest.approx([0.999998, -0.999998], abs=1e-6)


# Dr. GRPO's constant


@pytest.mark.parametrize("turns", [1, 2])
def test_dr_grpo_gives_every_token_the_same_share(turns: int) -> None:
    # L = 4 per turn, S = 2 responses: a token of advantage A weighs A / (S * L), whatever its response's length.
    dr_grpo = trainer("dr_grpo", generation={"max_new_tokens": 4}, max_turns=turns)
    samples = Samples([sample(1, 3), sample(0, 1)])
    batch = dr_grpo.to_batch(samples, dr_grpo.compute_advantages(samples))
    share = (batch["advantages"] * batch.loss_weights)[batch.mask].tolist()
    assert share == pytest.approx([0.5 / (8 * turns)] * 3 + [-0.5 / (8 * turns)])
    # Ratio 1: loss = -(0.5 * 3 - 0.5 * 1) / (2 * 4) = -0.125 for one turn.
    policy = batch["generation_logprobs"].clone().requires_grad_()
    value, _ = dr_grpo.loss(policy, batch)
    value.backward()
    assert float(value.detach()) == pytest.approx(-0.125 / turns)
    assert policy.grad is not None
    assert policy.grad[batch.mask].tolist() == pytest.approx([-0.0625 / turns] * 3 + [0.0625 / turns])


def test_dr_grpo_divides_minibatches_by_the_same_constant() -> None:
    dr_grpo = trainer("dr_grpo", generation={"max_new_tokens": 8}, num_minibatches=2)
    samples = Samples([sample(1, 5), sample(0, 1), sample(1, 2), sample(0, 7)])
    batch = dr_grpo.to_batch(samples, dr_grpo.compute_advantages(samples))
    for part in batch.minibatches(2):  # two responses each: A / (2 * 8)
        shares = (part["advantages"] * part.loss_weights)[part.mask].abs().tolist()
        assert shares == pytest.approx([0.5 / 16] * len(shares))


# REINFORCE++ end to end, but for the forward passes


@pytest.mark.parametrize("kl_penalty", [0.0, 1.0])
def test_reinforce_plus_plus_charges_the_kl_before_it_normalizes(kl_penalty: float) -> None:
    import torch

    algorithm = trainer("reinforce_plus_plus", kl_penalty=kl_penalty, num_generations_per_prompt=1)
    assert ("old_logprobs" in algorithm.loss.requires) == algorithm.config.needs_reference == (kl_penalty > 0)
    samples = Samples([sample(1, 2), sample(0, 1, index=1)])
    batch = algorithm.to_batch(samples, algorithm.compute_advantages(samples))
    batch = batch.with_tokens(old_logprobs=torch.full((5,), -1.0), reference_logprobs=torch.full((5,), -1.5))
    found = transformed(batch, samples, algorithm.transforms)[0]["advantages"][batch.mask].tolist()
    if kl_penalty:
        # KL 0.5 a token: returns 1 - 1, 1 - 0.5, 0 - 0.5. Mean 0, variance (0 + 0.25 + 0.25) / 3, std 0.408248.
        assert found == pytest.approx([0.0, 1.224742, -1.224742], abs=1e-5)
    else:
        # 1, 1, 0: mean 2/3, std sqrt((1/9 + 1/9 + 4/9) / 3) = 0.471405.
        assert found == pytest.approx([0.707105, 0.707105, -1.414211], abs=1e-5)


def test_the_kl_of_reinforce_plus_plus_may_be_a_term_of_its_loss() -> None:
    built = trainer("reinforce_plus_plus", kl_penalty=0.5, kl_in="loss")
    assert (built.loss.kl_penalty, built.loss.kl.kind, built.loss.on_policy) == (0.5, "k3", True)
    assert [transform.requires for transform in built.transforms] == [{"advantages"}]


# A KL in the reward


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "cispo", "rloo", "maxrl"])
def test_a_kl_in_the_reward_is_charged_against_the_group(algorithm: str) -> None:
    import torch

    built = trainer(algorithm, kl_penalty=0.1, kl_in="reward")
    assert built.loss.kl_penalty == 0.0
    assert built.config.needs_reference
    assert "old_logprobs" in built.loss.requires
    samples = Samples([sample(1, 2), sample(0, 1), sample(1, 3), sample(1, 1, index=1), sample(1, 1, index=1)])
    batch = built.to_batch(samples, [0.0] * 5)
    old = torch.full((batch.num_tokens,), -1.0)
    departed = torch.tensor([0, 1, 0, 0, 0.5, 0, 0, 0, 4, 0, 0, 0, -0.5])
    batch = batch.with_tokens(old_logprobs=old, reference_logprobs=old - departed)
    batch, _ = transformed(batch, samples, built.transforms)
    # KL of the responses: 1, 0.5, 4 and 0, -0.5. Against the others: 1 - 2.25, 0.5 - 2.5, 4 - 0.75; 0.5, -0.5.
    charged = [0.125, 0.125, 0.2, -0.325, -0.325, -0.325, -0.05, 0.05]
    assert batch["advantages"][batch.mask].tolist() == pytest.approx(charged, abs=1e-6)
    assert batch["kl"][batch.mask].tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, 4.0, 0.0, -0.5]


def test_what_does_not_train_is_in_no_baseline_of_the_kl() -> None:
    import torch

    built = trainer("grpo", kl_penalty=1.0, kl_in="reward", overlong_filtering=True)
    samples = Samples([sample(1, 1), sample(0, 1), sample(1, 1, cut=True)])
    old = torch.full((6,), -1.0)
    departed = torch.tensor([0, 1.0, 0, 0.5, 0, 9.0])
    batch = built.to_batch(samples, [0.0] * 3).with_tokens(old_logprobs=old, reference_logprobs=old - departed)
    # 1 against 0.5; the third response is cut.
    charged, _ = transformed(batch, samples, built.transforms)
    assert charged["advantages"].tolist() == pytest.approx([0, -0.5, 0, 0.5, 0, 0])


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gdpo", "maxrl", "rloo", "reinforce_plus_plus_baseline"])
def test_responses_that_nobody_could_judge_teach_nothing(algorithm: str) -> None:
    from dataclasses import replace

    unjudged = [replace(one, score=Score(0.0, {"a": 1.0, "b": 0.0}, valid=False)) for one in (sample(0), sample(1))]
    built = trainer(algorithm)
    assert over_valid(Samples(unjudged), built.compute_advantages) == [0.0, 0.0]
    assert not built.keep_group(unjudged)


def test_a_kl_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses() -> None:
    """All pairs of two-token responses over a vocabulary of two, each weighed by how likely the policy draws it."""
    import itertools

    import torch

    theta = torch.tensor([[0.3, -0.2], [0.5, 0.0], [-0.4, 0.1]], requires_grad=True)  # first token; second after 0; 1
    reference = torch.log_softmax(torch.tensor([[0.0, 0.4], [-0.3, 0.2], [0.6, 0.0]]), 1)
    responses = list(itertools.product(range(2), repeat=2))

    def tokens_of(table: Any, response: tuple[int, int]) -> Any:
        return torch.stack([table[0, response[0]], table[1 + response[0], response[1]]])

    logprobs = torch.log_softmax(theta, 1)
    probability = {response: tokens_of(logprobs, response).sum().exp() for response in responses}
    kl = sum(p * (p.log() - tokens_of(reference, y).sum()) for y, p in probability.items())
    (closed_form,) = torch.autograd.grad(kl, theta, retain_graph=True)

    built = trainer("rloo", kl_penalty=1.0, kl_in="reward")
    expected = torch.zeros(3, 2)
    for pair in itertools.product(responses, repeat=2):
        samples = Samples([sample(0.0), sample(0.0)])
        fields = {
            name: torch.cat([torch.cat([torch.zeros(1), tokens_of(table, y)]) for y in pair])
            for name, table in (("old_logprobs", logprobs.detach()), ("reference_logprobs", reference))
        }
        batch = built.to_batch(samples, [0.0, 0.0]).with_tokens(**fields)
        batch, _ = transformed(batch, samples, built.transforms)
        policy = torch.cat([torch.cat([torch.zeros(1), tokens_of(logprobs, y)]) for y in pair])
        loss = built.loss(policy, batch)[0] * 2  # the mean over four tokens, as a mean over two responses
        (slope,) = torch.autograd.grad(loss, theta, retain_graph=True)
        expected += (probability[pair[0]] * probability[pair[1]]).detach() * slope
    assert expected.tolist() == [pytest.approx(row, abs=1e-6) for row in closed_form.tolist()]


@pytest.mark.parametrize(
    ("algorithm", "knobs", "path"),
    [
        ("grpo", {"kl_type": "k1", "kl_gradient": "estimator"}, "kl_type"),
        ("ppo", {"kl_in": "loss", "kl_type": "k1", "kl_gradient": "estimator"}, "kl_type"),
        ("grpo", {"kl_in": "reward", "kl_type": "k3"}, "kl_type"),
        ("ppo", {"kl_type": "k2"}, "kl_type"),
        ("rloo", {"kl_in": "reward", "kl_gradient": "estimator"}, "kl_gradient"),
        ("gspo", {"kl_in": "reward", "kl_importance_weights": True}, "kl_importance_weights"),
        ("cispo", {"kl_input_clamp": 50.0}, "kl_input_clamp"),
        ("reinforce_plus_plus", {"kl_output_clamp": 0.0}, "kl_output_clamp"),
        ("dr_grpo", {"kl_penalty": 0.1}, "kl_penalty"),
    ],
)
def test_a_kl_without_effect_is_refused_when_the_config_loads(
    algorithm: str, knobs: dict[str, Any], path: str, raises: Raises
) -> None:
    with raises(ConfigError, path=path):
        load_config({"algorithm": algorithm, "model": "some/model", **knobs})


@pytest.mark.parametrize(
    ("algorithm", "knobs", "term"),
    [
        ("grpo", {"kl_type": "k1"}, KLTerm("k1")),
        ("grpo", {"kl_gradient": "estimator"}, KLTerm("k3", gradient="estimator")),
        ("rloo", {"kl_importance_weights": True}, KLTerm("k2", weighted_by="generation")),
        ("rloo", {"kl_in": "reward"}, KLTerm("k1")),
        ("gspo", {"kl_output_clamp": None, "kl_input_clamp": 5}, KLTerm("k3", 5.0, None)),
    ],
)
def test_the_knobs_of_the_kl_reach_its_term(algorithm: str, knobs: dict[str, Any], term: KLTerm) -> None:
    assert trainer(algorithm, **knobs).config.kl_term() == term


# GDPO


def graded(*pairs: tuple[float, float], index: int = 0) -> list[Sample]:
    return [sample(a + b, index=index, components={"correct": a, "format": b}) for a, b in pairs]


def test_gdpo_normalizes_each_reward_by_itself() -> None:
    # correct 1 0 1 0: mean 0.5, std 0.577350: +-0.866024. format 1 1 1 0: mean 0.75, std 0.5: 0.499999, -1.499997.
    # 2 * correct + format: 2.232046, -1.232049, 2.232046, -3.232044; mean 0, biased std
    # sqrt((2 * 4.982029 + 1.517945 + 10.446108) / 4) = 2.341375.
    samples = Samples(graded((1, 1), (0, 1), (1, 1), (0, 0)))
    found = trainer("gdpo", reward_weights={"correct": 2.0, "format": 1.0}).compute_advantages(samples)
    assert found == pytest.approx([0.953306, -0.526208, 0.953306, -1.380404], abs=1e-5)


def test_weights_in_a_list_are_those_of_the_names_in_alphabetical_order() -> None:
    samples = Samples(graded((1, 1), (0, 1), (1, 1), (0, 0)))
    by_name = trainer("gdpo", reward_weights={"format": 1.0, "correct": 2.0}).compute_advantages(samples)
    assert trainer("gdpo", reward_weights=[2.0, 1.0]).compute_advantages(samples) == by_name
    assert trainer("gdpo", reward_weights=[1.0, 2.0]).compute_advantages(samples) != by_name


def test_gdpo_divides_by_the_spread_of_a_population_or_as_nemo_rl_of_a_sample() -> None:
    # Each reward by itself: (1 - 0.5) / 0.577350 = 0.866025. Sums: 2 x 0.866025, 0, 0, -2 x 0.866025; of squares 6.
    samples = Samples(graded((1, 1), (1, 0), (0, 1), (0, 0)))
    found = trainer("gdpo").compute_advantages(samples)
    assert found == pytest.approx([2**0.5, 0.0, 0.0, -(2**0.5)], abs=1e-5)  # 1.732051 / sqrt(6 / 4)
    found = trainer("gdpo", batch_std="sample").compute_advantages(samples)
    assert found == pytest.approx([1.5**0.5, 0.0, 0.0, -(1.5**0.5)], abs=1e-5)  # 1.732051 / sqrt(6 / 3)


def test_gdpo_tells_combinations_apart_that_grpo_does_not() -> None:
    # Sums 2, 1, 1, 0 and components of different spread: 1 + 0 is rarer than 0 + 1.
    samples = Samples(graded((1, 1), (1, 0), (0, 1), (0, 1)))
    rewards = trainer("grpo").compute_advantages(samples)
    decoupled = trainer("gdpo").compute_advantages(samples)
    assert rewards[1] == pytest.approx(rewards[2])
    assert decoupled[1] != pytest.approx(decoupled[2])


def test_gdpo_keeps_a_group_whose_sums_are_equal() -> None:
    dynamic = trainer("gdpo", dynamic_sampling=True)
    keep = dynamic.rollout_plan.keep
    assert keep(graded((1, 0), (0, 1)))
    assert not keep(graded((1, 0), (1, 0)))
    assert not trainer("grpo", dynamic_sampling=True).rollout_plan.keep(graded((1, 0), (0, 1)))


@pytest.mark.parametrize(
    ("samples", "knobs", "facts"),
    [
        ([sample(1.0), sample(0.0)], {}, [0, "grpo"]),
        ([sample(1.0, components={"a": 1.0})] * 2, {}, [1, "'a'", "components"]),
        (
            [*graded((1, 1)), sample(0.0, components={"correct": 0.0, "style": 1.0})],
            {},
            ["correct", "style", "format", "components"],
        ),
        (
            graded((1, 1), (0, 1)),
            {"reward_weights": {"correct": 1.0, "length": 1.0}},
            ["correct", "format", "length", "reward_weights"],
        ),
        (graded((1, 1), (0, 1)), {"reward_weights": [1.0, 0.5, 0.25]}, [3, "correct", "format"]),
    ],
)
def test_gdpo_says_which_rewards_are_missing(
    samples: Any, knobs: dict[str, Any], facts: list[object], raises: Raises
) -> None:
    with raises(UsageError, *facts):
        trainer("gdpo", **knobs).compute_advantages(Samples(samples))


def test_a_response_that_timed_out_scores_zero_in_every_reward() -> None:
    late = replace(sample(0.0), score=Score(0.0, outcome="policy_timeout"))
    samples = Samples([late, *graded((1, 1), (0, 1), (1, 0))])
    same = Samples(graded((0, 0), (1, 1), (0, 1), (1, 0)))
    assert trainer("gdpo").compute_advantages(samples) == trainer("gdpo").compute_advantages(same)
    for weights in (None, [2.0, 1.0], {"correct": 2.0, "format": 1.0}):
        unanswered = trainer("gdpo", reward_weights=weights).compute_advantages(Samples([late, late]))
        assert unanswered == [0.0, 0.0]


# Configs


@pytest.mark.parametrize("algorithm", NAMES)
def test_config_and_trainer_have_the_names_of_the_paper(algorithm: str) -> None:
    config_class = getattr(nemorl, f"{NAMES[algorithm]}Config")
    assert config_class.model_fields["algorithm"].default == algorithm
    assert getattr(nemorl, f"{NAMES[algorithm]}Trainer").config_class is config_class
    assert type(load_config({"algorithm": algorithm, "model": "some/model"})) is config_class


@pytest.mark.parametrize(
    ("algorithm", "knobs"),
    [
        ("dr_grpo", ["normalize_std", "leave_one_out", "loss_aggregation"]),
        ("gspo", ["loss_aggregation", "dual_clip"]),
        ("cispo", ["clip_low", "clip_high", "dual_clip", "loss_aggregation"]),
        ("rloo", ["normalize_std", "leave_one_out"]),
        ("maxrl", ["normalize_std", "leave_one_out"]),
        ("reinforce_plus_plus_baseline", ["normalize_std", "leave_one_out"]),
        ("reinforce_plus_plus", ["normalize_std", "leave_one_out"]),
        ("gdpo", ["reward_scaling", "overlong_penalty", "truncation_reward_factor", "normalize_std"]),
    ],
)
def test_a_knob_without_meaning_does_not_exist(algorithm: str, knobs: list[str], raises: Raises) -> None:
    for knob in knobs:
        with raises(ConfigError, path=knob):
            load_config({"algorithm": algorithm, "model": "some/model", knob: None})


def test_dapo_punishes_the_last_fifth_of_the_limit() -> None:
    penalty = trainer("dapo", generation={"max_new_tokens": 1000}, policy={"max_sequence_tokens": 2000}).config
    assert penalty.overlong_penalty.model_dump() == {
        "max_response_tokens": 1000,
        "buffer_tokens": 200,
        "penalty": 1.0,
    }
    twice = load_config({"algorithm": "dapo", "model": "a/b", "generation": {"max_new_tokens": 4}, "max_turns": 2})
    assert twice.overlong_penalty.max_response_tokens == 8  # type: ignore[attr-defined]
    assert twice.overlong_penalty.buffer_tokens == 1  # type: ignore[attr-defined]
    assert load_config({"algorithm": "dapo", "model": "a/b", "overlong_penalty": None}).overlong_penalty is None  # type: ignore[attr-defined]


def test_a_mistake_elsewhere_is_not_blamed_on_the_default_penalty() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"algorithm": "dapo", "model": "some/model", "generation": {"max_new_tokens": "many"}})
    assert [problem.path for problem in caught.value.problems] == ["generation.max_new_tokens"]


@pytest.mark.parametrize("reward_weights", [{}, {"correct": 1.0}, [1.0]])
def test_gdpo_wants_weights_for_two_rewards(reward_weights: Any, raises: Raises) -> None:
    with raises(ConfigError, path="reward_weights"):
        load_config({"algorithm": "gdpo", "model": "some/model", "reward_weights": reward_weights})


def test_one_response_per_prompt_is_enough_for_reinforce_plus_plus_alone(raises: Raises) -> None:
    for algorithm in NAMES:
        given = {"algorithm": algorithm, "model": "some/model", "num_generations_per_prompt": 1}
        if algorithm == "reinforce_plus_plus":
            load_config(given)
        else:
            with raises(ConfigError, 1, path="num_generations_per_prompt"):
                load_config(given)


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [(name, kind) for kind in CORRECTION_BOUNDS for name in NAMES if (name, kind) != ("gspo", "kpop")],
)
def test_every_variant_takes_every_correction(algorithm: str, kind: str) -> None:
    # Generation is off by 0.5 nats everywhere, beyond all bounds but those of icepop and kpop: plain e^0.5 = 1.648721
    # and so on. GSPO, which knows one ratio per response, refuses kpop.
    weights = {"plain": 1.648721, "truncated": 1.2, "icepop": 1.648721, "sequence_mask": 0.0, "kpop": 1.648721}
    weight = weights[kind]
    correction = {"kind": kind, **({"cap": 1.2} if kind == "truncated" else {})}
    built = (
        trainer(algorithm, importance_correction=correction, kl_penalty=0.0)
        if algorithm != "dr_grpo"
        else trainer(algorithm, importance_correction=correction)
    )
    samples = Samples([sample(1), sample(0)])
    batch: TokenBatch = built.to_batch(samples, [1.0, -1.0])
    batch = batch.with_tokens(generation_logprobs=batch["generation_logprobs"] - 1.5)
    slopes = []
    for corrected in (built.loss, type(built.loss)(on_policy=True)):
        policy = (0 * batch["generation_logprobs"] - 1.0).requires_grad_()
        corrected(policy, batch)[0].backward()
        assert policy.grad is not None
        slopes.append(policy.grad[batch.mask])
    assert slopes[0].tolist() == pytest.approx((weight * slopes[1]).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("grpo", ClippedPolicyGradientLoss(kl_penalty=0.01, on_policy=True)),
        ("dapo", ClippedPolicyGradientLoss(clip_high=0.28, on_policy=True)),
        ("dr_grpo", ClippedPolicyGradientLoss(on_policy=True)),
        ("gspo", SequenceRatioLoss(on_policy=True)),
        ("cispo", CappedWeightLoss(on_policy=True)),
        ("rloo", ClippedPolicyGradientLoss(kl_penalty=0.01, kl=KLTerm("k2"), on_policy=True)),
        ("reinforce_plus_plus", ClippedPolicyGradientLoss(kl=KLTerm("k1"), on_policy=False)),  # its KL is in the reward
        ("reinforce_plus_plus_baseline", ClippedPolicyGradientLoss(kl_penalty=0.01, kl=KLTerm("k2"), on_policy=True)),
        ("gdpo", ClippedPolicyGradientLoss(kl_penalty=0.01, on_policy=True)),
        ("maxrl", ClippedPolicyGradientLoss(on_policy=True)),
    ],
)
def test_the_loss_of_each_variant(algorithm: str, loss: Any) -> None:
    assert trainer(algorithm).loss == loss
