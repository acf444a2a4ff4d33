"""Checks of algorithms by what they teach: after a few steps of a lesson that is easily learnt, every model of a run is
nearer to what it is for. A loss or an advantage of the wrong sign shows in nothing else.

# N = tokens of all sequences concatenated, V = vocabulary
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.types import Score
from nemorl_rl.config import RolloutRunConfig

from nemorl_testing.algorithms import ROWS, fit
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.updates import POLICY, VALUE, Update, Updates

if TYPE_CHECKING:
    from torch import Tensor

LESSON: Mapping[str, Any] = {
    "max_steps": 8,
    "checkpoint": {"every": 0},
    "policy": {"optimizer": {"lr": 1e-2}},
}
"""Steps and a rate that take the mean reward of GRPO's defaults from 0.4 to 0.8."""
LIKED = frozenset(string.printable[::2])
"""Characters that the bandit pays for."""
PROMPTS = 4
"""Prompts after which models are compared."""


@dataclass
class _Lesson:
    """A finished run."""

    result: Any
    updates: Updates

    def shutdown(self) -> None:
        """Nothing is alive in it."""


def bandit(prompt: str, response: str) -> Score:
    """Pays for each character by itself, in two equal parts for algorithms that take several rewards."""
    share = _liked_share(response)
    return Score(share, {"liked": share / 2, "also_liked": share / 2})


def check_what_earns_more_becomes_likelier(subject: Subject) -> None:
    """On a bandit that pays for half of all characters, a few steps raise the expected reward. (DESIGN 9)"""
    if not _is_rewarded(subject):
        raise NotApplicable("this algorithm trains on no rewards")
    run_dir = _lesson(subject).result.run_dir
    before, after = (_expected_reward(subject, folder) for folder in (_model_name(subject), run_dir / "model"))
    expect(
        after > before,
        f"a response was to begin with a character that is paid for at {before:.3f} before training, at {after:.3f} "
        "after it: look at the signs of advantage and loss",
    )


def check_given_responses_become_likelier(subject: Subject) -> None:
    """Training on rows raises what they give as right: over what they give as wrong, where they do. (DESIGN 9)"""
    if issubclass(subject.config_class, RolloutRunConfig):
        raise NotApplicable("this algorithm samples its responses")
    update = _lesson(subject).updates.first.get(POLICY)
    if update is None:
        raise NotApplicable("it never updates its policy, of which another check tells")
    before, after = (_preference(update, said) for said in (update.before, update.after))
    expect(
        after > before,
        f"of the first batch, {'right over wrong is at' if _has_wrong(update) else 'a response has'} {before:.3f} "
        f"before training and {after:.3f} after it: look at the sign of the loss",
    )


def check_a_critic_nears_what_is_earned(subject: Subject) -> None:
    """Another model that learns values is nearer to the rewards after a few steps. (DESIGN 9)"""
    models = subject.config.auxiliary_models
    critics = [role for role, model in models.items() if model.learns and model.head == VALUE]
    if not critics or not _is_rewarded(subject):
        raise NotApplicable("it has no critic of rewards")
    updates = _lesson(subject).updates
    earned = {tuple(one.token_ids): one.reward for sample in updates.samples for one in sample.sequences}
    for critic in map(updates.first.__getitem__, critics):
        before, after = (_distance(critic, said, earned) for said in (critic.before, critic.after))
        expect(
            after < before,
            f"the values of {critic.role} were off the rewards by {before:.3f} before training, by {after:.3f} after "
            "it: look at the sign of its loss",
        )


def check_a_student_nears_its_teachers(subject: Subject) -> None:
    """A run with frozen models to learn from leaves the policy nearer to them. (DESIGN 9)"""
    if _is_rewarded(subject) or not issubclass(subject.config_class, RolloutRunConfig):
        raise NotApplicable("this algorithm learns from rewards, or from rows")
    models = subject.config.auxiliary_models.values()
    teachers = [model.policy.model_name for model in models if not model.learns and model.head != VALUE]
    teachers = [name for name in teachers if name != _model_name(subject)]
    if not teachers:
        raise NotApplicable("it has no frozen model to learn from but its own weights")
    run_dir = _lesson(subject).result.run_dir
    before, after = (_divergence(subject, folder, teachers) for folder in (_model_name(subject), run_dir / "model"))
    expect(
        after < before,
        f"the policy was {before:.3f} nats from its teachers before training and {after:.3f} after it: look at the "
        "sign of the loss",
    )


def _lesson(subject: Subject) -> _Lesson:
    if "lesson" not in subject.shared:
        updates = Updates()
        result = fit(subject, subject.folder / "lesson", reward_fn=bandit, callbacks=[updates], **LESSON)
        subject.shared["lesson"] = _Lesson(result, updates)
    found: _Lesson = subject.shared["lesson"]
    return found


def _is_rewarded(subject: Subject) -> bool:
    config = subject.config
    return isinstance(config, RolloutRunConfig) and bool(list(config.reward_problems(None, "")))


def _model_name(subject: Subject) -> str:
    return str(subject.config.policy.model_name)


def _liked_share(text: str) -> float:
    return sum(character in LIKED for character in text) / max(1, len(text))


def _expected_reward(subject: Subject, folder: Any) -> float:
    """Of the first token of a response, exactly: the mean over all tokens by their probability."""
    import torch

    inner = _tokenizer(subject).inner
    probabilities_V = _next_logprobs(subject, folder).exp().mean(0)
    pays_V = torch.tensor([_liked_share(inner.decode([index])) for index in range(len(inner))])
    return float((probabilities_V[: len(inner)] * pays_V).sum())


def _divergence(subject: Subject, folder: Any, teachers: list[str]) -> float:
    """KL(policy, teacher) of the first token of a response, in nats, the mean over teachers."""
    student_V = _next_logprobs(subject, folder)
    found = []
    for teacher in teachers:
        teacher_V = _next_logprobs(subject, teacher)
        if teacher_V.shape != student_V.shape:
            raise NotApplicable("a teacher has another vocabulary: this check cannot compare")
        found.append(float((student_V.exp() * (student_V - teacher_V)).sum(-1).mean()))
    return sum(found) / len(found)


def _next_logprobs(subject: Subject, folder: Any) -> Tensor:
    """[prompts, V] of the token after each of the first prompts."""
    import torch
    from nemorl_rl.rollouts.prompts import to_prompt

    from nemorl_testing.models import load_reference

    model, tokenizer = load_reference(folder), _tokenizer(subject)
    rows = list(subject.settings.rows or ROWS)[:PROMPTS]
    with torch.no_grad():
        ids = [to_prompt(row, index, tokenizer).token_ids for index, row in enumerate(rows)]
        return torch.stack([torch.log_softmax(model(input_ids=torch.tensor([one])).logits[0, -1], -1) for one in ids])


def _tokenizer(subject: Subject) -> Any:
    from nemorl_rl.data.tokenizer import Tokenizer

    return Tokenizer.of(subject.config.policy)


DESIRABLE = "desirable"
"""The sequence field of batches whose responses are labelled one by one."""


def _has_wrong(update: Update) -> bool:
    return bool(update.batch.sequences_per_group == 2) or DESIRABLE in update.batch


def _preference(update: Update, said: Tensor) -> float:
    """Nats, or values, of a mean response that is given as right, less those of a mean one that is given as wrong."""
    import torch
    from nemorl_tensors import segment_sum

    batch = update.batch
    sums_B = segment_sum(said, batch.mask, batch.lengths)
    if not _has_wrong(update):
        return float(sums_B.mean())
    is_right_B = batch[DESIRABLE] if DESIRABLE in batch else torch.arange(len(batch)) % 2 == 0
    return float(sums_B[is_right_B].mean() - sums_B[~is_right_B].mean())


def _distance(critic: Update, values_N: Tensor, earned: Mapping[tuple[int, ...], float]) -> float:
    """Root mean square of value less reward, over the tokens that it trains on."""
    import torch

    batch = critic.batch
    sequences = batch.token_ids.split(batch.lengths.tolist())
    rewards_B = torch.tensor([earned.get(tuple(ids.tolist()), torch.nan) for ids in sequences])
    errors = (values_N - rewards_B[batch.sequence_ids])[batch.mask]
    known = errors[errors.isfinite()]
    if not len(known):
        raise NotApplicable("its critic trains on sequences that this check did not see being made")
    return float(known.square().mean().sqrt())
