"""The arguments of ``Environment.rollout``, and the errors that its calls may raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nemorl.errors import UsageError
from nemorl.media import Media
from nemorl.types import Completion

if TYPE_CHECKING:
    from nemorl_rl.chat.text import TextCoder

ChatMessage = Mapping[str, Any]
"""A message as OpenAI's chat completions write it: ``role``, ``content`` (text, parts or ``None``), ``tool_calls``,
``tool_call_id``, ``name``, ``reasoning_content``.

>>> asked: ChatMessage = {"role": "user", "content": "2 + 2?"}
"""

ToolChoice = Literal["auto", "none", "required"] | str
"""``required`` and the name of one tool cannot be enforced while sampling: they are treated as ``auto``, and answers
that do otherwise are counted (``ChatReply.broke_tool_choice``).

>>> choice: ToolChoice = "auto"
"""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How one call of the policy is answered. What is unset is as the run samples.

    >>> CallOptions(max_new_tokens=64, stop=("Observation:",)).temperature is None
    True
    """

    max_new_tokens: int | None = None
    """At most; the run's own limit and the room in the context bound it too."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, beside the run's own."""
    seed: int | None = None
    """Unset: from the episode's seed and the number of the call."""
    temperature: float | None = None
    """Another one than the run's is honoured in evaluation and serving. In training it is the run's, as log-probs are
    taken at one temperature. So are the two below."""
    top_p: float | None = None
    top_k: int | None = None
    seat: str = ""
    """Who asks, where the policy plays several roles (``nemorl_rl.agents.seats``): ``ROLE`` or ``ROLE/NUMBER``."""
    is_trained: bool = True
    """False: what is answered is context, and nothing is learnt from it."""
    json_schema: str | None = None
    """Schema, as JSON, that the answer satisfies; no tool can be called by it. Where the engine can constrain sampling
    (capability ``constrained``). Its tokens were not chosen freely: in training they are context, like the prompt."""
    template_options: str | None = None
    """Variables of the chat template, as a JSON object, over those of the run: ``{"enable_thinking": false}``. One
    that the template does not read changes nothing. Calls with other ones are another conversation: answers of one are
    not recognised in the other."""


AS_THE_RUN = CallOptions()
"""Nothing differs.

>>> AS_THE_RUN.stop
()
"""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The policy's answer to a chat.

    >>> completion = Completion((7, 2), (-0.5, -0.1), "stop")
    >>> ChatReply({"role": "assistant", "content": "4"}, completion, prompt_tokens=12).text
    '4'
    """

    message: ChatMessage
    """To be appended to the history as it is: ``content``, ``reasoning_content`` and ``tool_calls`` where there are
    any. Ids of tool calls are minted here and unique: by them the turn is recognised when it comes back."""
    completion: Completion
    """The tokens as sampled, special ones included."""
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    malformed_tool_calls: int = 0
    """Tool calls in the text that could not be read; they stay in ``content``."""
    broke_tool_choice: bool = False
    """A tool was required and none was called, or one was called that was not to be."""

    @property
    def text(self) -> str:
        return str(self.message.get("content") or "")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The bounds of one episode.

    >>> EpisodeLimits(max_sequence_tokens=4096, max_new_tokens=512, max_calls=20, timeout_s=600.0).max_calls
    20
    """

    max_sequence_tokens: int
    """Longest prompt and answer together."""
    max_new_tokens: int
    """Longest answer."""
    max_calls: int
    """Answers at most."""
    timeout_s: float
    """Of the whole episode, generation included."""


class EpisodePolicy(Protocol):
    """The policy as one episode may use it. Calls may run at the same time, and from any event loop.

    >>> class Once(Environment):
    ...     async def rollout(self, prompt, policy):
    ...         reply = await policy.chat([{"role": "user", "content": prompt.text}])
    ...         return float(reply.text == prompt.answer)
    """

    @property
    def episode_id(self) -> str:
        """Unique within a run."""
        ...

    @property
    def limits(self) -> EpisodeLimits: ...

    @property
    def text(self) -> TextCoder | None:
        """Text to tokens of its model and back; ``None`` where it has no tokenizer."""
        ...

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        """The policy's next message.

        Args:
            messages: The whole history. Earlier replies are recognised, and go on as the tokens that were sampled.
            tools: As OpenAI's chat completions write them: ``{"type": "function", "function": {…}}``.
            tool_choice: Whether tools may, must or must not be called.
            options: What differs from the run's sampling.

        Raises:
            ConstraintError: The engine cannot constrain sampling to ``json_schema``.
            ContextOverflowError: There is no room for an answer.
            CallLimitError: The episode has had its answers.
            EpisodeClosedError: The episode has ended.
        """
        ...

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        """Continue these tokens, in which these images and sounds stand; raises as ``chat`` does."""
        ...

    def reward(self, value: float, completion: Completion | None = None) -> float:
        """Give one answer a reward of its own, beside the score of the episode, to which it is added.

        Args:
            value: Finite. Rewards of one answer add up.
            completion: The answer, the very object that a call returned. Unset: the newest one.

        Returns:
            The rewards that this answer has by now.

        Raises:
            UsageError: There is no such answer, or the sum is not finite.
            EpisodeClosedError: The episode has ended.
        """
        ...


class PassedOnPolicy:
    """The part of an ``EpisodePolicy`` that one which stands before another leaves to it.

    >>> class Quiet(PassedOnPolicy):  # whoever is behind it is given no rewards
    ...     def reward(self, value, completion=None):
    ...         return value
    """

    def __init__(self, policy: EpisodePolicy) -> None:
        self._policy = policy

    @property
    def episode_id(self) -> str:
        return self._policy.episode_id

    @property
    def limits(self) -> EpisodeLimits:
        return self._policy.limits

    @property
    def text(self) -> TextCoder | None:
        return self._policy.text

    def reward(self, value: float, completion: Completion | None = None) -> float:
        return self._policy.reward(value, completion)


class EpisodeError(UsageError):
    """A call that an episode may not make. An environment that lets it through ends its episode with reward 0.

    >>> issubclass(CallLimitError, EpisodeError)
    True
    """


class ContextOverflowError(EpisodeError):
    """The prompt leaves no room for an answer.

    >>> ContextOverflowError(prompt_tokens=70, limit=64).limit
    64
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, prompt and answer may have {limit} together",
            fix="shorten the history, or raise policy.max_sequence_tokens",
        )
        self.prompt_tokens, self.limit = prompt_tokens, limit


class CallLimitError(EpisodeError):
    """The episode has called the policy as often as it may.

    >>> issubclass(CallLimitError, EpisodeError)
    True
    """


class EpisodeClosedError(EpisodeError):
    """The episode has ended: what is asked now would be in no sample.

    >>> issubclass(EpisodeClosedError, EpisodeError)
    True
    """


CONSTRAINED = "constrained"
"""The capability of engines that sample within ``SamplingParams.json_schema``."""
REMEDY = (
    "generate with vLLM (generation.backend: vllm), or describe the format in the prompt and leave the field out, by"
    " the agent or by environment.gateway.ignored_fields"
)


class ConstraintError(UsageError):
    """The engine cannot constrain its sampling to a schema.

    Example:
        >>> issubclass(ConstraintError, ValueError)
        True
    """
