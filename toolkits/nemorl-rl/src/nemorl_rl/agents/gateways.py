"""EpisodeGateway: how a program reaches the policy of its episode over HTTP.

An environment that starts programs asks for a gateway, and a package that has a server offers one: under the name
``Gateway`` in the entry-point group ``nemorl.names``. So neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from nemorl.config import RESUMABLE, Config, PlainText
from nemorl.errors import PluginError
from nemorl.plugins import registry
from pydantic import Field

from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.slots import GATEWAY

MIB = 2**20
MAX_BODY_BYTES = 32 * MIB
"""Of a request, where nothing else is said: some 80 screenshots of 300 KB as base64, or 8 million tokens of text.

>>> MAX_BODY_BYTES
33554432
"""


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """Rules for the requests of agents.

    >>> GatewayRules(models=("gpt-4o-mini",)).ignored_fields
    ()
    """

    models: tuple[str, ...] = ("policy",)
    """Names of models that are answered, beside ``policy``; ``*`` stands for any characters."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of bodies that are left out, whatever they ask for."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Longest body of a request."""


ANY_AGENT = GatewayRules()
"""The rules where nothing is said.

>>> ANY_AGENT.models
('policy',)
"""


class Access(Protocol):
    """Where one episode's program calls the policy, and its key.

    >>> access.openai_base_url  # doctest: +SKIP
    'http://127.0.0.1:41234/e/k3J/v1'
    """

    @property
    def base_url(self) -> str:
        """Without ``/v1``: what clients of Anthropic expect."""
        ...

    @property
    def openai_base_url(self) -> str:
        """The base URL that clients of OpenAI expect."""
        ...

    @property
    def api_key(self) -> str:
        """Lets nobody else in. It belongs into no log."""
        ...

    @property
    def model(self) -> str:
        """A model's name that is answered."""
        ...


class Traffic(Protocol):
    """The count of one episode's requests.

    >>> traffic.metrics()  # doctest: +SKIP
    {'gateway_requests': 3.0, 'gateway_retries': 1.0}
    """

    def metrics(self) -> Mapping[str, float]:
        """By the names under which they are logged."""
        ...


class EpisodeGateway(Protocol):
    """A server for many episodes, ready when it exists. Its methods may be called from any thread.

    >>> access = gateway.open(policy)  # doctest: +SKIP
    """

    def open(self, policy: EpisodePolicy) -> Access:
        """From now on calls with this key are answered by ``policy``."""
        ...

    def close(self, access: Access) -> Traffic:
        """Calls with this key are refused from now on. Twice is harmless."""
        ...

    def shutdown(self) -> None:
        """End the server."""
        ...


def gateway_is_installed() -> bool:
    """Some package offers a gateway. Looks for it and imports nothing.

    >>> gateway_is_installed()  # doctest: +SKIP
    True
    """
    return GATEWAY.name in registry().index.slots


def start_gateway(rules: GatewayRules = ANY_AGENT) -> EpisodeGateway:
    """A gateway of the installed package that offers one.

    Args:
        rules: For the requests of all its episodes.

    Raises:
        PluginError: No package does.

    >>> start_gateway()  # doctest: +SKIP
    """
    factory = GATEWAY.filled()
    if factory is None:
        raise PluginError(
            "no installed package lets programs call the policy over HTTP", fix="pip install nemorl-agents"
        )
    return factory(rules)


Name = Annotated[PlainText, Field(min_length=1, max_length=200)]


class GatewayConfig(Config):
    """How agents may call the policy over HTTP."""

    models: tuple[Name, ...] = Field(("policy",), min_length=1)
    """Names of models by which agents may call the policy; ``*`` stands for any characters. All others but ``policy``
    are refused with the names that are served. The first one without ``*`` is what programs get as ``OPENAI_MODEL``."""
    ignored_fields: tuple[Name, ...] = ()
    """Fields of requests that are left out, with a warning the first time, whatever they ask for. For agents that
    cannot be told to omit what would be refused."""
    max_body_mib: Annotated[int, RESUMABLE] = Field(MAX_BODY_BYTES // MIB, ge=1, le=64)
    """Longest body of a request. Clients send all images of a conversation with each."""

    @property
    def rules(self) -> GatewayRules:
        return GatewayRules(self.models, self.ignored_fields, self.max_body_mib * MIB)
