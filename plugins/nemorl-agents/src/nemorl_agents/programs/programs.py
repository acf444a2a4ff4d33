"""A program per episode, which calls the policy over HTTP."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemorl.types import Prompt
from nemorl_rl.agents.gateways import Access, EpisodeGateway
from nemorl_rl.agents.outcomes import Ending
from nemorl_rl.agents.watched import WatchedPolicy
from nemorl_rl.environments.loop_thread import in_thread

from nemorl_agents.programs.config import AgentConfig
from nemorl_agents.programs.episode import Episode
from nemorl_agents.programs.folders import EpisodeFolder, filled_in, visible_columns
from nemorl_agents.programs.judging import Play
from nemorl_agents.programs.program import Exit, Program, clean_environment
from nemorl_agents.programs.sandbox import Sandbox

MIB = 2**20
HIDDEN_KEY = "<key of the episode>"


class Programs:
    """Runs the command of a config, once per episode."""

    def __init__(self, config: AgentConfig, start_gateway: Callable[[], EpisodeGateway]) -> None:
        """
        Args:
            config: Has a command.
            start_gateway: What programs call the policy by; started with the first of them.
        """
        self._config, self._start_gateway = config, start_gateway
        self._command = [_found(argument, is_first=n == 0) for n, argument in enumerate(config.command)]
        self._answer = config.answer or "stdout"
        sizes = {"RLIMIT_AS": config.memory_mib, "RLIMIT_FSIZE": config.file_mib}
        self._limits = {name: size * MIB for name, size in sizes.items() if size is not None} | {"RLIMIT_CORE": 0}
        self._sandbox = Sandbox(self._command, config.readable) if config.sandbox else None
        self._lock = threading.Lock()
        self._gateway: EpisodeGateway | None = None

    @asynccontextmanager
    async def play(self, prompt: Prompt, policy: WatchedPolicy, timeout_s: float) -> AsyncIterator[Play]:
        gateway = await in_thread(self._running_gateway)
        folder = await in_thread(EpisodeFolder, self._config.keep_folders, policy.episode_id)
        try:
            columns = visible_columns(prompt, self._config.hidden_columns)
            await in_thread(folder.fill, prompt, columns, self._config.files, self._config.copy_in)
            access = gateway.open(policy)
            try:
                program = self._program(prompt, columns, policy.episode_id, folder, access)
                ended = await program.run(prompt.text, timeout_s)
            finally:
                traffic = gateway.close(access)
            stdout, stderr = (text.replace(access.api_key, HIDDEN_KEY) for text in (ended.stdout, ended.stderr))
            await in_thread(folder.keep, stdout, stderr)
            outcome = outcome_of(ended, policy)
            episode = Episode(outcome, ended.returncode, stdout, stderr, tuple(policy.messages), folder.work)
            answer = await in_thread(episode.answer, self._answer)
            yield Play(episode, answer, metrics=traffic.metrics())
        finally:
            await in_thread(folder.remove)

    def _program(
        self, prompt: Prompt, columns: Mapping[str, Any], episode_id: str, folder: EpisodeFolder, access: Access
    ) -> Program:
        port = urlsplit(access.base_url).port or 80
        return Program(
            [filled_in(argument, prompt, columns) for argument in self._command],
            folder=folder.work,
            environment={**_variables(episode_id, folder, access), **self._config.env},
            output_bytes=self._config.output_kib * 1024,
            limits=self._limits,
            prefix=self._sandbox.prefix(folder.root, port) if self._sandbox is not None else (),
        )

    def _running_gateway(self) -> EpisodeGateway:
        with self._lock:
            if self._gateway is None:
                if self._sandbox is not None:
                    asyncio.run(self._sandbox.try_out())
                self._gateway = self._start_gateway()
            return self._gateway

    def close(self) -> None:
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.shutdown()


def outcome_of(ended: Exit, policy: WatchedPolicy) -> Ending:
    """How a program ended, by its exit code and its calls."""
    if ended.returncode is None:
        return "timeout"
    if ended.returncode:
        return "crashed" if policy.refusal is None else "stopped"
    return "finished" if policy.answers else "no_calls"


def _found(argument: str, *, is_first: bool) -> str:
    """The absolute path of a file here, since the program runs elsewhere; programs by name are found in ``PATH``."""
    if is_first and os.sep not in argument:
        return argument
    return os.path.abspath(argument) if Path(argument).is_file() else argument  # links of a venv are kept


def _variables(episode_id: str, folder: EpisodeFolder, access: Access) -> dict[str, str]:
    return {
        **clean_environment(),
        "HOME": str(folder.home),
        "TMPDIR": str(folder.temporary),
        "PYTHONUNBUFFERED": "1",  # so that what it said is there when it is ended
        "OPENAI_BASE_URL": access.openai_base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_MODEL": access.model,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # openai-agents would send its traces to OpenAI
        "ANTHROPIC_BASE_URL": access.base_url,
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_AUTH_TOKEN": access.api_key,
        "NO_PROXY": "127.0.0.1,localhost",
        "NEMORL_EPISODE": episode_id,
        "NEMORL_TASK": str(folder.task),
    }
