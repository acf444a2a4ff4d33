"""A Tinker server without a socket, over toy models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from nemorl_agents.tinker.app import tinker_app
from nemorl_agents.tinker.flight.observing import Flight
from nemorl_agents.tinker.keys import Keys
from nemorl_agents.tinker.service import Service, Times
from tinker_toy import BASE, ToyModels, toy_loss

T = TypeVar("T")
KEYS = {"ada": "tml-ada-0123456789", "bob": "tml-bob-0123456789"}


@dataclass
class Talk:
    """A server, and a client of it."""

    service: Service
    models: ToyModels
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, *, owner: str = "ada") -> httpx.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(f"/api/v1{path}", content=raw, headers={"X-API-Key": KEYS[owner]})

    async def get(self, path: str, *, owner: str = "ada") -> Any:
        return (await self.http.get(f"/api/v1{path}", headers={"X-API-Key": KEYS[owner]})).json()

    async def asked(self, path: str, body: Any, *, owner: str = "ada") -> Any:
        answer = await self.post(path, body, owner=owner)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def result(self, path: str, body: Any) -> Any:
        request_id = (await self.asked(path, body))["request_id"]
        while True:
            found = await self.asked("/retrieve_future", {"request_id": request_id})
            if found.get("type") != "try_again":
                return found

    async def session(self, *, owner: str = "ada", **facts: Any) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0", **facts}
        return str((await self.asked("/create_session", body, owner=owner))["session_id"])

    async def model(self, session: str, number: int = 0, *, seed: int = 1) -> str:
        lora = {"rank": 4, "seed": seed}
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": lora}
        return str((await self.result("/create_model", body))["model_id"])

    async def halved(self, model: str, seq: int) -> Any:
        """A step without a gradient, whose decay halves all weights: 1 - 0.5 * 1."""
        adam = {"learning_rate": 0.5, "weight_decay": 1.0}
        return await self.result("/optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})

    async def scale(self, model: str, seed: int = 1) -> float:
        """The weights of a model in memory against those it began with."""
        self.models.create("twin", self.new(seed))
        return float((self.models.adapters[model].a / self.models.adapters["twin"].a).detach().mean())

    @staticmethod
    def new(seed: int) -> Any:
        from nemorl_agents.tinker.models import NewModel

        return NewModel(BASE, 4, seed)


Open = Callable[..., Any]


@pytest.fixture
def talk(tmp_path: Path) -> Open:
    """``async with talk(**times) as it``: a server over one folder, which each one after it goes on with."""

    @asynccontextmanager
    async def opened(
        *, keep_snapshots: int = 16, samples_apart: bool = False, flight: Flight | None = None, **times: float
    ) -> AsyncIterator[Talk]:
        models = ToyModels(samples_apart=samples_apart)
        settings = Times(**{"sweep_s": 3600.0, "hold_s": 5.0, **times})
        service = Service(
            models,
            tmp_path / "served",
            Keys(KEYS),
            toy_loss,
            times=settings,
            keep_snapshots=keep_snapshots,
            flight=flight,
        )
        await service.start()
        transport = httpx.ASGITransport(tinker_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as http:
            try:
                yield Talk(service, models, http)
            finally:
                await service.stop()

    return opened


def run(what: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await what

    return asyncio.run(awaited())
