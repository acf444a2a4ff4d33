"""Requests of models: made, trained, saved and loaded, all of them by futures; and the futures themselves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from nemorl.errors import DataError
from starlette.responses import Response

from nemorl_agents.tinker.calls import Call, Endpoint
from nemorl_agents.tinker.errors import ApiError, missing
from nemorl_agents.tinker.records import Kind
from nemorl_agents.tinker.service import Service
from nemorl_agents.tinker.wire.bodies import Body, CreateModel, LoadWeights
from nemorl_agents.tinker.wire.data import pass_body

INLINE_BYTES = 4 << 20
"""A longer answer is announced by its size first, where the client can take that: it limits what it holds at once."""


class FutureId(Body):
    request_id: str
    allow_metadata_only: bool = False
    model_id: str | None = None


class ModelId(Body):
    model_id: str


class TrainingRoutes:
    """Takes in requests of models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        def numbered(kind: Kind) -> Endpoint:
            async def submit(call: Call) -> Any:
                return await self._numbered(call, kind)

            return Endpoint("POST", f"/{kind}", submit)

        saves: tuple[Kind, ...] = ("save_weights", "save_weights_for_sampler", "save_weights_external")
        return [
            Endpoint("POST", "/create_model", self._create),
            Endpoint("POST", "/load_weights", self._load),
            Endpoint("POST", "/forward_backward", self._forward_backward),
            numbered("optim_step"),
            *map(numbered, saves),
            Endpoint("POST", "/get_info", self._info),
            Endpoint("POST", "/unload_model", self._unload),
            Endpoint("POST", "/create_custom_loss", self._custom_loss),
            Endpoint("POST", "/retrieve_future", self._retrieve),
            Endpoint("POST", "/retrieve_futures", self._retrieve_all),
            Endpoint("POST", "/cancel_future", self._cancel),
        ]

    async def _create(self, call: Call) -> Any:
        body = call.body(CreateModel)
        return await self._first(call, body.session_id, body.model_seq_id, "create_model")

    async def _load(self, call: Call) -> Any:
        body = call.body(LoadWeights)
        if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
            return await self._first(call, body.session_id, body.model_seq_id, "load_weights")
        if body.model_id is None or body.session_id is not None:
            raise ApiError(422, "load_weights takes model_id and seq_id, or session_id and model_seq_id")
        return await self._numbered(call, "load_weights")

    async def _first(self, call: Call, session_id: str, model_seq_id: int, kind: Kind) -> Any:
        """The request that makes a model. Clients derive the model's id themselves: it has this form."""
        model_id = f"{session_id}:train:{model_seq_id}"
        request_id = await self._service.submit(call.owner, session_id, model_id, 0, kind, call.raw)
        return {"request_id": request_id, "model_id": model_id}

    async def _numbered(self, call: Call, kind: Kind) -> Any:
        """A request of a model in JSON. What else is wrong in it is told by its future: its number is taken."""
        try:
            given = json.loads(call.raw)
            model_id, seq = str(given["model_id"]), int(given["seq_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(422, f"the body of {kind} has no model_id and seq_id") from error
        return await self._submit(call, model_id, seq, kind)

    async def _forward_backward(self, call: Call) -> Any:
        body, canonical = await asyncio.to_thread(_canonical, call.raw)
        return await self._submit(call, body[0], body[1], "forward_backward", canonical)

    async def _submit(self, call: Call, model_id: str, seq: int, kind: Kind, canonical: bytes | None = None) -> Any:
        session_id, is_model, _ = model_id.rpartition(":train:")
        if not is_model:
            raise missing("model", model_id)
        if not 1 <= seq < 1 << 60:
            raise ApiError(422, f"seq_id: {seq} is not the number of a request", fix="count from 1 in each model")
        request_id = await self._service.submit(
            call.owner, session_id, model_id, seq, kind, call.raw, canonical=canonical
        )
        return {"request_id": request_id, "model_id": model_id}

    async def _info(self, call: Call) -> Any:
        model = self._service.model(call.owner, call.body(ModelId).model_id)
        name = model.new["base_model"]
        tokenizers = [base.tokenizer for base in self._service.models.bases if base.name == name]
        tokenizer = (tokenizers[0] if tokenizers else None) or name
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": tokenizer},
            "is_lora": True,
            "lora_rank": model.new["rank"],
            "model_name": name,
        }

    async def _unload(self, call: Call) -> Any:
        model_id = call.body(ModelId).model_id
        return {"request_id": await self._service.unload(call.owner, model_id), "model_id": model_id}

    async def _custom_loss(self, call: Call) -> Any:
        raise ApiError(
            400,
            "custom losses are not run by this server: its client/config has custom_loss_server_side off",
            fix="forward_backward_custom runs them at the client",
        )

    # Futures

    async def _retrieve(self, call: Call) -> Any:
        body = call.body(FutureId)
        answer = await self._service.futures.answer(call.owner, body.request_id)
        if answer.state == "waiting":
            reason = self._service.waits_for(body.request_id)
            state = "active" if reason is None else "paused_capacity"
            return {
                "type": "try_again",
                "request_id": body.request_id,
                "queue_state": state,
                "queue_state_reason": reason,
            }
        if body.allow_metadata_only and len(answer.payload) > INLINE_BYTES:
            return {"status": "complete_metadata", "response_payload_size": len(answer.payload)}
        return Response(answer.payload, media_type=answer.media_type)

    async def _retrieve_all(self, call: Call) -> Any:
        raise ApiError(
            400,
            "retrieve_futures is not served: this server's client/config has sample_use_retrieve_futures off",
            fix="ask retrieve_future for each",
        )

    async def _cancel(self, call: Call) -> Any:
        self._service.cancel(call.owner, call.body(FutureId).request_id)
        return {}


def _canonical(raw: bytes) -> tuple[tuple[str, int], bytes]:
    """((model, number), bytes that are equal for equal messages): protobuf's maps have no order of their own."""
    try:
        body = pass_body(raw)
    except DataError as error:
        raise ApiError(400, error.message, fix=error.fix) from error
    return (body.model_id, body.seq_id), body.message.SerializeToString(deterministic=True)
