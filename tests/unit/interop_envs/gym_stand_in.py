"""A server that speaks NeMo-Gym's protocol, as its v0.5.0 does: head server, one agent, one model server to forward to.

Also a program, started as ``ng_run`` is: ``python gym_stand_in.py +policy_base_url=… +head_server={host:…,port:…}``.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, web

AGENT = "toy_simple_agent"


class Gym:
    """The head server, and an agent beside it at ``/toy``."""

    def __init__(self, policy_base_url: str) -> None:
        self.policy_base_url = policy_base_url
        self.got: list[Mapping[str, Any]] = []
        """Bodies of ``/run``."""
        self.port = 0
        app = web.Application()
        app.router.add_get("/server_instances", self.instances)
        app.router.add_get("/toy", self.alive)
        app.router.add_post("/toy/run", self.run)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self, port: int = 0) -> None:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]

    async def alive(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def instances(self, _: web.Request) -> web.Response:
        url = f"http://127.0.0.1:{self.port}/toy"
        agent = {"process_name": AGENT, "server_type": "responses_api_agents", "name": "simple_agent", "url": url}
        tools = {"process_name": "toy", "server_type": "resources_servers", "name": "toy", "url": url}
        return web.json_response([agent, tools])

    async def run(self, request: web.Request) -> web.Response:
        """Asks the policy ``rounds`` times; reward 1 where its last text is ``wanted``, or its share of digits."""
        row = await request.json()
        self.got.append(row)
        if "answers" in row:
            return web.Response(status=row.get("status", 200), text=row["answers"])
        items, text = [*row["responses_create_params"]["input"]], ""
        async with ClientSession() as client:
            for _ in range(row.get("rounds", 1)):
                told = await self._model(client, row, items)
                if isinstance(told, web.Response):
                    return told
                items += told["output"]
                text = "".join(part["text"] for item in told["output"] for part in item.get("content") or ())
        reward = digits(text) if row["wanted"] == "digits" else float(text == row["wanted"])
        verified = {"reward": reward, "length": len(text), "wanted": row["wanted"]}
        return web.json_response({**row, "response": told, **verified, **row.get("verifier", {})})

    async def _model(self, client: ClientSession, row: Mapping[str, Any], items: Any) -> Any:
        """One call, by the path that names the episode or by the metadata that came with the row."""
        root = self.policy_base_url.removesuffix("/v1")
        body = {**row["responses_create_params"], "input": items, "model": "policy"}
        if row.get("in_path"):
            root += f"/ng-rollout/{row['_ng_rollout_id']}/training-token-capture"
            del body["metadata"]
        elif row.get("forgets"):
            del body["metadata"]
        async with client.post(f"{root}/v1/responses", json=body) as answer:
            if answer.status != 200:
                return web.Response(status=500, text=f"inner server: {answer.status} {await answer.text()}")
            return await answer.json()


def digits(text: str) -> float:
    """The share of its characters that are digits."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


@contextmanager
def running(policy_base_url: str) -> Iterator[Gym]:
    from nemorl_rl.environments.loop_thread import LoopThread

    gym, thread = Gym(policy_base_url), LoopThread("gym-stand-in")
    asyncio.run_coroutine_threadsafe(gym.start(), thread.loop).result(10)
    try:
        yield gym
    finally:
        asyncio.run_coroutine_threadsafe(gym.runner.cleanup(), thread.loop).result(10)
        thread.stop()


async def _main(arguments: list[str]) -> None:
    told = " ".join(arguments)
    [policy] = re.findall(r"\+policy_base_url=(\S+)", told)
    [port] = re.findall(r"\+head_server=\{host:127\.0\.0\.1,port:(\d+)\}", told)
    print("Waiting for servers to spin up", flush=True)
    if "+broken=true" in arguments:
        sys.exit("uv: no such file")
    await Gym(policy).start(int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
