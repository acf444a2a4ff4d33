"""Saving: requests that write a model's weights, under a name or for one sampling client."""

from __future__ import annotations

import time
from collections.abc import Callable

from nemorl.base.files.atomic import remove, replacing_folder
from nemorl.errors import DataError

from nemorl_agents.tinker.execution import Done, Execution, done
from nemorl_agents.tinker.folders import checkpoint_path, folder_bytes
from nemorl_agents.tinker.records import Checkpoint, CheckpointType, Request, Sampler
from nemorl_agents.tinker.wire.bodies import Saved, SaveExternal, SaveForSampler, SaveWeights, body_of


class Saving:
    """Runs requests that save, on the thread that owns the models."""

    def __init__(self, execution: Execution, *, keep_snapshots: int) -> None:
        """
        Args:
            execution: Has the models.
            keep_snapshots: Weights without a name that are kept of each model; older ones make room.
        """
        self._execution, self._keep_snapshots = execution, keep_snapshots
        self._records, self._folders = execution.records, execution.folders

    def run(self, request: Request) -> Done:
        """Run a request that saves."""
        assert request.body is not None, "a request that waits has its body"
        match request.kind:
            case "save_weights":
                weights = body_of(SaveWeights, request.body)
                return self._named(request, weights, "training", overwrite=weights.overwrite)
            case "save_weights_for_sampler":
                sampler = body_of(SaveForSampler, request.body)
                unnamed = sampler.sampling_session_seq_id is not None
                return self._sampler(request, sampler) if unnamed else self._named(request, sampler, "sampler")
            case _:
                external = body_of(SaveExternal, request.body)
                if external.age_encryption_recipients:
                    raise DataError("age_encryption_recipients is not served", fix="encrypt the files where they go")
                return self._named(request, external, "external")

    def _named(self, request: Request, body: Saved, kind: CheckpointType, *, overwrite: bool = False) -> Done:
        model = self._execution.model(request.scope)
        name = f"{request.seq:06d}" if body.path is None else body.path
        path = checkpoint_path(model.id, kind, name)
        earlier = self._records.checkpoints.get(path)
        if earlier is not None and not overwrite:
            fix = "save_state(..., overwrite=True) replaces it" if kind == "training" else "choose another name"
            raise DataError(f"{path} is there already", fix=fix)
        folder = self._folders.checkpoint(model.id, kind, name, request.seq)
        with replacing_folder(folder) as draft:
            if kind == "training":
                self._execution.models.save(model.id, draft, optimizer=True)
            else:
                self._execution.models.snapshot(model.id, draft)
        now_s = time.time()
        row = Checkpoint(
            path=path,
            model=model.id,
            owner=request.owner,
            type=kind,
            folder=folder.relative_to(self._folders.root).as_posix(),
            new=model.new,
            created_s=now_s,
            bytes=folder_bytes(folder),
            metadata=dict(body.user_metadata or {}),
            expires_s=None if body.ttl_seconds is None else now_s + body.ttl_seconds,
        )
        found = done({"type": request.kind, "path": path}, lambda: self._records.checkpoints.put(row))
        if earlier is not None and earlier.folder != row.folder:
            found.after = lambda: remove(self._folders.root / earlier.folder)
        return found

    def _sampler(self, request: Request, body: SaveForSampler) -> Done:
        """Weights for one sampling client, which have no name."""
        model = self._execution.model(request.scope)
        is_inflight = body.kind == "inflight"
        folder = self._folders.snapshot(model.id, request.seq)
        with replacing_folder(folder) as draft:
            self._execution.models.snapshot(model.id, draft)
        where = folder.relative_to(self._folders.root).as_posix()
        sampler_id = f"{request.session}:sample:{body.sampling_session_seq_id}"
        base = model.new["base_model"]
        row = Sampler(sampler_id, request.session, request.owner, base, None, where, model.id, int(is_inflight))
        rows: list[Callable[[], None]] = []
        if is_inflight:
            rows.append(lambda: self._move_inflight(model.id, where))
        rows.append(lambda: self._records.samplers.put(row))
        payload = {"type": request.kind, "sampling_session_id": sampler_id}
        found = done(payload, *rows)
        found.after = lambda: self._drop_snapshots(model.id)
        return found

    def _move_inflight(self, model_id: str, where: str) -> None:
        for sampler in self._records.samplers.where("model = ? AND is_inflight = 1", model_id):
            self._records.samplers.change(sampler.id, folder=where)

    def _drop_snapshots(self, model_id: str) -> None:
        """Leave the newest ones, those with requests that wait, and the one of inflight samplers."""
        newest_last = self._records.samplers.where("model = ? AND is_dropped = 0 ORDER BY folder", model_id)
        fixed = [sampler for sampler in newest_last if not sampler.is_inflight]
        for sampler in fixed[: max(0, len(fixed) - self._keep_snapshots)]:
            if not self._records.requests.count("scope = ? AND state = 'waiting'", sampler.id):
                self._records.samplers.change(sampler.id, is_dropped=1)
        kept = {s.folder for s in self._records.samplers.where("model = ? AND is_dropped = 0", model_id)}
        for folder in self._folders.snapshots(model_id):
            if folder.relative_to(self._folders.root).as_posix() not in kept:
                remove(folder)
