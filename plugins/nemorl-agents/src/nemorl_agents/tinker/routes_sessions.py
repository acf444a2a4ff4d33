"""Sessions of clients, what is served, and the switches by which a server tells clients how to speak to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from nemorl_agents.tinker.calls import Call, Endpoint
from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.journal import text_values
from nemorl_agents.tinker.records import Session
from nemorl_agents.tinker.service import Service
from nemorl_agents.tinker.wire.bodies import Body, CreateSession

PROJECT = "default"
"""The one project that there is."""
CLIENT_CONFIG: dict[str, Any] = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}
"""Parts of the protocol that a server chooses. Custom losses run at the client, with exact weighted cross-entropy."""
DYNAMIC_CONFIG: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


class SessionId(Body):
    session_id: str


class Finish(Body):
    reason: dict[str, Any]
    detail: str | None = None


class Search(Body):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = None
    owner: dict[str, Any] | None = None
    statuses: list[dict[str, Any]] | None = None
    limit: int = 50
    cursor: dict[str, Any] | None = None

    def fits(self, session: Session) -> bool:
        """A session is asked for."""
        metadata = text_values(session.facts.get("user_metadata"))
        name = str(session.facts.get("display_name") or "").lower()
        is_named = self.display_name is not None and all(word in name for word in self.display_name.lower().split())
        asks_for_one = self.session_id is not None or self.display_name is not None
        return (
            (not asks_for_one or session.id == self.session_id or is_named)
            and all(metadata.get(key) == value for key, value in self.user_metadata.items())
            and (self.statuses is None or any(_has_status(session, each) for each in self.statuses))
            and (self.project_ids is None or PROJECT in self.project_ids)
        )


def _has_status(session: Session, wanted: dict[str, Any]) -> bool:
    reasons = wanted.get("reasons")
    reason = (session.status.get("reason") or {}).get("type")
    return session.status.get("type") == wanted.get("type") and (reasons is None or reason in reasons)


class SessionRoutes:
    """Answers about sessions."""

    def __init__(self, service: Service) -> None:
        self._service, self._records = service, service.records

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/client/config", self._config),
            Endpoint("POST", "/client/dynamic_config", self._dynamic_config),
            Endpoint("GET", "/get_server_capabilities", self._capabilities),
            Endpoint("POST", "/telemetry", self._telemetry),
            Endpoint("POST", "/create_session", self._create),
            Endpoint("POST", "/session_heartbeat", self._beat),
            Endpoint("POST", "/sessions/search", self._search),
            Endpoint("POST", "/sessions/{session}/finish", self._finish),
            Endpoint("GET", "/sessions/{session}", self._session),
            Endpoint("GET", "/sessions", self._sessions),
        ]

    async def _config(self, call: Call) -> Any:
        return CLIENT_CONFIG

    async def _dynamic_config(self, call: Call) -> Any:
        return DYNAMIC_CONFIG

    async def _telemetry(self, call: Call) -> Any:
        """Taken and forgotten: clients that get no answer warn about it."""
        return {"status": "accepted"}

    async def _capabilities(self, call: Call) -> Any:
        models = [
            {
                "model_name": base.name,
                "max_context_length": base.max_context_tokens,
                "trainable": base.trainable,
                "sampleable": base.sampleable,
            }
            for base in self._service.models.bases
        ]
        return {"supported_models": models}

    async def _create(self, call: Call) -> Any:
        facts = call.body(CreateSession).model_dump(exclude={"type"})
        session = self._service.create_session(call.owner, facts)
        return {"type": "create_session", "session_id": session.id}

    async def _beat(self, call: Call) -> Any:
        self._service.session(call.owner, call.body(SessionId).session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, call: Call) -> Any:
        body = call.body(Finish)
        session = self._service.any_session(call.owner, call.path["session"])
        self._service.end_session(session, {"type": "client_finished", "reason": body.reason, "detail": body.detail})
        return {}

    async def _session(self, call: Call) -> Any:
        session = self._service.any_session(call.owner, call.path["session"])
        return {
            "training_run_ids": [each.id for each in self._records.models.where("session = ?", session.id)],
            "sampler_ids": [each.id for each in self._records.samplers.where("session = ?", session.id)],
            "user_metadata": text_values(session.facts.get("user_metadata")),
            "display_name": session.facts.get("display_name"),
        }

    async def _sessions(self, call: Call) -> Any:
        limit, offset = call.page()
        found = self._records.sessions.where(
            "owner = ? ORDER BY created_s DESC LIMIT ? OFFSET ?", call.owner, limit, offset
        )
        return {"sessions": [session.id for session in found]}

    async def _search(self, call: Call) -> Any:
        body = call.body(Search)
        if not 1 <= body.limit <= 200:
            raise ApiError(422, f"limit: {body.limit} is not between 1 and 200")
        newest = self._records.sessions.where("owner = ? ORDER BY created_s DESC, id DESC", call.owner)
        fitting = [session for session in newest if body.fits(session)]
        if body.cursor is not None:
            last = str(body.cursor.get("last_session_id"))
            ids = [session.id for session in fitting]
            fitting = fitting[ids.index(last) + 1 :] if last in ids else fitting
        page = fitting[: body.limit]
        cursor = None
        if len(fitting) > len(page):
            cursor = {"last_created_at": moment(page[-1].created_s), "last_session_id": page[-1].id}
        return {"sessions": [self._summary(session) for session in page], "next_cursor": cursor}

    def _summary(self, session: Session) -> dict[str, Any]:
        saved = self._records.checkpoints.where("model IN (SELECT id FROM models WHERE session = ?)", session.id)
        return {
            "session_id": session.id,
            "created_at": moment(session.created_s),
            "owner": session.owner,
            "project_id": PROJECT,
            "status": session.status,
            "checkpoints_count": len(saved),
            "display_name": session.facts.get("display_name"),
            "user_metadata": text_values(session.facts.get("user_metadata")),
            "checkpoint_storage_bytes": sum(checkpoint.bytes for checkpoint in saved),
        }


def moment(time_s: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(time_s, UTC).isoformat()
