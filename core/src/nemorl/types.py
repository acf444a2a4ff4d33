"""The plain data that crosses component boundaries: picklable, torch-free, ragged.

Five batch words, never mixed: a *group* is the G samples of one prompt, a *batch* one ``train_step`` of an
algorithm, a *minibatch* one optimizer step, a *microbatch* one forward/backward, a *shard* one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nemorl.media import Media

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

Message = Mapping[str, Any]
"""One chat turn: ``{"role": "system" | "user" | "assistant" | "tool", "content": …}``. The content is text, or a
list of parts, ``{"type": "text", "text": …}`` or ``{"type": "image", "image": …}``.

>>> message: Message = {"role": "user", "content": "1+1="}
"""

Row = Mapping[str, Any]
"""One dataset row. ``prompt`` (text or messages) or ``messages`` is required; ``answer`` and others are kept.

>>> row: Row = {"prompt": "1+1=", "answer": "2"}
"""

FinishReason = Literal["stop", "length"]
"""``stop``: an end-of-sequence token or stop string; ``length``: the token limit cut the response.

>>> reason: FinishReason = "stop"
"""

Outcome = Literal[
    "scored", "truncated", "policy_timeout", "environment_timeout", "infrastructure", "refused", "cancelled"
]
"""How an episode ended: with a verdict; at the token limit; late by the policy's own doing, or by the environment's; in
something that both depend on (a sandbox, an engine, a judge, a reset); with a request that was refused; given up.

>>> outcome: Outcome = "scored"
"""

BEGINNINGS, ENDINGS = frozenset({"started", "resumed"}), frozenset({"finished", "stopped", "failed"})
"""Events of a run that begin it, and that end it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task to respond to.

    >>> Prompt(index=0, text="1+1=", token_ids=(5, 6, 5, 9), answer="2").messages
    ()
    """

    index: int
    """Position within the step's batch. Groups are formed by it, never by equal text."""
    text: str
    """The text for reward functions: the last user message, or the raw prompt."""
    token_ids: tuple[int, ...]
    """The tokens for the model: chat template applied, special tokens included."""
    messages: tuple[Message, ...] = ()
    """Chat turns, empty for a raw text prompt."""
    answer: str | None = None
    """Ground truth for graders, when the dataset has one."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the dataset row, for reward functions that ask for extra ones by name."""
    media: tuple[Media, ...] = ()
    """Images and sounds in ``token_ids``, where they stand as their own ids (``nemorl.media``)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of token sampling. ``temperature=0`` is greedy.

    >>> SamplingParams(temperature=0.7, max_new_tokens=64).top_p
    1.0
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1.0 keeps all."""
    top_k: int | None = None
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; 0.0 keeps all."""
    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the model's own end-of-sequence tokens."""
    filtered_logprobs: bool = False
    """Report log-probs of what top-k and top-p left, not of all tokens (capability ``filtered_logprobs``)."""
    prompt_logprobs: bool = False
    """Report log-probs of the prompt's tokens too (capability ``prompt_logprobs``)."""
    routes: bool = False
    """Report the experts that each token went to (capability ``routes``)."""
    json_schema: str | None = None
    """A JSON schema, as text, that responses satisfy; log-probs are of what it allows (capability ``constrained``)."""
    ignore_eos: bool = False
    """The model's own end-of-sequence tokens end nothing: without other stops a response has ``max_new_tokens``."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue ``len(seeds)`` times; the engine computes its prefix once.

    >>> two_samples = GenerationRequest((5, 6), SamplingParams(), seeds=(1, 2))
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...] = (0,)
    """One 64-bit seed per sample. Same seed, weights and batch: same tokens."""
    goes_on: bool = False
    """A prompt that begins with this one and a response to it may follow: an engine may keep what it computed."""
    version: int | None = None
    """Of the weights, where an engine holds several (capability ``snapshots``). Unset: always the newest it has."""
    media: tuple[Media, ...] = ()
    """Those that stand in ``token_ids`` (capability ``media``)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response: its tokens without the prompt's, the stop token included. Tuples of numbers may be arrays
    that are used like tuples (``nemorl_tensors.numbers``), here and in samples.

    >>> Completion((7, 2), (-0.5, -0.1), "stop", weight_versions=(3, 4)).weight_version
    4
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Per token, float32 nats, of ``softmax(logits / temperature)`` over the whole vocabulary (temperature 1 when
    greedy): the quantity that training recomputes. Truncation by top-p, top-k or min-p does not renormalise it."""
    finish_reason: FinishReason
    weight_versions: tuple[int, ...] = (0,)
    """The weights that produced it, as numbered by ``update_weights``, in order: several where an update came while
    it was being generated."""
    version_starts: tuple[int, ...] = (0,)
    """Place of the first token of each of ``weight_versions``."""
    prompt_logprobs: tuple[float, ...] = ()
    """Where asked for: per prompt token, float32 nats of ``softmax(logits)``, 0.0 for the first and for media."""
    routes: NDArray[numpy.int16] | None = field(default=None, compare=False)
    """Where asked for: [T, L, K] the K experts of each token of prompt and response in each of L layers of experts, in
    the order of the router; -1 where the model computed none, as of the last token."""

    @property
    def weight_version(self) -> int:
        """The newest of them."""
        return self.weight_versions[-1]


@dataclass(frozen=True, slots=True)
class Score:
    """An environment's judgement of one response.

    >>> Score(0.5, components={"correct": 1.0, "format": -0.5}, correct=True).valid
    True
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward (several objectives), when there is more than one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Extra numbers to average and log, e.g. ``{"grader_timeout": 1.0}``."""
    correct: bool | None = None
    """The answer is right, or wrong. ``None``: the reward itself counts as accuracy."""
    answer: str | None = None
    """The answer found in the response, in a form that is equal for equal answers, for majority votes. ``None``: none
    was found, or the environment looks for none."""
    valid: bool = True
    """False: the environment could not judge the response, which is not its fault (a grader that is down). It trains
    nothing and counts in no baseline, whatever the reward."""
    turn_rewards: tuple[float, ...] = ()
    """Of an agent's episode: what each answer of the policy earned, in the order of its calls. Part of ``reward``."""
    outcome: Outcome = "scored"
    """How the episode ended. ``rollouts.on_outcome`` says what is learnt from each."""
    cause: str = ""
    """Who or what failed, where something did, e.g. ``reset: ConnectionError: node3 refused``."""
    feedback: str = ""
    """What there is to say of the response, for algorithms that learn from text: a failed test, a judge's reasons."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's side of one turn of an episode.

    >>> Step(Score(0.0), observation="Too low. Guess again.", done=False).score.reward
    0.0
    """

    score: Score
    """Of this turn; rewards of an episode add up."""
    observation: str | Sequence[Mapping[str, Any]] | None = None
    """What the policy reads next: text, or parts as in a message; ``None`` ends the episode."""
    done: bool = True


@dataclass(frozen=True, slots=True)
class Branch:
    """A further token sequence of an episode, with the fields of :class:`Sample`.

    >>> Branch((5, 7), (False, True), (0.0, -0.5)).token_ids
    (5, 7)
    """

    token_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    generation_logprobs: tuple[float, ...]
    turn_rewards: tuple[tuple[int, float], ...] = ()
    version_runs: tuple[tuple[int, int], ...] = ()
    routes: NDArray[numpy.int16] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored episode, ready to train on. Token fields have equal length T.

    A two-turn episode: ``token_ids = P0 A0 E1 A1`` (prompt, answer, environment text, answer) with
    ``response_mask`` True on A0 and A1 only. An agent that forks, or rewrites its history, leaves ``branches`` too.

    >>> sample = Sample(Prompt(0, "1+1=", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "2", "stop")
    >>> sample.response_tokens, sample.truncated
    (1, False)
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    """[T] every token in order, exactly as sampled or observed; nothing is re-tokenised."""
    response_mask: tuple[bool, ...]
    """[T] True where the policy chose the token."""
    generation_logprobs: tuple[float, ...]
    """[T] the sampler's log-probs, 0.0 where ``response_mask`` is False."""
    score: Score
    response: str
    """Decoded last response, for people and logs."""
    finish_reason: FinishReason
    turns: int = 1
    weight_versions: tuple[int, ...] = (0,)
    """Weights that produced its tokens, oldest first, over all turns."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Where the environment scored turns: the place of a turn's last token, and what the turn earned."""
    branches: tuple[Branch, ...] = ()
    """Its other token sequences. All share its reward and its advantage, and together its weight in the loss. No token
    that the policy chose is True in two of them."""
    media: tuple[Media, ...] = ()
    """Images and sounds in any of its sequences."""
    version_runs: tuple[tuple[int, int], ...] = ()
    """Where several weights produced its tokens: the place from which tokens come from a version, and the version, in
    order. Empty: all tokens come from the oldest of ``weight_versions``."""
    routes: NDArray[numpy.int16] | None = field(default=None, compare=False)
    """[T, L, K] the experts that each token went to when it was first computed, as in :class:`Completion`."""

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """Each token sequence of the episode as a sample of its own."""
        others = (
            replace(
                self,
                token_ids=branch.token_ids,
                response_mask=branch.response_mask,
                generation_logprobs=branch.generation_logprobs,
                turn_rewards=branch.turn_rewards,
                version_runs=branch.version_runs,
                routes=branch.routes,
                branches=(),
            )
            for branch in self.branches
        )
        return (replace(self, branches=()), *others) if self.branches else (self,)

    @property
    def token_versions(self) -> tuple[int, ...]:
        """[T] the weights that each token was sampled from, as far as the policy chose it.

        >>> two = Sample(Prompt(0, "1+1=", (5,)), (5, 7, 2), (False, True, True), (0.0, -0.5, -0.1), Score(1.0), "2",
        ...              "stop", weight_versions=(3, 4), version_runs=((1, 3), (2, 4)))
        >>> two.token_versions
        (3, 3, 4)
        """
        versions = [min(self.weight_versions, default=0)] * len(self.token_ids)
        for start, version in self.version_runs:
            versions[start:] = [version] * (len(versions) - start)
        return tuple(versions)

    @property
    def reward(self) -> float:
        return self.score.reward

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy chose, in all sequences."""
        return self.response_mask.count(True) + sum(branch.response_mask.count(True) for branch in self.branches)

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids) + sum(len(branch.token_ids) for branch in self.branches)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class Samples(Sequence[Sample]):
    """The samples of one batch, one per episode, groups contiguous and in prompt order.

    >>> one = Sample(Prompt(3, "1+1=", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "2", "stop")
    >>> Samples([one, one]).group_ids
    [3, 3]
    """

    def __init__(self, items: Sequence[Sample]) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        picked = self._items[index]
        return Samples(picked) if isinstance(index, slice) else picked

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._items)

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self._items]

    @property
    def group_ids(self) -> list[int]:
        """Prompt index of each sample."""
        return [sample.prompt.index for sample in self._items]

    @property
    def sequences(self) -> Samples:
        """One per token sequence, those of an episode together: what a batch of tensors is made of, in its order."""
        return Samples([part for sample in self._items for part in sample.sequences])
