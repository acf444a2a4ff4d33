"""The interface of every engine, and the plain data that goes to and fro."""

from __future__ import annotations

import math
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nemorl.errors import BackendError
from nemorl.types import SamplingParams

from nemorl_agents.servers.ways import Way

if TYPE_CHECKING:
    from nemorl_tensors.engines.broadcast import Meeting
    from torch import Tensor

    from nemorl_agents.servers.sending import Announced, Opener

Logprobs = Literal["scaled", "raw", "processed"]
"""The distribution that a server's log-probs are of. ``scaled``: ``softmax(logits / temperature)`` over the whole
vocabulary, which training recomputes. ``raw``: ``softmax(logits)``. ``processed``: what was drawn from, after the
temperature and top-k, top-p and min-p."""


@dataclass(frozen=True)
class Facts:
    """A server's description of itself."""

    version: str
    model: str
    """Its name in requests"""
    source: str = ""
    """Folder or hub name of what it was started with, if it says"""
    max_tokens: int | None = None
    """Longest prompt plus response, if it says"""
    logprobs: Logprobs = "scaled"
    temperatures: tuple[float, float] = (0.0, math.inf)
    """Lowest and highest above 0 that it samples at"""
    dtype: str = "float32"
    """torch's name, without ``torch.``"""
    architecture: str | None = None
    """transformers' ``model_type``, if it says"""
    extension: bool = False
    """nemorl's own code runs in its workers"""
    ways: frozenset[Way] = frozenset()
    """In which it can be given weights, as it was started"""
    ranks: int = 1
    """Processes that hold its model"""
    transfer: str = ""
    """vLLM's name of the backend by which it takes tensors"""
    problems: tuple[tuple[str, str], ...] = ()
    """Why it cannot be used as it was started: message and fix"""


@dataclass(frozen=True)
class Wanted:
    """Settings that a server must be started with, for the command line that error messages show."""

    model: str
    max_tokens: int
    precision: str
    address: str
    """host:port"""
    device: str = "cuda:0"

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2] if ":" in self.address else "8000"

    @property
    def shown_model(self) -> str:
        return shlex.quote(self.model)


@dataclass(frozen=True)
class Ask:
    """One response that is asked for."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """63 bits"""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """Every token that ends it, the model's own included"""


@dataclass(frozen=True)
class Answer:
    """One response."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weights: tuple[tuple[str, int], ...] | None
    """Name of each weights that drew it and place of their first token, in order; ``None``: the engine does not say"""
    prompt_logprobs: tuple[float, ...] = ()
    """Where they were asked for: of each token of the prompt at temperature 1, 0.0 for the first"""


Send = Callable[[Sequence[str]], Awaitable[None]]
"""Broadcasts the tensors of these names."""


class Caller(Protocol):
    """Sends requests to one server and returns its JSON (``connection.Connection``)."""

    async def get(self, path: str) -> Any: ...

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any: ...


class Dialect(Protocol):
    """One engine."""

    name: str
    """For messages"""
    versions: str
    """Those it is written for, as a version specifier"""
    ways: Mapping[Way, str]
    """In which its servers can be given weights while they run, and what one is started with for that"""
    scores: bool = True
    """It returns log-probs of prompts"""
    health: str = "/health"
    """Path that answers 200 while requests can be served"""

    def command(self, wanted: Wanted) -> str:
        """The command line that starts a server which fits."""
        ...

    async def facts(self, server: Caller) -> Facts:
        """The server's description of itself."""
        ...

    async def tokenize(self, server: Caller, facts: Facts, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        body = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        return list(field(await server.post("/tokenize", body), "tokens"))

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first, each given those before it."""
        ...

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        """One response."""
        ...

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        """Replace the weights by those of a Hugging Face folder, drop what was computed with older ones, and call them
        ``name``. Requests in progress go on with the new ones."""
        raise self._cannot("folder")

    def carrier(self, facts: Facts, device: str) -> tuple[str, Opener]:
        """The carrier of a broadcast from this process to the server's, and what opens this process's end."""
        raise self._cannot("distributed")

    async def join(self, server: Caller, facts: Facts, meeting: Meeting) -> None:
        """Have all processes of the server join a group."""
        raise self._cannot("distributed")

    async def receive(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], send: Send, name: str) -> None:
        """As ``load``, of tensors that ``send`` broadcasts while the server waits for them."""
        raise self._cannot("distributed")

    async def open_handles(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], name: str) -> None:
        """As ``load``, of tensors in the memory of a GPU that the server's processes see."""
        raise self._cannot("tensor")

    def _cannot(self, way: Way) -> BackendError:
        return BackendError(f"{self.name} takes no weights by {way}", fix=f"weights: {' or '.join(self.ways)}")


def sampling_fields(ask: Ask) -> dict[str, Any]:
    """How to draw a response, under the names of OpenAI's API and what vLLM and TensorRT-LLM have added to them."""
    sampling = ask.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "seed": ask.seed,
        "max_tokens": ask.max_new_tokens,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": list(ask.stop_ids),
        "ignore_eos": True,  # the end tokens are among the above
        "include_stop_str_in_output": True,
    }


def field(payload: Any, *path: str | int) -> Any:
    """The value at a path of an answer.

    Raises:
        ValueError: The answer has no such place; names it.

    >>> field({"choices": [{"token_ids": [7]}]}, "choices", 0, "token_ids")
    [7]
    """
    found = payload
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise ValueError(f"there is no {where} in {str(payload)[:200]}") from None
    return found


def announcement(announced: Announced, dtypes: str) -> dict[str, Any]:
    """Tensors to come, for a request.

    Args:
        announced: They, in order.
        dtypes: What the engine calls their dtypes.
    """
    shapes = [list(shape) for shape in announced.shapes]
    return {"names": list(announced.names), dtypes: list(announced.dtypes), "shapes": shapes}


def meeting_place(meeting: Meeting) -> dict[str, Any]:
    """Where workers meet the run, for a request. The run is rank 0."""
    return {
        "master_address": meeting.address,
        "master_port": meeting.port,
        "rank_offset": 1,
        "world_size": meeting.ranks,
    }


def weight_spans(spans: Any) -> tuple[tuple[str, int], ...]:
    """Weights that drew a response and where each begins, as an engine lists them."""
    return tuple((str(field(span, "version")), int(field(span, "start"))) for span in spans or ())
