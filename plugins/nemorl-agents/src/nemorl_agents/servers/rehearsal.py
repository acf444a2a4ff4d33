"""Asking servers what they are, without giving them weights or work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemorl.errors import NemorlError
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors.engines.model_config import read_model_config

from nemorl_agents.servers.checks import Identity, require_sampling
from nemorl_agents.servers.connection import GoneError
from nemorl_agents.servers.server import Server

if TYPE_CHECKING:
    from nemorl_rl.config import RolloutRunConfig

    from nemorl_agents.servers.config import ServerConfig

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
