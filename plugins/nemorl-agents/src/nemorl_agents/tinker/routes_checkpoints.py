"""Training runs and their checkpoints: listed, described, published, kept for a time, deleted, and given away as files.

A client names them as it was told, so that all of this works without a session.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import replace
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from starlette.responses import FileResponse

from nemorl_agents.tinker.calls import Call, Endpoint
from nemorl_agents.tinker.errors import ApiError, missing
from nemorl_agents.tinker.journal import text_values
from nemorl_agents.tinker.records import Checkpoint, Model
from nemorl_agents.tinker.routes_sessions import moment
from nemorl_agents.tinker.service import Service
from nemorl_agents.tinker.wire.bodies import LONGEST_TTL_S, SHORTEST_TTL_S, Body

LINK_S = 3600.0
"""A link to a file works so long."""
CHECKPOINT = "/training_runs/{run}/checkpoints/{segment}/{name}"


class TinkerPath(Body):
    tinker_path: str


class Ttl(Body):
    ttl_seconds: int | None


class CheckpointRoutes:
    """Answers about checkpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._records = service, service.records
        self._secret = sha256("".join(sorted(service.keys.by_name.values())).encode()).digest()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/training_runs", self._runs),
            Endpoint("GET", "/training_runs/{run}", self._run),
            Endpoint("GET", "/training_runs/{run}/checkpoints", self._of_run),
            Endpoint("GET", "/checkpoints", self._all),
            Endpoint("DELETE", CHECKPOINT, self._delete),
            Endpoint("POST", f"{CHECKPOINT}/publish", self._publish),
            Endpoint("DELETE", f"{CHECKPOINT}/publish", self._unpublish),
            Endpoint("PUT", f"{CHECKPOINT}/ttl", self._ttl),
            Endpoint("GET", f"{CHECKPOINT}/external_weights_urls", self._urls),
            Endpoint("POST", "/weights_info", self._info),
            Endpoint("POST", "/copy_weights", self._copy),
            Endpoint("GET", f"{CHECKPOINT}/archive", self._archive),
            Endpoint("DELETE", "/training_runs/{run}/checkpoints/{name}", self._delete_untyped),
        ]

    def file_endpoint(self) -> Endpoint:
        """Files by links, which need no key: the link itself is one."""
        return Endpoint("GET", "/files/{run}/{segment}/{name}/{file:path}", self._file)

    # Runs

    async def _runs(self, call: Call) -> Any:
        limit, offset = call.page()
        found = self._records.models.where(
            "owner = ? ORDER BY created_s DESC LIMIT ? OFFSET ?", call.owner, limit, offset
        )
        total = self._records.models.count("owner = ?", call.owner)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"training_runs": [self._shown_run(model) for model in found], "cursor": cursor}

    async def _run(self, call: Call) -> Any:
        return self._shown_run(self._service.model(call.owner, call.path["run"]))

    def _shown_run(self, model: Model) -> dict[str, Any]:
        saved = self._records.checkpoints.where("model = ? ORDER BY created_s", model.id)
        last = {checkpoint.type: _shown(checkpoint) for checkpoint in saved}
        latest = self._records.journal.read("SELECT MAX(created_s) FROM requests WHERE scope = ?", model.id)
        return {
            "training_run_id": model.id,
            "base_model": model.new["base_model"],
            "model_owner": model.owner,
            "is_lora": True,
            "lora_rank": model.new["rank"],
            "corrupted": False,
            "last_request_time": moment(latest[0][0] or model.created_s),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": text_values(model.metadata),
        }

    # Lists

    async def _of_run(self, call: Call) -> Any:
        self._service.model(call.owner, call.path["run"])
        found = self._records.checkpoints.where("model = ? ORDER BY created_s", call.path["run"])
        return {"checkpoints": [_shown(checkpoint) for checkpoint in found]}

    async def _all(self, call: Call) -> Any:
        limit, offset = call.page(100)
        found = self._records.checkpoints.where(
            "owner = ? ORDER BY created_s DESC LIMIT ? OFFSET ?", call.owner, limit, offset
        )
        total = self._records.checkpoints.count("owner = ?", call.owner)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"checkpoints": [_shown(checkpoint) for checkpoint in found], "cursor": cursor}

    async def _info(self, call: Call) -> Any:
        path = call.body(TinkerPath).tinker_path
        found = self._records.checkpoints.get(path)
        if found is None or (found.owner != call.owner and not found.is_public):
            raise missing("checkpoint", path)
        shown = ("base_model", "train_unembed", "train_mlp", "train_attn")
        return {"is_lora": True, "lora_rank": found.new["rank"], **{key: found.new[key] for key in shown}}

    # One checkpoint

    async def _delete(self, call: Call) -> Any:
        self._service.remove_checkpoint(self._own(call).path)

    async def _publish(self, call: Call) -> Any:
        self._records.checkpoints.put(replace(self._own(call), is_public=1))

    async def _unpublish(self, call: Call) -> Any:
        self._records.checkpoints.put(replace(self._own(call), is_public=0))

    async def _ttl(self, call: Call) -> Any:
        seconds = call.body(Ttl).ttl_seconds
        if seconds is not None and not SHORTEST_TTL_S <= seconds <= LONGEST_TTL_S:
            raise ApiError(422, f"ttl_seconds: {seconds} is not between {SHORTEST_TTL_S} and {LONGEST_TTL_S}")
        expires_s = None if seconds is None else time.time() + seconds
        self._records.checkpoints.put(replace(self._own(call), expires_s=expires_s))

    # Refused by name

    async def _copy(self, call: Call) -> Any:
        raise ApiError(
            400,
            "copy_weights is not served: this server has one project",
            fix="load or sample from the path itself; publish_checkpoint_from_tinker_path lets other keys do so",
        )

    async def _archive(self, call: Call) -> Any:
        raise ApiError(
            400,
            "archives of checkpoints are not served",
            fix="save_weights_external and get_external_weights_urls give the files",
        )

    async def _delete_untyped(self, call: Call) -> Any:
        name = call.path["name"]
        raise ApiError(400, f"which checkpoint {name[:200]} is meant is not said", fix=f"say weights/{name[:200]}")

    def _own(self, call: Call) -> Checkpoint:
        path = _path_of(call)
        found = self._records.checkpoints.get(path)
        if found is None or found.owner != call.owner:
            raise missing("checkpoint", path)
        return found

    # Files

    async def _urls(self, call: Call) -> Any:
        checkpoint = self._own(call)
        if checkpoint.type != "external":
            raise ApiError(400, f"{checkpoint.path} has no files to give away", fix="use save_weights_external")
        root = self._service.folders.root / checkpoint.folder
        until_s = time.time() + LINK_S
        names = [each.relative_to(root).as_posix() for each in sorted(root.rglob("*")) if each.is_file()]
        place = f"{call.base_url}/api/v1/files/{quote(checkpoint.path.removeprefix('tinker://'))}"
        urls = {}
        for name in names:
            sign = self._sign(checkpoint.path, name, int(until_s))
            urls[name] = f"{place}/{quote(name)}?until={int(until_s)}&sign={sign}"
        return {"urls": urls, "expires": moment(until_s)}

    async def _file(self, call: Call) -> Any:
        path, name = _path_of(call), call.path["file"]
        until_s = call.number("until", 0)
        is_right = hmac.compare_digest(self._sign(path, name, until_s).encode(), call.query.get("sign", "").encode())
        found = self._records.checkpoints.get(path)
        if not is_right or until_s < time.time() or found is None:
            raise ApiError(404, "this link leads nowhere any more", fix="ask for new ones")
        root = self._service.folders.root / found.folder
        return FileResponse(root / name)

    def _sign(self, path: str, name: str, until_s: int) -> str:
        return hmac.new(self._secret, f"{path}\0{name}\0{until_s}".encode(), sha256).hexdigest()


def _path_of(call: Call) -> str:
    return f"tinker://{call.path['run']}/{call.path['segment']}/{call.path['name']}"


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": checkpoint.type,
        "time": moment(checkpoint.created_s),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": bool(checkpoint.is_public),
        "user_metadata": text_values(checkpoint.metadata),
        "expires_at": None if checkpoint.expires_s is None else moment(checkpoint.expires_s),
    }
