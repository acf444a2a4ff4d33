"""EpisodeGateway: how a program reaches the policy of its episode over HTTP.

An environment that starts programs asks for a gateway, a package that has a server offers one: through the name
``episode_gateway`` in the entry-point group ``nemorl.names``, so that neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nemorl.errors import PluginError
from nemorl.plugins import offered

from nemorl_rl.agents.contract import EpisodePolicy

NAME = "episode_gateway"


@dataclass(frozen=True, slots=True)
class Access:
    """Where one episode's program calls the policy, and its key.

    >>> Access("http://127.0.0.1:8000", "k").openai_base_url
    'http://127.0.0.1:8000/v1'
    """

    base_url: str
    """Without ``/v1``: what clients of Anthropic expect."""
    api_key: str = field(repr=False)
    """Names the episode and lets nobody else in."""

    @property
    def openai_base_url(self) -> str:
        """What clients of OpenAI expect."""
        return f"{self.base_url}/v1"


class EpisodeGateway(Protocol):
    """A server for the episodes of one environment, ready when it exists. Its methods may be called from any thread.

    >>> access = gateway.open(policy)  # doctest: +SKIP
    """

    def open(self, policy: EpisodePolicy) -> Access:
        """From now on calls with this key are answered by ``policy``."""
        ...

    def close(self, access: Access) -> None:
        """Calls with this key are refused from now on. Twice is harmless."""
        ...

    def shutdown(self) -> None:
        """End the server."""
        ...


def start_gateway() -> EpisodeGateway:
    """A gateway of the installed package that offers one.

    Raises:
        PluginError: No package does.

    >>> start_gateway()  # doctest: +SKIP
    """
    factory = offered(NAME)
    if factory is None:
        raise PluginError(
            "no installed package lets programs call the policy over HTTP", fix="pip install nemorl-gateway"
        )
    gateway: EpisodeGateway = factory()
    return gateway
