"""Questions to servers before a run has weights to give: what they offer, which way it takes, and whether they fit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemorl.errors import DeadlineError, NemorlError
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors.engines.model_config import read_model_config

from nemorl_agents.servers.checks import Identity, require_sampling
from nemorl_agents.servers.connection import GoneError
from nemorl_agents.servers.dialects import dialect
from nemorl_agents.servers.server import Server
from nemorl_agents.servers.ways import Way, chosen_way

if TYPE_CHECKING:
    from nemorl_rl.config import RolloutRunConfig

    from nemorl_agents.servers.config import ServerConfig


LOOK_S = 1.0
"""Between two looks at servers none of which answers."""


async def look(options: ServerConfig, identity: Identity, urls: Sequence[str], device: str) -> tuple[Way, str]:
    """The way in which the run gives weights, and why. Servers are asked where the config leaves it open.

    Raises:
        BackendError: A server does not fit, or there is no way.
        DeadlineError: No server came in time.
    """
    spoken = dialect(options.engine)
    if options.weights != "auto" or options.weights_folder is not None:
        return chosen_way(options, spoken, {}, device)
    servers = [Server(url, options, identity, device) for url in urls]
    end, is_told = time.monotonic() + options.reconnect_timeout_s, False
    try:
        while True:
            absent = [found for found in await asyncio.gather(*map(_absence, servers)) if found is not None]
            offers = {server.url: server.facts for server in servers if server.facts is not None}
            if offers:
                return chosen_way(options, spoken, offers, device)
            if time.monotonic() >= end:
                raise nobody_came(options, "; ".join(absent), f"It is started with: {servers[0].command}")
            if not is_told:
                is_told = True
                told_waiting(options, "; ".join(absent))
            await asyncio.sleep(min(LOOK_S, max(0.0, end - time.monotonic())))
    finally:
        for server in servers:
            await server.connection.close()


async def _absence(server: Server) -> str | None:
    """Why a server is not there; ``None``: it is, and fits."""
    try:
        await server.check()
    except GoneError as error:
        return f"{server.url} is lost: {error}"
    return None


def told_waiting(options: ServerConfig, account: str) -> None:
    """Say that no server is there, and how long that may last."""
    text = "%s; waiting for a server, %g s at most (generation.backend.reconnect_timeout_s)"
    logging.getLogger(__name__).warning(text, account, options.reconnect_timeout_s)


def nobody_came(options: ServerConfig, account: str, command: str) -> DeadlineError:
    """The error of a run without any server.

    Args:
        options: How long it waited.
        account: What became of each.
        command: What starts one.
    """
    return DeadlineError(
        f"generation waited {options.reconnect_timeout_s:g} s for a server: {account}",
        fix="start one (`nemorl engines add RUN URL` names another address), or raise "
        f"generation.backend.reconnect_timeout_s. {command}",
    )


QUICK_S = 20.0
"""Longest wait for one answer here."""


async def rehearse(config: RolloutRunConfig, options: ServerConfig) -> dict[str, NemorlError | str | None]:
    """For each address why the server there does not fit (an error) or does not answer (a text); ``None``: it fits."""
    policy = config.policy
    identity = Identity(policy, read_model_config(policy), Tokenizer.of(policy), config.generation.sampling())
    quick = options.model_copy(update={"timeout_s": min(QUICK_S, options.timeout_s)})
    found: dict[str, NemorlError | str | None] = {}
    for url in options.urls:
        found[url] = None
        try:
            server = Server(url, quick, identity, config.cluster.device)
        except NemorlError as error:
            found[url] = error
            continue
        try:
            await server.check()
            assert server.facts is not None, "it was checked"
            if config.validation.every or config.validation.at_end:
                require_sampling(server.facts, config.validation.sampling(config.generation), url)
        except GoneError as error:
            found[url] = str(error)
        except NemorlError as error:
            found[url] = error
        finally:
            await server.connection.close()
    return found
