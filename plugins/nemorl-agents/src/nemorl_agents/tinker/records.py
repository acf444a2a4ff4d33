"""Records: the rows that a server keeps of sessions, models, requests, samplers and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, Literal

from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.journal import Journal, Table

Kind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "sample",
    "unload_model",
]
State = Literal["waiting", "done", "failed", "gone"]
"""``gone``: its answer was fetched long ago and is kept no more."""
CheckpointType = Literal["training", "sampler", "external"]


@dataclass(frozen=True)
class Session:
    """One ``ServiceClient``."""

    id: str
    owner: str
    """The name of the key that made it."""
    created_s: float
    ended_s: float | None
    status: dict[str, Any]
    """As answers about sessions have it."""
    facts: dict[str, Any]
    """The client's ``tags``, ``user_metadata``, ``project_id``, ``display_name`` and ``sdk_version``."""


@dataclass(frozen=True)
class Model:
    """One adapter, which clients call a training run."""

    id: str
    session: str
    owner: str
    new: dict[str, Any]
    """Fields of ``NewModel``."""
    metadata: dict[str, Any]
    created_s: float
    state_seq: int = 0
    """The request after which ``state`` was saved. Later ones are run again when a server comes back."""
    state: str | None = None
    """Folder of weights and optimizer; None: as it was made."""


@dataclass(frozen=True)
class Request:
    """One request whose answer comes by a future."""

    id: str
    scope: str
    """The model or the sampler whose ``seq`` it has."""
    seq: int
    session: str
    owner: str
    kind: Kind
    digest: str
    body: bytes | None
    """None: it will not be run again."""
    state: State = "waiting"
    answer: bytes | None = None
    media_type: str | None = None
    created_s: float = 0.0
    fetched_s: float | None = None
    sequences: int = 1
    """That a sample asks for."""


@dataclass(frozen=True)
class Sampler:
    """One sampling session: a base, or fixed weights on it."""

    id: str
    session: str
    owner: str
    base: str
    model_path: str | None
    folder: str | None
    """Of the weights; None: the base."""
    model: str | None = None
    """Whose weights it has, where they have no name."""
    is_inflight: int = 0
    """It goes along with the latest ``inflight`` save of its model."""
    clones: int = 0
    is_dropped: int = 0
    """Its weights were dropped for newer ones."""

    @property
    def lane(self) -> str:
        """Equal for samplers whose requests can be answered together."""
        return f"inflight {self.model}" if self.is_inflight else f"{self.base} {self.folder or ''}"


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights with a name."""

    path: str
    """``tinker://MODEL/KIND/NAME``"""
    model: str
    owner: str
    type: CheckpointType
    folder: str
    new: dict[str, Any]
    """Fields of ``NewModel`` of the model that was saved."""
    created_s: float
    bytes: int
    metadata: dict[str, Any]
    expires_s: float | None = None
    is_public: int = 0

    @property
    def id(self) -> str:
        """``KIND/NAME``."""
        return self.path.removeprefix("tinker://").partition("/")[2]


@dataclass(frozen=True)
class Answer:
    """What a future gives."""

    state: State
    payload: bytes
    media_type: str = "application/json"


class Records:
    """All tables of a journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.sessions = Table(journal, Session, "sessions")
        self.models = Table(journal, Model, "models")
        self.requests = Table(journal, Request, "requests", unique=("scope", "seq"))
        self.samplers = Table(journal, Sampler, "samplers")
        self.checkpoints = Table(journal, Checkpoint, "checkpoints")
        with journal.writing() as db:
            db.execute("CREATE INDEX IF NOT EXISTS requests_by_state ON requests (state)")
            db.execute("CREATE INDEX IF NOT EXISTS requests_by_session ON requests (session)")

    def submit(self, requests: Sequence[Request]) -> list[bool | ApiError]:
        """Keep requests in one transaction. Of each: True where it is new, False for a retry, or an error where another
        body has its number."""
        with self.journal.writing() as db:
            return [self._submitted(db, request) for request in requests]

    def _submitted(self, db: Connection, request: Request) -> bool | ApiError:
        found = db.execute("SELECT digest FROM requests WHERE id = ?", (request.id,)).fetchone()
        if found is None:
            self.requests.put(request)
            return True
        if found[0] == request.digest:
            return False
        return ApiError(
            400,
            f"request {request.seq} of {request.scope} was sent before with another body",
            fix="give each request a number of its own; a retry repeats its body",
        )

    def finish(self, request: Request, answer: Answer, *, keeps_body: bool) -> None:
        """Keep an answer; with it in one transaction where the caller has one open."""
        body = "" if keeps_body else ", body = NULL"
        with self.journal.writing() as db:
            db.execute(
                f"UPDATE requests SET state = ?, answer = ?, media_type = ?{body} WHERE id = ?",
                (answer.state, answer.payload, answer.media_type, request.id),
            )

    def answer(self, request_id: str) -> tuple[str, Answer] | None:
        """(owner, answer so far) of a request, without reading its body."""
        sql = "SELECT owner, state, answer, media_type FROM requests WHERE id = ?"
        found = self.journal.read(sql, request_id)
        if not found:
            return None
        owner, state, payload, media_type = found[0]
        return owner, Answer(state, payload or b"", media_type or "application/json")

    def note_fetched(self, fetched_s: Mapping[str, float]) -> None:
        """When answers reached their clients, by request."""
        with self.journal.writing() as db:
            db.executemany(
                "UPDATE requests SET fetched_s = ? WHERE id = ? AND fetched_s IS NULL",
                [(when, request_id) for request_id, when in fetched_s.items()],
            )

    def drop_bodies(self, model_id: str, until_seq: int) -> None:
        """Requests of a model up to this one will not be run again."""
        with self.journal.writing() as db:
            db.execute(
                "UPDATE requests SET body = NULL WHERE scope = ? AND seq <= ? AND state != 'waiting'",
                (model_id, until_seq),
            )

    def drop_answers(self, before_s: float) -> None:
        """Forget answers that were fetched before a time, and all of sessions that ended before it."""
        with self.journal.writing() as db:
            db.execute(
                "UPDATE requests SET state = 'gone', answer = NULL WHERE fetched_s < ? AND state IN ('done', 'failed') "
                "AND body IS NULL",
                (before_s,),
            )
            db.execute(
                "UPDATE requests SET state = 'gone', answer = NULL, body = NULL WHERE state IN ('done', 'failed') "
                "AND session IN (SELECT id FROM sessions WHERE ended_s < ?)",
                (before_s,),
            )

    def waiting(self) -> list[tuple[str, str, int, Kind]]:
        """(id, scope, number, kind) of requests without an answer, in their order of arrival."""
        sql = "SELECT id, scope, seq, kind FROM requests WHERE state = 'waiting' ORDER BY created_s, seq"
        return self.journal.read(sql)  # type: ignore[return-value]

    def next_seq(self, scope: str) -> int:
        """The number that the next request to be run of a model has."""
        (found,) = self.journal.read("SELECT MAX(seq) FROM requests WHERE scope = ? AND state != 'waiting'", scope)[0]
        return 0 if found is None else int(found) + 1
