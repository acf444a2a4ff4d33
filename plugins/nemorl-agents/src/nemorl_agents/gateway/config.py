"""The options of the gateway that an environment starts. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated

from nemorl.config import Config
from nemorl_rl.agents.gateways import GatewayRules
from pydantic import Field

Name = Annotated[str, Field(min_length=1, max_length=200)]


class GatewayConfig(Config):
    """How agents may call the policy over HTTP."""

    models: tuple[Name, ...] = Field(("policy",), min_length=1)
    """Names of models by which agents may call the policy; ``*`` stands for any characters. All others but ``policy``
    are refused with the names that are served. The first one without ``*`` is what programs get as ``OPENAI_MODEL``."""
    ignored_fields: tuple[Name, ...] = ()
    """Fields of requests that are left out, with a warning the first time, whatever they ask for. For agents that
    cannot be told to omit what would be refused."""

    @property
    def rules(self) -> GatewayRules:
        return GatewayRules(self.models, self.ignored_fields)
