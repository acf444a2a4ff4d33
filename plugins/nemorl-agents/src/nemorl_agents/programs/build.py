"""From options to an environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from nemorl.contracts.environment import Environment
from nemorl.media import MediaKind
from nemorl_rl.agents.gateways import EpisodeGateway, start_gateway
from nemorl_rl.environments.references import load_function
from nemorl_rl.environments.sources import as_environment

from nemorl_agents.programs.config import CHAT_LOOP, AgentConfig, ToolsConfig
from nemorl_agents.programs.coroutines import Coroutines, OpenTools, Rollout, chat_loop, parameters_of
from nemorl_agents.programs.environment import Agent, Player
from nemorl_agents.programs.judging import Judge
from nemorl_agents.programs.programs import Programs
from nemorl_agents.programs.tools import Toolbox, function_tool


def environment_of(config: AgentConfig, gateway: Callable[[], EpisodeGateway] | None = None) -> Environment:
    """The environment of a config.

    Args:
        config: Its options.
        gateway: Starts what programs call the policy by. Unset: that of the installed package, as configured.
    """
    player: Player
    if config.command:
        player = Programs(config, gateway or partial(start_gateway, config.gateway.rules))
    else:
        named = config.rollout != CHAT_LOOP
        function = load_function(config.rollout) if named else chat_loop(config.system)
        player = Coroutines(function, open_tools(config.tools))
    return _agent(player, config.reward, config)


def agent_environment(function: Rollout, reward: Any = None, **options: Any) -> Environment:
    """A coroutine ``rollout(prompt, policy)`` as an environment, which calls the policy as often as it likes.

    Args:
        function: Returns its score, or (where ``reward`` is set) its answer as text, or nothing for the last message.
        reward: Scores answers: a function, an environment, or its name.
        options: Others of the environment ``agent``: ``outcomes``, ``timeout_s``, ``tools``, ``seats``, ….

    Raises:
        UsageError: ``function`` cannot be awaited as such.

    >>> async def ask(prompt, policy):
    ...     reply = await policy.chat([{"role": "user", "content": prompt.text}])
    ...     return float(reply.text.strip() == prompt.answer)
    >>> agent_environment(ask, outcomes={"timeout": None}).drives_policy
    True
    """
    parameters_of(function)
    config = AgentConfig(rollout=f"{function.__module__}:{function.__name__}", **options)
    return _agent(Coroutines(function, open_tools(config.tools)), reward, config)


def _agent(player: Player, reward: Any, config: AgentConfig) -> Agent:
    return Agent(
        player,
        Judge(as_environment(reward), config.outcomes),
        timeout_s=config.timeout_s,
        give_up_after=config.give_up_after,
        untrained=config.seats,
    )


def open_tools(config: ToolsConfig) -> OpenTools:
    """A maker of the tools of an episode. Functions are read once, servers are started each time."""
    functions = [function_tool(load_function(reference)) for reference in config.functions]
    limits: dict[str, Any] = {"timeout_s": config.timeout_s, "max_result_chars": config.max_result_chars}

    @asynccontextmanager
    async def opened(kinds: Collection[MediaKind]) -> AsyncIterator[Toolbox]:
        if not config.mcp:
            yield Toolbox(functions, **limits, kinds=kinds)
            return
        from nemorl_agents.programs.mcp_tools import mcp_tools

        async with mcp_tools(config.mcp, config.timeout_s) as found:
            yield Toolbox([*functions, *found], **limits, kinds=kinds)

    return opened
