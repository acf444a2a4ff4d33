"""Servers that nobody gives weights, as in ``nemorl eval``: were they started with those of the model?"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.errors import BackendError
from nemorl_rl.models.model_files import stored_folder

from nemorl_agents.servers.checks import weights_gap
from nemorl_agents.servers.versions import WrittenWeights

if TYPE_CHECKING:
    from nemorl_agents.servers.checks import Identity
    from nemorl_agents.servers.dialects.base import Facts
    from nemorl_agents.servers.server import Server
    from nemorl_agents.servers.versions import Weights


class OwnWeights:
    """Compares the log-probs of probe tokens, as servers and as transformers on the model's folder find them."""

    def __init__(self, identity: Identity, true_logprobs: Callable[[Weights], Awaitable[list[float] | None]]) -> None:
        """
        Args:
            identity: The model.
            true_logprobs: Those of the probe tokens, by transformers; ``None`` of weights too large to load here.
        """
        self._identity, self._true_logprobs = identity, true_logprobs
        self._told: set[tuple[str, str]] = set()

    async def require(self, server: Server) -> None:
        """Refuse a server with other weights; warn of one whose weights cannot be compared.

        Raises:
            BackendError: It was started with others.
            GoneError: It is not there.
        """
        facts, model = server.facts, self._identity.policy.model_name
        assert facts is not None, "it was checked before"
        if self._identity.policy.init == "random" or _is_source(facts, model):
            return
        true = await self._true() if server.spoken.scores else f"{server.spoken.name} tells no log-probs of prompts"
        source = facts.source or "a model"
        if isinstance(true, str):
            if (server.url, source) not in self._told:
                self._told.add((server.url, source))
                text = "%s serves %s: its weights were not compared with those of %s: %s"
                logging.getLogger(__name__).warning(text, server.url, source, model, true)
            return
        if gap := weights_gap(await server.score(), true, facts.dtype):
            raise BackendError(
                f"{server.url} serves {source}, with other weights than those of {model}: {gap}",
                fix=f"start it with: {server.command} (or set generation.backend.check_weights_gib: 0, and it is taken "
                "as it is)",
            )

    async def _true(self) -> list[float] | str:
        """Log-probs of the probe tokens, or why there are none."""
        folder = stored_folder(self._identity.policy.model_name)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder is not None else 0
        if folder is None or not size:
            return "there are none on this machine"
        try:
            found = await self._true_logprobs(WrittenWeights(0, folder, size, 0.0))
        except Exception as error:  # whatever transformers raises of a folder that it cannot load
            return f"transformers does not load them here ({type(error).__name__}: {str(error).splitlines()[0]:.200})"
        return f"{size / 2**30:.2g} GiB are more than generation.backend.check_weights_gib" if found is None else found


def _is_source(facts: Facts, model: str) -> bool:
    """The server says that it was started with the model itself."""
    folder = stored_folder(model)
    return facts.source == model or (folder is not None and Path(facts.source).resolve() == folder.resolve())
