"""NeMo-Gym: episodes played by its agent servers, by their own ``/run``, with our gateway as their model server.

Gym's servers stay as they are. They know one model server, whose address is the relay's; each request of ours names its
episode in the request's ``metadata`` and as ``_ng_rollout_id``, one of which comes back with every call of the model.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError, UsageError
from nemorl.media import Media
from nemorl.types import Prompt, Score
from nemorl_media.decoding import data_url
from nemorl_rl.agents.gateways import Access
from nemorl_rl.agents.watched import WatchedPolicy
from nemorl_rl.environments.loop_thread import LoopThread
from nemorl_rl.serving.http_clients import http_client
from nemorl_trust.front_door import FrontDoor, Limits

from nemorl_agents.interop.episodes_config import GYM_COLUMN as COLUMN
from nemorl_agents.interop.episodes_config import GYM_PARAMS as PARAMS
from nemorl_agents.interop.gym_servers import GymServers, agents_at
from nemorl_agents.interop.played import Played, PlayedEpisodes, usable
from nemorl_agents.interop.workers.relay import METADATA_KEY, Relay, Route

if TYPE_CHECKING:
    from nemorl_agents.interop.episodes_config import NemoGymConfig

ROLLOUT_ID = "_ng_rollout_id"
COMPONENTS = "reward_components"
NOT_METRICS = frozenset(("reward", "response", PARAMS, "mask_sample", COMPONENTS))
MODEL = "policy"
DOWN = "environment_error"
"""The metric that the circuit breaker of rollouts takes for a time-out."""
START_S = 30.0
SHOWN = 600
"""Characters of an answer, in an error."""


class NemoGym(PlayedEpisodes):
    """Episodes on Gym's servers."""

    name = "nemo_gym"

    def __init__(self, config: NemoGymConfig) -> None:
        fix = f"start Gym with +policy_base_url=http://127.0.0.1:{config.model_port or 'PORT'}/v1 and an openai_model"
        super().__init__(config, fix=fix)
        self._config = config
        self._loop: LoopThread | None = None
        self._relay = Relay(MODEL, FrontDoor("the relay of model calls", Limits()))
        self._client: httpx2.AsyncClient | None = None
        self._servers: GymServers | None = None
        self._agents: Mapping[str, str] = {}

    def begin(self) -> None:
        if self._agents:
            return
        if self._loop is None:
            self._loop = LoopThread("nemo-gym")
            asyncio.run_coroutine_threadsafe(self._open(), self._loop.loop).result(START_S)
        if self._config.start is not None and self._servers is None:
            self._servers = GymServers(self._config.start, self._relay.base_url, MODEL)
        self._agents = self._config.agents or agents_at(
            self._config.head_url if self._servers is None else self._servers.head_url
        )

    async def _open(self) -> None:
        try:
            await self._relay.start(self._config.model_port or 0)
        except OSError as error:
            raise UsageError(
                f"port {self._config.model_port}, where Gym calls the policy, cannot be listened on: {error}",
                fix="set environment.model_port to a free one, and Gym's policy_base_url accordingly",
            ) from error
        self._client = http_client(timeout_s=None)  # an episode has a deadline of its own

    async def play(self, prompt: Prompt, policy: WatchedPolicy, access: Access) -> Played:
        row = prompt.row.get(COLUMN)
        if not isinstance(row, Mapping) or not isinstance(row.get(PARAMS), Mapping):
            raise DataError(
                f"prompt {prompt.text[:60]!r} holds no task of NeMo-Gym",
                fix="use `data: {name: nemo_gym, path: rows.jsonl}`",
            )
        name = secrets.token_hex(16)
        url = f"{self._address(row)}/run"
        assert self._loop is not None  # begin came before
        self._relay.routes[name] = Route(access.base_url, access.api_key)
        try:
            running = asyncio.run_coroutine_threadsafe(self._run(url, request_of(row, name)), self._loop.loop)
            status, text = await asyncio.wrap_future(running)
        except httpx2.HTTPError as error:
            if self._servers is not None:
                self._servers.require_alive()
            problem = f"the agent server at {url} does not answer: {type(error).__name__}: {error}"
            return Played(problem=problem, metrics={DOWN: 1.0})
        finally:
            del self._relay.routes[name]
        if status != 200:
            return Played(problem=f"the agent server at {url} answers {status}: {text[:SHOWN]}", metrics={DOWN: 0.0})
        found = played(text, row)
        return replace(found, metrics={**found.metrics, DOWN: 0.0})

    async def _run(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        assert self._client is not None
        text = json.dumps(body, default=url_of)  # a row may hold NaN, which Python's servers read
        answer = await self._client.post(url, content=text, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.text

    def _address(self, row: Mapping[str, Any]) -> str:
        given = row.get("agent_ref")
        name = given.get("name") if isinstance(given, Mapping) else None
        name = self._config.agent or name
        if name is None:
            raise DataError("a row of NeMo-Gym names no agent", fix="give it agent_ref, or set environment.agent")
        if name not in self._agents:
            fix = did_you_mean(name, self._agents) or f"use one of {', '.join(self._agents)}"
            raise DataError(f"NeMo-Gym runs no agent {name!r}", fix=fix)
        return self._agents[name]

    def end(self) -> None:
        self._agents = {}
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._shut(), loop.loop).result(START_S)
            loop.stop()

    async def _shut(self) -> None:
        await self._relay.stop()
        if self._client is not None:
            await self._client.aclose()


def request_of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The body of ``/run``: the row, and which episode it is."""
    params = row[PARAMS]
    metadata = {**(params.get("metadata") or {}), METADATA_KEY: name}
    return {**row, PARAMS: {**params, "metadata": metadata}, ROLLOUT_ID: name}


def url_of(value: object) -> str:
    """An image or a sound in JSON.

    Raises:
        TypeError: It is neither, and JSON has no word for it.
    """
    if isinstance(value, Media):
        return data_url(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent as JSON")


def played(text: str, row: Mapping[str, Any]) -> Played:
    """The episode that an agent server's answer tells of."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if not isinstance(told, Mapping):
        return Played(problem=f"the agent server answers {text[:SHOWN]!r}, and no JSON object")
    if "reward" not in told:
        return Played(problem=f"the agent server's answer has no reward; it has {', '.join(sorted(told))[:SHOWN]}")
    reward, problem = usable(told["reward"], "the reward of NeMo-Gym")
    if reward is None:
        return Played(problem=problem)
    metrics = {
        key: number
        for key, value in told.items()
        if key not in NOT_METRICS and key not in row and not key.startswith("_")
        if (number := usable(value, key)[0]) is not None
    }
    parts, problem = _components(told.get(COMPONENTS) or {})
    if problem:
        return Played(problem=problem)
    return Played(Score(reward, parts, metrics=metrics, valid=not told.get("mask_sample")))


def _components(told: object) -> tuple[dict[str, float], str]:
    """The parts of a reward by name, as a verifier of several rewards tells them, or what is wrong with them."""
    if not isinstance(told, Mapping):
        return {}, f"{COMPONENTS} of NeMo-Gym is {told!r:.60}, and no mapping"
    found = {str(name): usable(value, f"the reward {name} of NeMo-Gym") for name, value in told.items()}
    problem = next((problem for value, problem in found.values() if value is None), "")
    return {name: value for name, (value, _) in found.items() if value is not None}, problem
