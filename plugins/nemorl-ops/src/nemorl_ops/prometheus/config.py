"""The logger ``prometheus`` and its options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nemorl.base.text.reading import shown
from nemorl.config import PlainText, SecretVariable
from nemorl.errors import ConfigIssue, UsageError
from nemorl.plugins.kinds import LoggerConfig
from nemorl_trust.encryption import LOOPBACK
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Logger


class PrometheusConfig(LoggerConfig):
    """An endpoint that Prometheus scrapes in the run's process. Its token comes from the environment, not a config."""

    summary: ClassVar[str] = "an endpoint that Prometheus scrapes while the run lasts"
    requires_modules: ClassVar[tuple[str, ...]] = ("prometheus_client", "uvicorn")
    install_hint: ClassVar[str] = "pip install nemorl-ops"

    port: int = Field(9464, ge=0, le=65_535)
    """Port of the endpoint; 0: a free one, which ``prometheus.json`` in the run directory names."""
    host: PlainText = "127.0.0.1"
    """Address to listen on. Others than this machine's own (``0.0.0.0``) need ``token_env``."""
    token_env: SecretVariable | None = None
    """Environment variable that holds a token: scrapes without it are refused. Unset: anybody who reaches the port."""
    username: str | None = None
    """Basic authentication under this name with the token as password, in place of a bearer token."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.token_env is None and self.host not in LOOPBACK:
            message = f"{shown(self.host)} can be reached from other machines, and no token is asked for"
            yield ConfigIssue("host", message, "set token_env, or leave the host at 127.0.0.1")
        if self.token_env is None and self.username is not None:
            yield ConfigIssue("username", "a name without a password", "set token_env to the variable that holds it")

    @property
    def token(self) -> str | None:
        """The token, where one is asked for.

        Raises:
            UsageError: the variable that should hold it is empty.
        """
        if self.token_env is None:
            return None
        found = os.environ.get(self.token_env)
        if not found:
            raise UsageError(
                f"the environment variable {self.token_env} is empty", fix="set it to the token, or unset token_env"
            )
        return found

    def build(self, run_dir: Path) -> Logger:
        from nemorl_ops.prometheus.logger import PrometheusLogger

        return PrometheusLogger(self, Path(run_dir))
