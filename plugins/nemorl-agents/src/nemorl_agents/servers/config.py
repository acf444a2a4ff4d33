"""Options of the generation backend ``server``, readable where neither torch nor httpx2 is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from nemorl.config import RESUMABLE, SecretVariable, ServerURL
from nemorl.contracts import GenerationCapability
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import GenerationBackendConfig
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.config import GenerationConfig, PolicyConfig
    from nemorl.contracts import GenerationBackend
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_]\w*")


class ServerConfig(GenerationBackendConfig):
    """Generate with servers that somebody else started: vLLM, SGLang or TensorRT-LLM, over HTTP."""

    summary: ClassVar[str] = "a vLLM, SGLang or TensorRT-LLM server that somebody else started, over HTTP"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "httpx2")
    install_hint: ClassVar[str] = "pip install nemorl-agents"
    supports: ClassVar[frozenset[GenerationCapability]] = frozenset(
        {"any_transport", "in_flight_updates", "prompt_logprobs", "remarks", "submit"}
    )
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "shared_memory", "object_store")

    urls: Annotated[tuple[ServerURL, ...], RESUMABLE] = Field(min_length=1)
    """Addresses, e.g. ``[https://node7:8000]``. All serve the same model. ``nemorl engines`` changes them in a run."""
    engine: Annotated[Literal["vllm", "sglang", "tensorrt-llm"], RESUMABLE] = "vllm"
    """The software behind them."""
    api_key_env: Annotated[SecretVariable | None, RESUMABLE] = None
    """Environment variable that holds the servers' key. Unset: they want none."""
    tls_ca: Annotated[Path | None, RESUMABLE] = None
    """PEM certificate of the authority that signed the servers', where the system does not know it."""
    plaintext: Annotated[bool, RESUMABLE] = False
    """Let prompts, responses and the key go to other machines over ``http`` all the same: they can be read and changed
    on their way. ``http`` to this machine needs no leave."""
    timeout_s: Annotated[float, RESUMABLE] = Field(600.0, gt=0)
    """Longest wait for one response, or for a server to load weights; it then counts as lost."""
    reconnect_timeout_s: Annotated[float, RESUMABLE] = Field(600.0, gt=0)
    """How long a run waits for a server when it has none. Raise it to the time that a replacement takes to start."""
    max_concurrency: Annotated[int, RESUMABLE] = Field(256, ge=1, le=100_000)
    """Most requests at one server at a time: what it can decode together (vLLM: ``--max-num-seqs``)."""
    weights: Annotated[Literal["auto", "folder", "distributed", "tensor"], RESUMABLE] = "auto"
    """How servers get new weights. ``folder``: as files. ``distributed``: broadcast to their processes. ``tensor``: as
    handles of GPU memory, on one machine. ``auto``: what all servers offer, without files if possible; as files where
    everything is on one machine without a GPU, which is faster there."""
    weights_folder: Annotated[Path | None, RESUMABLE] = None
    """A folder that the run and the servers see under the same path: new weights are handed over in it, those of
    each run in a folder of its own. Unset: in the run's directory."""
    check_weights_gib: Annotated[float, RESUMABLE] = Field(2.0, ge=0)
    """Models up to this size are loaded here once more, with transformers, to compare log-probs of some tokens with
    those of a server that loaded weights. 0: never; ``rollouts.mismatch_limit`` is then what notices wrong weights."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for number, url in enumerate(self.urls):
            problem = url_problem(url)
            if problem is not None or (not self.plaintext and (problem := plaintext_problem(url)) is not None):
                yield ConfigIssue(f"urls.{number}", *problem)
        if self.tls_ca is not None and not self.tls_ca.is_file():
            yield ConfigIssue("tls_ca", f"no file {str(self.tls_ca)!r}", "give a PEM certificate", here=True)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            yield ConfigIssue("urls", "an address stands there twice", "give each once")
        if self.api_key_env is not None and not ENVIRONMENT_NAME.fullmatch(self.api_key_env):
            fix = "put the key into a variable, and give the variable's name"
            yield ConfigIssue("api_key_env", "this is no name of an environment variable", fix)

    def policy_problems(self, policy: PolicyConfig, *, device: str, is_attached: bool) -> Iterator[ConfigIssue]:
        from nemorl_agents.servers.dialects import dialect
        from nemorl_agents.servers.ways import order, way_problem

        yield from super().policy_problems(policy, device=device, is_attached=is_attached)
        spoken = dialect(self.engine)
        asked = order(self.urls, device) if self.weights == "auto" else (self.weights,)
        able = [way for way in asked if way in spoken.ways]
        problems = [way_problem(way, spoken, self, self.urls, device) for way in able]
        if not able:
            what = f"{spoken.name} takes no weights by {self.weights}"
            yield ConfigIssue("generation.backend.weights", what, f"set it to {' or '.join(spoken.ways)}")
        elif all(problems) and (found := problems[0]) is not None:
            yield ConfigIssue("generation.backend.weights", *found)

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        from nemorl_agents.servers.generation import ServerGeneration

        return ServerGeneration(generation, policy, worker, weights, self)


def url_problem(url: str) -> tuple[str, str] | None:
    """Why this cannot be the address of a server, and what to do; ``None`` where it can."""
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError:
        return f"{url!r} is no address", "give e.g. http://node7:8000"
    if "@" in parts.netloc:
        return "an address must hold no password", "put the key into a variable and its name into api_key_env"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_number:
        return f"{url!r} is no address of an HTTP server", "give e.g. http://node7:8000"
    if parts.query or parts.fragment:
        return f"{url!r} has a query or fragment", "give the address alone, e.g. http://node7:8000"
    return None
