"""Requests of samplers: made from a base or from a checkpoint, and asked for samples by futures."""

from __future__ import annotations

import json
from typing import Any

from nemorl.errors import DataError

from nemorl_agents.tinker.calls import Call, Endpoint
from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.records import Sampler
from nemorl_agents.tinker.service import Service
from nemorl_agents.tinker.wire.bodies import Body, CreateSampling
from nemorl_agents.tinker.wire.sampling import MOST_SAMPLES


class SamplingId(Body):
    sampling_session_id: str


class SamplingRoutes:
    """Takes in requests of samplers."""

    def __init__(self, service: Service) -> None:
        self._service, self._records = service, service.records

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/create_sampling_session", self._create),
            Endpoint("POST", "/join_sampling_session", self._join),
            Endpoint("GET", "/samplers/{sampler}", self._sampler),
            Endpoint("POST", "/asample", self._sample),
        ]

    async def _create(self, call: Call) -> Any:
        body = call.body(CreateSampling)
        self._service.session(call.owner, body.session_id)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        base, folder = self._weights(call.owner, body)
        made = Sampler(sampler_id, body.session_id, call.owner, base, body.model_path, folder)
        earlier = self._records.samplers.get(sampler_id)
        if earlier is None:
            self._records.samplers.put(made)
        elif (earlier.base, earlier.model_path) != (made.base, made.model_path):
            raise ApiError(400, f"the sampling session {sampler_id} was made before with other weights")
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _weights(self, owner: str, body: CreateSampling) -> tuple[str, str | None]:
        """(base, folder) of what is to be sampled from."""
        name, folder = body.base_model, None
        if body.model_path is not None:
            found = self._records.checkpoints.get(body.model_path)
            if found is None or (found.owner != owner and not found.is_public):
                raise ApiError(404, f"there is no checkpoint {body.model_path[:300]}")
            if found.type == "training":
                fix = "save_weights_for_sampler writes weights to sample from"
                raise ApiError(400, f"{found.path} cannot be sampled from", fix=fix)
            name, folder = found.new["base_model"], found.folder
        if name is None:
            raise ApiError(422, "a sampling session takes base_model or model_path")
        base = next((each for each in self._service.models.bases if each.name == name), None)
        if base is None or not base.sampleable:
            served = ", ".join(each.name for each in self._service.models.bases if each.sampleable)
            raise ApiError(400, f"the model {name[:200]} is not served for sampling", fix=f"served is: {served}")
        return name, folder

    async def _join(self, call: Call) -> Any:
        sampler = self._service.sampler(call.owner, call.body(SamplingId).sampling_session_id)
        number = sampler.clones + 1
        self._records.samplers.change(sampler.id, clones=number)
        return {"type": "join_sampling_session", "client_counter": number}

    async def _sampler(self, call: Call) -> Any:
        sampler = self._service.sampler(call.owner, call.path["sampler"])
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.model_path}

    async def _sample(self, call: Call) -> Any:
        """What is wrong in a prompt is told by its future. The samples' ids are fixed now: there is one for each."""
        try:
            given = json.loads(call.raw)
            sampler_id, seq = str(given["sampling_session_id"]), int(given["seq_id"])
            num_samples = int(given.get("num_samples", 1))
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(422, "the body of asample has no sampling_session_id and seq_id") from error
        if not 0 <= seq < 1 << 62 or not 1 <= num_samples <= MOST_SAMPLES:
            raise ApiError(422, f"{num_samples} samples under the number {seq} are not served")
        sampler = self._service.sampler(call.owner, sampler_id)
        try:
            request_id = await self._service.submit(
                call.owner, sampler.session, sampler.id, seq, "sample", call.raw, sequences=num_samples
            )
        except DataError as error:
            raise ApiError(400, error.message, fix=error.fix) from error
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(num_samples)]}
