"""The config of runs that sample from the policy: what ``RunConfig`` has, and generation, environment and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from nemorl.config.base import RESUMABLE, Config
from nemorl.config.component import Component
from nemorl.config.models import AuxiliaryModel, GenerationConfig, Placement
from nemorl.config.run import RunConfig, ValidationConfig
from nemorl.errors import ConfigIssue, boundary
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.types import SamplingParams
from pydantic import Field, model_validator

from nemorl_rl.curriculum.choosing import AnySampler
from nemorl_rl.declared_metrics import ROLLOUT_METRICS
from nemorl_rl.placement.place import place
from nemorl_rl.rollouts.outcomes import OutcomeTable
from nemorl_rl.rollouts.recording import RecordingConfig
from nemorl_rl.rollouts.reward_penalties import RewardPenalties


class BreakerConfig(Config):
    """When steps that teach nothing end the run, or are warned of.

    Example:
        >>> config = RolloutConfig(breaker={})
        >>> isinstance(config.breaker, BreakerConfig)
        True
    """

    failed_frac: float = Field(0.5, gt=0, le=1)
    """Share of a step's episodes that must have failed without the policy's doing (``environment_timeout``,
    ``infrastructure``) for the step to count."""
    failed_steps: int = Field(3, ge=0)
    """Such steps in a row after which the run ends with an error; 0: never."""
    equal_frac: float = Field(0.95, gt=0, le=1)
    """Share of a step's groups whose rewards must all be the same for the step to count."""
    equal_steps: int = Field(10, ge=0)
    """Such steps in a row after which ``on_equal`` happens, as the alert ``few_mixed_groups``; 0: never."""
    on_equal: Literal["warn", "stop"] = "warn"
    """``warn`` once, until as many steps have other rewards; ``stop`` with an error where hours are dear."""


class WeightsConfig(Config):
    """Proof that engines sample from the weights they were sent.

    Example:
        >>> WeightsConfig(share=1.0).on_unproven
        'refuse'
    """

    receipts: Literal["auto", "off", "digests", "probe"] = "auto"
    """What a receipt consists of. ``digests``: of each tensor, by the trainer and by the engine. ``probe``: besides,
    log-probs of a few tokens by both. ``auto``: digests, and the probe where some tensors have none; nothing from
    engines that cannot answer (``server``). ``off``: engines are believed."""
    share: float = Field(0.03, ge=0, le=1)
    """Largest share of the time of weight syncs that receipts take: after one, syncs go without until this holds again.
    The first sync of a process, and the first after an engine was replaced, always has one. 1: every sync."""
    on_unproven: Literal["refuse", "warn"] = "refuse"
    """When a receipt contradicts what was sent. ``refuse``: the run ends before anything is learnt from responses of
    these weights. ``warn``: it goes on, warned, and its records say which responses are meant."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Mean distance, in nats, between both log-probs of the probe that counts as rounding. Unset: 0.01 where the policy
    computes in float32, else 0.25."""


class RolloutConfig(Config):
    """How responses are collected and scored.

    Example:
        >>> RolloutConfig(mode="async", max_staleness=2).mode
        'async'
    """

    mode: Literal["sync", "async"] = "sync"
    """``sync``: sample, then train. ``async``: sample the next batches while training on earlier ones."""
    max_staleness: int = Field(1, ge=0, le=10_000)
    """``async``: updates that may lie between the weights that sampled a token and those that learn from it. 0 is
    exactly ``sync``. ``on_stale`` says what becomes of older groups."""
    on_stale: Literal["drop", "requeue", "train"] = "drop"
    """``async``: groups that are older, as a rule those of slow environments. ``drop``: given up, which is a bias
    against tasks that take long. ``requeue``: their prompts are sampled again, before others, up to three times.
    ``train``: learnt from at any age; use an importance correction."""
    max_batches_per_step: Annotated[int, RESUMABLE] = Field(10, ge=1, le=1_000_000)
    """Where an algorithm rejects groups (dynamic sampling): batches sampled for one step before the run gives up."""
    adapters: Annotated[Literal["auto", "merged", "separate"], RESUMABLE] = "auto"
    """How a policy with LoRA gets to an engine that can apply adapters (``vllm``): ``merged`` into the weights, or
    ``separate``, the adapters alone. ``auto``: separate where weights travel between nodes with GPUs."""
    environment_timeout_s: float = Field(60.0, gt=0)
    """Seconds the environment may take for one response; then the episode ends (``on_outcome``) and counts in
    ``environment_timeout``."""
    episode_timeout_s: float | None = Field(None, gt=0)
    """Seconds the environment may take for all responses of an episode together, generation not counted; then it ends
    (``on_outcome``) and counts in ``episode_timeout``. Set it for long conversations. Unset: each response is limited.
    For agents, which call the policy themselves: of the whole episode, generation counted; unset: half an hour."""
    max_calls: int = Field(64, ge=1, le=1_000_000)
    """Agents: answers that an episode may ask of the policy. It is refused more, and scores 0 if that ends it."""
    chat_renderer: str | None = None
    """Agents: the renderer of the package ``renderers`` (``qwen3``, ``gpt-oss``, …) that writes messages and reads
    answers. Unset: the model's own chat template, or the renderer of a family whose answers nemorl does not read."""
    turns: Literal["together", "free"] = "together"
    """Conversations of several turns. ``together``: a turn begins when all episodes have ended the last, in batches
    that are the same in every run. ``free``: each episode goes on as soon as it can, which is faster where answers of
    the environment take different times; at most ``environment_concurrency`` episodes run at once."""
    environment_concurrency: Annotated[int, RESUMABLE] = Field(16, ge=1, le=10_000)
    """Responses scored at the same time, or episodes of agents. Raise it for environments that wait on a network."""
    on_outcome: OutcomeTable = Field(default_factory=OutcomeTable)
    """What is learnt from episodes that end without a verdict."""
    reward_penalties: RewardPenalties | None = None
    """Faults of writing for which an episode earns 0, in validation too. Unset: none."""
    min_group: int = Field(1, ge=1, le=100_000)
    """Verdicts that a group needs: one with fewer trains nothing. A baseline of two responses is a loud one."""
    breaker: Annotated[BreakerConfig, RESUMABLE] = Field(default_factory=BreakerConfig)
    """When steps that teach nothing end the run, or are warned of."""
    mismatch_warning: Annotated[float, RESUMABLE] = Field(1.05, gt=1)
    """Warn when ``token_mult_prob_error`` exceeds this: the mean factor by which trainer and sampler differ in the
    probability of a sampled token. 1 is agreement. Raise it where a larger one is expected and corrected for."""
    mismatch_limit: Annotated[float | None, RESUMABLE] = Field(1.3, gt=1)
    """End the run when ``token_mult_prob_error`` exceeds this in its first step, or the first after it was resumed: the
    sampler then runs another model. Rounding to bfloat16 gives up to about 1.05. Unset (``null``): only warn."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.mismatch_limit is not None and self.mismatch_limit < self.mismatch_warning:
            yield ConfigIssue(
                "mismatch_limit",
                f"{self.mismatch_limit:g} is below mismatch_warning = {self.mismatch_warning:g}, which only warns",
                "raise mismatch_limit as well, or set it to null to be warned only",
            )


class RolloutValidationConfig(ValidationConfig):
    """Held-out evaluation during training, by sampling.

    Example:
        >>> RolloutValidationConfig(num_generations=4, temperature=0.7).num_generations
        4
    """

    num_generations: int = Field(1, ge=1, le=100_000)
    """Responses per prompt; above 1 also reports pass@k for k = 1 … this."""
    temperature: float = Field(0.0, ge=0, le=100)
    """Sampling temperature of validation; 0 is greedy. Use 1.0 with num_generations above 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling in validation. Unset: ``generation.top_p``."""
    top_k: int | None = Field(None, ge=0)
    """Validation samples among the k most likely tokens; 0: all. Unset: ``generation.top_k``."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """Validation drops tokens less likely than this fraction of the most likely one. Unset: ``generation.min_p``."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response of validation in tokens. Unset: ``generation.max_new_tokens``."""

    def sampling(self, generation: GenerationConfig) -> SamplingParams:
        """How validation draws its responses: as ``generation`` says, but for what is set here."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        if changes.get("top_k") == 0:
            changes["top_k"] = None
        return generation.sampling(**changes)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.num_generations > 1 and self.temperature == 0:
            yield ConfigIssue(
                "temperature",
                "greedy responses to one prompt are all the same",
                "set validation.temperature above 0, or num_generations to 1",
            )


class RolloutRunConfig(RunConfig):
    """One run of an algorithm that samples from the policy it trains.

    Example:
        >>> class MyConfig(RolloutRunConfig):
        ...     num_prompts_per_step: int = 8
        >>> MyConfig(model="org/model", generation={"max_new_tokens": 16}).generation.max_new_tokens
        16
    """

    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **ROLLOUT_METRICS,
        **RunConfig.metrics,
    }
    other_paths: ClassVar[Mapping[str, str]] = {**RunConfig.other_paths, "prompt_sampling": "data.sampling"}

    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """The sampling engine and its settings."""
    rollouts: RolloutConfig = Field(default_factory=RolloutConfig)
    """How responses are collected and scored."""
    weights: Annotated[WeightsConfig, RESUMABLE] = Field(default_factory=WeightsConfig)
    """Receipts by which engines prove what they sample from."""
    records: Annotated[RecordingConfig, RESUMABLE] = Field(default_factory=RecordingConfig)
    """How many rollouts are kept in ``records/``."""
    prompt_sampling: AnySampler | None = None
    """Which prompts a step asks, by what became of them so far: ``pass_rate``, ``thompson``, ``budget``; or
    ``uniform``, which only keeps statistics. In files also ``data.sampling``. Unset: every prompt once per epoch."""
    environment: Annotated[EnvironmentConfig, Component("environments")] | None = None
    """Environment that scores responses. Unset: pass ``reward_fn`` to ``fit``."""
    validation: Annotated[RolloutValidationConfig, RESUMABLE] = Field(default_factory=RolloutValidationConfig)
    """Held-out evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _take_sampling_from_data(cls, given: Any) -> Any:
        """``data.sampling`` is ``prompt_sampling``: how a run samples its data is not the dataset's to know."""
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, Mapping) or "sampling" not in data or given.get("prompt_sampling") is not None:
            return given
        rest = {key: value for key, value in data.items() if key != "sampling"}
        return {**given, "data": rest, "prompt_sampling": data["sampling"]}

    @model_validator(mode="before")
    @classmethod
    def _name_generation(cls, data: Any) -> Any:
        # A default built by its factory would lose its path in error messages.
        return {"generation": {}, **data} if isinstance(data, dict) else data

    @property
    def sampler(self) -> GenerationConfig:
        return self.generation

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        """The draft of the engine, where the run trains it. Algorithms that have models of their own add them."""
        from nemorl_rl.drafts.config import draft_models

        return draft_models(self.generation.backend, self.policy)

    def sampling(self, **changes: Any) -> SamplingParams:
        """How responses are drawn that the policy learns from: as ``generation`` says, and what its backend asks for.

        Args:
            changes: Fields of ``SamplingParams`` that differ from the config.
        """
        return self.generation.sampling(routes="routes" in self.policy.backend.asks_of_sampler, **changes)

    @property
    def is_linear_in_rewards(self) -> bool:
        """Advantages are linear in the rewards of a prompt, so that an expected reward may stand for one."""
        return False

    def problems(self) -> Iterator[ConfigIssue]:
        from nemorl_rl.placement.problems import placement_problems

        yield from super().problems()
        yield from self.interpreter_problems("generation", self.generation)
        if self.rollouts.on_outcome.censored is not None and not self.is_linear_in_rewards:
            yield ConfigIssue(
                "rollouts.on_outcome.censored",
                f"{self.algorithm or type(self).__name__} does more with rewards than to subtract the mean of their "
                "group, and an expected reward can take the place of a reward in means alone",
                "use rloo, dr_grpo, or grpo and its kin with normalize_std: false; or leave it out",
            )
        yield from placement_problems(self)
        yield from self._draft_problems()

    def launch_problems(self) -> Iterator[ConfigIssue]:
        yield from super().launch_problems()
        yield from self.reward_problems(self.environment, "set `environment:`, e.g. `environment: math`")

    def dry_run(self, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
        from nemorl_rl.environments.sources import as_environment
        from nemorl_rl.rollouts.rehearsal import rehearse, reward_problems

        found = list(super().dry_run(run_dir, warn))
        with boundary(f"dataset {type(self.data).__name__}"):
            row = self.data.first_row() if self.data is not None else None
        environment = as_environment(self.environment)
        if environment is not None:
            with closing(environment):
                found += reward_problems(environment, row)
                if not found:
                    rehearse(environment, row, warn)
        yield from found

    def reward_problems(self, scorer: object, fix: str) -> Iterator[ConfigIssue]:
        """Problems of scoring responses, given what scores them. Algorithms that need no rewards override
        it."""
        if scorer is None:
            yield ConfigIssue("environment", "nothing scores the responses", fix)

    def place(self) -> Placement:
        return place(self)

    def _draft_problems(self) -> Iterator[ConfigIssue]:
        """A draft that is to be trained, and an engine or an algorithm without a place for it."""
        from nemorl_rl.drafts.config import OPTION, draft_models, is_out_of_reach

        path = f"generation.backend.{OPTION}"
        if is_out_of_reach(self.generation.backend):
            what = "the engine is of another environment, which a draft that this run trains does not reach"
            yield ConfigIssue(path, what, "install its package here, or remove keep_fresh")
        if not draft_models(self.generation.backend, self.policy).keys() <= self.auxiliary_models.keys():
            what = f"{self.algorithm or type(self).__name__} names its models without those of RolloutRunConfig"
            fix = "add super().auxiliary_models to the auxiliary_models of its config, or remove keep_fresh"
            yield ConfigIssue(path, what, fix)
