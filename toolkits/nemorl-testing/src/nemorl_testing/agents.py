"""Checks of environments that drive the policy: whatever it says, an episode ends, alone and with a finite score."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from itertools import count, repeat
from typing import Any

from nemorl.contracts.environment import as_score
from nemorl.media import Media
from nemorl.types import Completion, Prompt, Score
from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallLimitError,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeError,
    EpisodeLimits,
    ToolChoice,
)
from nemorl_rl.environments.loop_thread import LoopThread

from nemorl_testing.blocking import blocking_calls
from nemorl_testing.environments import ODD_RESPONSES, TAME_RESPONSES, TIMEOUT_S, as_prompt, build, is_finite
from nemorl_testing.kit import NotApplicable, Subject, expect

EPISODES = 8
CALLS = 16
"""Answers of a scripted episode at most."""
ENDING_S = 2.0
"""Time of a cancelled episode to end."""


class ScriptedPolicy:
    """An ``EpisodePolicy`` that says the same over and over, or one thing after the other, each character a token.

    Example:
        >>> reply = asyncio.run(ScriptedPolicy("42").chat([{"role": "user", "content": "6 * 7?"}]))
        >>> reply.text, reply.completion.token_ids
        ('42', (52, 50))
    """

    def __init__(self, says: str | Sequence[str] | None, *, calls: int = CALLS) -> None:
        """
        Args:
            says: Its answer, or its answers in turn; ``None``: it never answers.
            calls: After this many, or the last of several answers, ``CallLimitError``.
        """
        self.asked: list[Sequence[ChatMessage] | Sequence[int]] = []
        """Requests in order: messages or tokens"""
        self._says = repeat(says) if isinstance(says, str) else None if says is None else iter(says)
        self._numbers = count()
        self.episode_id, self.text = "episode of the kit", None
        self.limits = EpisodeLimits(max_sequence_tokens=1 << 20, max_new_tokens=4096, max_calls=calls, timeout_s=60.0)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        self.asked.append(messages)
        said, completion = await self._answer()
        return ChatReply({"role": "assistant", "content": said}, completion, prompt_tokens=1)

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        self.asked.append(token_ids)
        return (await self._answer())[1]

    def reward(self, value: float, completion: Completion | None = None) -> float:
        return value

    async def _answer(self) -> tuple[str, Completion]:
        if self._says is None:
            await asyncio.Event().wait()
        said = next(self._says or iter(()), None)
        if said is None or next(self._numbers) >= self.limits.max_calls:
            raise CallLimitError("the script has ended", fix="call less often")
        ids = tuple(map(ord, said))
        return said, Completion(ids, (-1.0,) * len(ids), "stop")


def check_an_agent_ends_whatever_the_policy_says(subject: Subject) -> None:
    """``rollout`` gives a finite score or None, in time, for empty, endless, broken and foreign answers. (DESIGN 5)"""
    environment = _driving(subject)
    for says in (*TAME_RESPONSES, *ODD_RESPONSES):
        score = asyncio.run(played(environment, _prompt(subject), ScriptedPolicy(says)))
        numbers = {"reward": score.reward, **score.components, **score.metrics}
        bad = [f"{name} = {value!r}" for name, value in numbers.items() if not is_finite(value)]
        expect(not bad, f"a policy that says {says[:60]!r} gets {', '.join(bad)}")


def check_episodes_of_an_agent_are_apart(subject: Subject) -> None:
    """Episodes that run at the same time score as they do alone. (DESIGN 5)"""
    environment, prompt = _driving(subject), _prompt(subject)
    says = [TAME_RESPONSES[number % len(TAME_RESPONSES)] for number in range(EPISODES)]
    alone = [asyncio.run(played(environment, prompt, ScriptedPolicy(text))) for text in says]

    async def at_once() -> list[Score]:
        return await asyncio.gather(*(played(environment, prompt, ScriptedPolicy(text)) for text in says))

    for text, one, other in zip(says, alone, asyncio.run(at_once()), strict=True):
        expect(one == other, f"a policy that says {text!r} gets {one} alone, {other} beside others")


def check_a_cancelled_agent_ends(subject: Subject) -> None:
    """An episode that is cancelled while it waits for the policy ends at once. (DESIGN 7.11)"""
    environment = _driving(subject)

    async def cancelled() -> bool:
        policy = ScriptedPolicy(None)
        task = asyncio.ensure_future(environment.rollout(_prompt(subject), policy))
        while not policy.asked and not task.done():
            await asyncio.sleep(0.01)
        if task.done():
            return True
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=ENDING_S)
        return bool(done)

    loop = LoopThread("cancelled-agent")  # asyncio.run would wait for what does not end
    ended = asyncio.run_coroutine_threadsafe(cancelled(), loop.loop).result(TIMEOUT_S)
    loop.stop()
    expect(ended, f"it was cancelled and goes on for more than {ENDING_S:g} s: re-raise CancelledError")


def check_an_agent_never_blocks(subject: Subject) -> None:
    """All episodes share an event loop: ``rollout`` awaits, and neither sleeps nor asks a server there. (DESIGN 5)"""
    environment = _driving(subject)
    with blocking_calls() as seen:
        asyncio.run(played(environment, _prompt(subject), ScriptedPolicy(TAME_RESPONSES[0])))
    expect(not seen, f"it calls {', '.join(sorted(seen))} on the event loop: await, or asyncio.to_thread")


def _driving(subject: Subject) -> Any:
    environment = build(subject)
    if not environment.drives_policy:
        raise NotApplicable("it answers the policy, and does not drive it")
    return environment


def _prompt(subject: Subject) -> Prompt:
    return as_prompt(next((given for given, *_ in subject.settings.examples), {"text": "1+1=", "answer": "2"}))


async def played(environment: Any, prompt: Prompt, policy: ScriptedPolicy) -> Score:
    """The score of one episode."""
    playing: Coroutine[Any, Any, float | Score | None] = environment.rollout(prompt, policy)
    try:
        result = await asyncio.wait_for(playing, TIMEOUT_S)
    except EpisodeError:
        return Score(0.0)
    return Score(0.0, valid=False) if result is None else as_score(result, owner=environment.owner)
