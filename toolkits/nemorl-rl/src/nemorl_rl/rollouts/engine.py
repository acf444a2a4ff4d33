"""RolloutEngine: prompts -> generate -> environment -> Samples, for one turn or many.

Tokens in, tokens out (invariant 7): what was sampled is what is trained. Observations are appended as tokens with
mask False; nothing is ever decoded and tokenised again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemorl.base.process.timing import Span, Timer
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.media import Media
from nemorl.metrics import Max, Mean, Metric, Sum
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, SamplingParams, Score

from nemorl_rl.agents.contract import EpisodeLimits
from nemorl_rl.agents.driver import AgentDriver
from nemorl_rl.agents.policy import Sampler
from nemorl_rl.agents.record import Call, plain_sample
from nemorl_rl.agents.turns import FreeTurns, observation, total_score
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.environments.pool import TimedEpisode
from nemorl_rl.rollouts.prompts import require_first_words
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.serving.generation_policy import GenerationPolicy
from nemorl_rl.serving.requests import spans_of

AGENT_EPISODE_S = 1800.0
"""Longest episode of an agent, unless ``rollouts.episode_timeout_s`` says otherwise."""


@dataclass
class _Trajectory:
    """One sample in the making."""

    prompt: Prompt
    episode: TimedEpisode
    seed: int
    told: list[int]
    """Prompt, responses and observations, one after the other."""
    calls: list[Call] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    """Images and sounds among them."""
    response: str = ""
    done: bool = False

    def extend(self, completion: Completion, response: str, span: Span, *, goes_on: bool) -> None:
        number, observed = len(self.calls), self.episode.span
        media = tuple(self.media)
        self.calls.append(Call(number, tuple(self.told), completion, observed=observed, span=span, media=media))
        if goes_on:  # nobody reads the numbers of an answer one by one that is the last
            self.told += completion.token_ids
        self.response = response

    def sample(self) -> Sample:
        rewards = [score.reward for score in self.scores]
        span = Span(self.calls[0].span.began_s, self.episode.span.ended_s)
        return plain_sample(self.prompt, self.calls, total_score(self.scores), self.response, rewards, span=span)


@dataclass(frozen=True)
class RolloutPlan:
    """The making of a group of samples from a prompt.

    Example:
        >>> def differs(group):
        ...     return len({sample.reward for sample in group}) > 1
        >>> RolloutPlan(8, SamplingParams(temperature=0.9), keep=differs).max_turns
        1
    """

    samples_per_prompt: int
    """G"""
    sampling: SamplingParams
    max_turns: int = 1
    """Responses per episode at most."""
    keep: Callable[[Sequence[Sample]], bool] | None = None
    """True for groups worth training on; others are replaced by more prompts (dynamic sampling). Unset: all."""
    is_trained: bool = True
    """False in validation and evaluation: agents may then choose a temperature of their own."""


class RolloutEngine:
    """Samples responses and has them scored."""

    def __init__(
        self,
        policy: GenerationPolicy,
        environments: EnvironmentPool,
        tokenizer: Tokenizer,
        *,
        max_sequence_tokens: int,
        timer: Timer | None = None,
        penalise: Callable[[Sample], Sample] | None = None,
    ) -> None:
        self.policy = policy
        self.environments = environments
        self.tokenizer = tokenizer
        self.max_sequence_tokens = max_sequence_tokens
        self.timer = timer or Timer()
        self.penalise = penalise
        """What becomes of an episode for how it is written (``rollouts.reward_penalties``)."""

    def with_timer(self, timer: Timer) -> RolloutEngine:
        """The same engine, its seconds counted elsewhere: a timer belongs to one thread."""
        limit, parts = self.max_sequence_tokens, (self.policy, self.environments, self.tokenizer)
        return RolloutEngine(*parts, max_sequence_tokens=limit, timer=timer, penalise=self.penalise)

    def collect(self, prompts: Sequence[Prompt], plan: RolloutPlan, *, seed: int) -> Samples:
        """G trajectories for each prompt, scored; groups contiguous and in prompt order.

        Args:
            prompts: P tasks; ``index`` tells groups apart.
            plan: How a prompt becomes a group.
            seed: Seeds every sample of this call, each differently.
        """
        groups = {group[0].prompt.index: group for group in self.stream(prompts, plan, seed=seed)}
        return Samples([sample for prompt in prompts for sample in groups[prompt.index]])

    def stream(
        self,
        prompts: Sequence[Prompt],
        plan: RolloutPlan,
        *,
        seed: int,
        on_generated: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Sample]]:
        """The groups of ``prompts``, each when its last episode has ended, settled by the pool's table of outcomes.

        Turn by turn, a turn beginning when all of the last ended; or, where the environment drives, each episode at its
        own pace. Episodes that failed and are to be asked for again come in further rounds.

        Args:
            prompts: P tasks; ``index`` tells groups apart.
            plan: How a prompt becomes a group.
            seed: Seeds every sample of this call, each differently.
            on_generated: Called when the generator has nothing more to do but for later turns.
        """
        table, size = self.environments.on_outcome, plan.samples_per_prompt
        kept: dict[int, list[Sample]] = {prompt.index: [] for prompt in prompts}
        numbers = {prompt.index: range(size) for prompt in prompts}
        for left in range(table.max_refills, -1, -1):
            again = {}
            for group in self._sampled(prompts, numbers, plan, seed, on_generated):
                index = group[0].prompt.index
                kept[index] += [sample for sample in group if not (left and table.wants_another(sample))]
                lost = size - len(kept[index])
                if lost:
                    first = (table.max_refills - left + 1) * size  # a number, and with it a seed, that no other has
                    again[index] = range(first, first + lost)
                else:
                    ended = kept.pop(index)
                    yield table.settled(ended if self.penalise is None else [self.penalise(one) for one in ended])
            if not again:
                return
            prompts, numbers = [prompt for prompt in prompts if prompt.index in again], again

    def _sampled(
        self,
        prompts: Sequence[Prompt],
        numbers: Mapping[int, Sequence[int]],
        plan: RolloutPlan,
        seed: int,
        on_generated: Callable[[], None],
    ) -> Iterator[list[Sample]]:
        """Of each prompt the samples of these numbers, together, as they ended."""
        driving = self._driving(plan)
        if driving is not None:
            with self.timer.phase("generation"):
                yield from self._driven(driving, prompts, numbers, plan, seed)
            on_generated()
            return
        limit = self.max_sequence_tokens
        groups = {prompt.index: [self._begin(prompt, g, seed) for g in numbers[prompt.index]] for prompt in prompts}
        for turn in range(plan.max_turns):
            active = [trajectory for group in groups.values() for trajectory in group if not trajectory.done]
            if not active:
                return
            is_last = turn == plan.max_turns - 1
            with self.timer.phase("generation"):
                self._respond(active, plan.sampling, turn, goes_on=not is_last)
            on_generated()
            with self.timer.phase("reward_calculation"):
                for index, step in self.environments.stream([t.episode for t in active], [t.response for t in active]):
                    one = active[index]
                    one.scores.append(step.score)
                    observed = None if is_last else observation(step, one.told, self.tokenizer, limit)
                    if observed is not None:
                        one.told += observed.ids
                        one.media += observed.media
                    one.done = observed is None
                    group = groups[one.prompt.index]
                    if all(trajectory.done for trajectory in group):
                        samples = [trajectory.sample() for trajectory in group]
                        for trajectory in group:  # what engines sent is let go: samples have copies
                            trajectory.calls.clear()
                        yield samples

    def _driving(self, plan: RolloutPlan) -> Environment | None:
        """The environment that drives episodes at their own pace; ``None``: they go turn by turn, together."""
        pool = self.environments
        if pool.environment.drives_policy:
            return pool.environment
        if pool.turns == "together":
            return None
        return FreeTurns(pool.environment, self.tokenizer, max_turns=plan.max_turns, timeout_s=pool.timeout_s)

    def _driven(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        numbers: Mapping[int, Sequence[int]],
        plan: RolloutPlan,
        seed: int,
    ) -> Iterator[list[Sample]]:
        from nemorl_rl.chat.codec import codec_of
        from nemorl_rl.chat.text import TokenizerText

        pool, most_tokens = self.environments, self.max_sequence_tokens
        timeout_s = pool.episode_timeout_s or AGENT_EPISODE_S
        codec = codec_of(self.tokenizer, pool.chat_renderer)
        text = TokenizerText(self.tokenizer, codec)
        driver = AgentDriver(
            environment,
            Sampler(self.policy, plan.sampling, honours_clients=not plan.is_trained, text=text),
            self.tokenizer,
            codec,
            pool,
            limits=EpisodeLimits(most_tokens, plan.sampling.max_new_tokens, pool.max_calls, timeout_s),
        )
        yield from driver.groups(prompts, numbers, seed)

    def _begin(self, prompt: Prompt, g: int, seed: int) -> _Trajectory:
        require_first_words(prompt, self.environments.environment.owner)
        size = len(prompt.token_ids)
        if size >= self.max_sequence_tokens:
            raise DataError(
                f"prompt {prompt.index} ({prompt.text[:50]!r}) has {size} tokens, "
                f"the limit is {self.max_sequence_tokens}",
                fix="raise policy.max_sequence_tokens, or filter long prompts from the dataset",
            )
        own_seed = derive_seed(seed, prompt.index, g)
        told, media = list(prompt.token_ids), list(prompt.media)
        return _Trajectory(prompt, self.environments.start(prompt), own_seed, told, media=media)

    def _respond(self, active: Sequence[_Trajectory], sampling: SamplingParams, turn: int, *, goes_on: bool) -> None:
        """One response for each. Trajectories that still share their prefix form one request."""
        shared: dict[tuple[int, tuple[int, ...]], list[_Trajectory]] = {}
        for trajectory in active:
            shared.setdefault((trajectory.prompt.index, tuple(trajectory.told)), []).append(trajectory)
        requests = []
        for (_, token_ids), members in shared.items():
            room = self.max_sequence_tokens - len(token_ids)
            limited = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            seeds = tuple(derive_seed(member.seed, turn) for member in members)
            media = tuple(members[0].media)
            requests.append(GenerationRequest(token_ids, limited, seeds, goes_on, media=media))
        sent_s = time.monotonic()
        answers = self.policy.generate(requests)
        completions = [completion for answer in answers for completion in answer]
        spans = spans_of(completions, sent_s, time.monotonic())
        asked = [member for members in shared.values() for member in members]
        for member, completion, span in zip(asked, completions, spans, strict=True):
            member.extend(completion, self.tokenizer.decode(completion.token_ids), span, goes_on=goes_on)


def rollout_metrics(samples: Samples) -> dict[str, Metric]:
    """Metrics of one rollout, under NeMo RL's names. Means of rewards are those of episodes that have a verdict.

    Example:
        >>> one = Sample(Prompt(0, "1+1=", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "2", "stop")
        >>> rollout_metrics(Samples([one]))["mean_gen_tokens_per_sample"].value
        1.0
    """
    lengths = [sample.response_tokens for sample in samples]
    judged = [sample for sample in samples if sample.score.valid]
    metrics: dict[str, Metric] = {
        "reward": Mean.of(sample.reward for sample in judged),
        "accuracy": Mean.of(accuracy_of(sample) for sample in judged),
        "mean_prompt_length": Mean.of(len(sample.prompt.token_ids) for sample in samples),
        "mean_gen_tokens_per_sample": Mean.of(lengths),
        "max_gen_tokens_per_sample": Max.of(lengths),
        "mean_total_tokens_per_sample": Mean.of(sample.total_tokens for sample in samples),
        "num_samples": Sum(float(len(samples))),
        "num_valid_samples": Sum(float(len(judged))),
        "total_num_tokens": Sum(float(sum(sample.total_tokens for sample in samples))),
        "natural_termination_rate": Mean.of(float(not sample.truncated) for sample in samples),
        "truncation_rate": Mean.of(float(sample.truncated) for sample in samples),
        "avg_turns_per_sample": Mean.of(sample.turns for sample in samples),
    }
    named = {
        "reward": [sample.score.components for sample in judged],
        "environment": [sample.score.metrics for sample in samples],
    }
    for kind, numbers in named.items():
        for name in sorted({name for each in numbers for name in each}):
            metrics[f"{kind}/{name}"] = Mean.of(each.get(name, 0.0) for each in numbers)
    return metrics


def accuracy_of(sample: Sample) -> float:
    """1.0 or 0.0 where the environment says right or wrong, else the reward itself."""
    return sample.reward if sample.score.correct is None else float(sample.score.correct)
