"""The options of the ``judge`` environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, FileName, Options, SecretVariable, ServedModel, ServerURL
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment

DEFAULT_RUBRIC = """\
Is the response correct and complete, and does it do what the task asks? Where there is a reference answer, the final \
answer of the response must mean the same. Length, confidence and style count for nothing."""
RESERVED = ("model", "messages", "temperature", "max_tokens", "response_format", "stream", "n")
"""Parameters of a request that have a field of their own, or that nothing else would work with."""

_TOKENS, _SERVICE = "Tokens of the judge", "Judge without a verdict"


class JudgeConfig(EnvironmentConfig):
    """A language model behind an OpenAI-compatible server grades each response by a rubric.

    Its score, from ``lowest`` to ``highest``, becomes a reward from 0 to 1. A response that it could not grade is left
    out of training, and counts in ``environment_error``.
    """

    summary: ClassVar[str] = "a language model grades responses by a rubric"
    requires_modules: ClassVar[tuple[str, ...]] = ("openai",)
    install_hint: ClassVar[str] = 'pip install "nemorl-tasks[judge]"'
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/judge_prompt_tokens": MetricInfo(
            _TOKENS, "per response", "tokens that the judge read; 0 where the verdict was cached"
        ),
        "train/environment/judge_completion_tokens": MetricInfo(
            _TOKENS, "per response", "tokens that the judge wrote; 0 where the verdict was cached"
        ),
        "train/environment/judge_cost": MetricInfo(
            "Cost of the judge", "per response", "by `prompt_price` and `completion_price`, in their currency"
        ),
        "train/environment/judge_cached": MetricInfo(
            "Cached verdicts", "share", "share of responses whose verdict came from `cache`"
        ),
        "train/environment/judge_retries": MetricInfo(
            "Retries of the judge", "per response", "requests that were sent again", "growth: the server is overloaded"
        ),
        "train/environment/judge_no_verdict": MetricInfo(
            _SERVICE,
            "share",
            "share of responses to which the judge replied without a verdict in the form asked for",
            "above a percent: raise `max_tokens`, try `verdict: json`, or a stronger judge",
        ),
        "train/environment/environment_error": MetricInfo(
            _SERVICE, "share", "share of responses that got no reply before the deadline", "anything that stays above 0"
        ),
        "train/environment/judge_too_long": MetricInfo(
            _SERVICE, "share", "share of responses longer than `max_response_chars`, which score lowest unread"
        ),
    }

    url: ServerURL = Field(pattern=r"^https?://")
    """Address of the server up to the version, e.g. ``http://localhost:8000/v1``."""
    plaintext: Annotated[bool, RESUMABLE] = False
    """Let tasks, responses and the key go to another machine over ``http`` all the same."""
    model: ServedModel = Field(min_length=1)
    """The judge's name on that server."""
    rubric: str = DEFAULT_RUBRIC
    """The marks of a good response, in words for the judge: criteria, and what the scores mean."""
    lowest: float = Field(0.0, allow_inf_nan=False)
    """Score of the worst response; it becomes reward 0."""
    highest: float = Field(10.0, allow_inf_nan=False)
    """Score of the best response; it becomes reward 1."""
    correct_from: float | None = Field(None, allow_inf_nan=False)
    """Responses with this score or more count as correct. Unset: the reward is the accuracy."""
    verdict: Literal["line", "json"] = "line"
    """How the judge gives its score. ``line``: reasons, then a last line that only it can write, on any server.
    ``json``: structured output (``response_format: json_schema``), for servers that enforce it."""
    show_answer: bool = True
    """Show the judge the row's ``answer`` as a reference, where there is one."""
    columns: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()
    """Further columns of the row to show, each under its name, e.g. a rubric of its own for each task."""
    ignore_thinking: bool = True
    """Show what follows the last ``</think>`` of a response, not the reasoning before it."""
    max_response_chars: int = Field(50_000, ge=1)
    """Longer responses get the lowest score without being read: no judge has room for an endless one."""
    no_verdict: Literal["invalid", "lowest"] = "invalid"
    """The score of a response to which the judge replies without a verdict. ``invalid``: nothing, it trains nothing.
    ``lowest``: the lowest score, where the policy has learnt to confuse the judge (see ``judge_no_verdict``)."""
    temperature: float | None = Field(0.0, ge=0)
    """Of the judge. ``null`` for servers that refuse the parameter."""
    max_tokens: int | None = Field(1024, ge=1)
    """Longest reply in tokens. ``null``: the server's limit; raise it for judges that think."""
    options: Options = Field(default_factory=dict)
    """More parameters of the request, such as ``{seed: 0}`` or what the server takes beyond OpenAI's."""
    api_key_env: SecretVariable = "OPENAI_API_KEY"
    """Environment variable that holds the key; a server without keys needs none. The key itself is in no config."""
    deadline_s: float = Field(45.0, gt=0)
    """Seconds for one verdict, waiting and retries included. Keep it below ``rollouts.environment_timeout_s``, after
    which a response scores 0 instead of being left out."""
    retries: Annotated[int, RESUMABLE] = Field(5, ge=0)
    """Times that a request is sent again after a failure that may pass (429, 5xx, no connection), each after a longer
    pause or the one that the server asks for."""
    concurrency: Annotated[int, RESUMABLE] = Field(16, ge=1)
    """Requests at a time. ``rollouts.environment_concurrency`` limits them as well."""
    cache: Annotated[FileName | None, RESUMABLE] = None
    """File that keeps verdicts, by model, rubric, task, response and the other options that a verdict depends on. Set
    it: a continued run then pays for none twice."""
    prompt_price: float = Field(0.0, ge=0)
    """Price of a million tokens read, for ``judge_cost``."""
    completion_price: float = Field(0.0, ge=0)
    """Price of a million tokens written, for ``judge_cost``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.lowest >= self.highest:
            yield ConfigIssue("highest", f"{self.highest:g} is not above lowest = {self.lowest:g}", "widen the scale")
        elif self.correct_from is not None and not self.lowest < self.correct_from <= self.highest:
            scale = f"{self.lowest:g} to {self.highest:g}"
            yield ConfigIssue(
                "correct_from", f"{self.correct_from:g} does not split the scale {scale}", "give a score on it"
            )
        if not self.rubric.strip():
            yield ConfigIssue("rubric", "is empty", "say what makes a response good, or leave it out")
        if not self.plaintext and (problem := plaintext_problem(self.url)) is not None:
            yield ConfigIssue("url", *problem)
        if self.url.rstrip("/").endswith("/chat/completions"):
            yield ConfigIssue("url", "names one method of the server", "leave out /chat/completions")
        for name in sorted(self.options.keys() & set(RESERVED)):
            yield ConfigIssue(f"options.{name}", "is set by this environment", "use its own field, or leave it out")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            yield ConfigIssue(
                "api_key_env", "is no name of an environment variable", "name the variable that holds the key"
            )

    def build(self) -> Environment:
        from nemorl_tasks.environments.judge.environment import Judge

        return Judge(self)
