"""What the gateway adds: 64 episodes that ask an `hf` engine directly, and the same over HTTP.

    python benchmarks/gateway.py --repeats 5 --json

Each episode is a conversation of four turns, whose answers have 32 to 224 tokens, drawn with a fixed seed: as many on
both sides. All run at once, first with `policy.chat` on an event loop of the driver, then from a process of clients
(httpx, kept connections) through the gateway. CPU seconds are the driver's, all threads: what the clients take is
theirs, as it is an agent's. Pairs are measured one after the other, and the medians of their ratios are given.
`alone`: the same requests to a policy that answers at once, without an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side, write_model

THREADS = limit_threads()

import httpx  # noqa: E402  after the thread limit
from nemorl.config.models import GenerationConfig, PolicyConfig  # noqa: E402
from nemorl.types import Completion  # noqa: E402
from nemorl_agents.gateway.gateway import Gateway  # noqa: E402
from nemorl_rl.agents.contract import CallOptions, ChatReply, EpisodeLimits  # noqa: E402
from nemorl_rl.agents.policy import LivePolicy, Sampler  # noqa: E402
from nemorl_rl.chat.codec import codec_of  # noqa: E402
from nemorl_rl.chat.conversation import Conversation  # noqa: E402
from nemorl_rl.data.tokenizer import Tokenizer  # noqa: E402
from nemorl_rl.placement.engines import standalone_generation  # noqa: E402

EPISODES, TURNS, SHORTEST, LONGEST = 64, 4, 32, 224
LIMITS = EpisodeLimits(max_sequence_tokens=1024, max_new_tokens=LONGEST, max_calls=TURNS, timeout_s=600.0)

Ask = Callable[[list[dict[str, Any]], int], Awaitable[dict[str, Any]]]
"""A history and the tokens of its answer, to the answer's message."""


async def converse(ask: Ask, number: int) -> None:
    """One episode: the answer goes into the history, and the next question after it."""
    draw = random.Random(number)
    history: list[dict[str, Any]] = [{"role": "user", "content": f"{number}+1="}]
    for _ in range(TURNS):
        answer = await ask(history, draw.randint(SHORTEST, LONGEST))
        history += [answer, {"role": "user", "content": "and one more?"}]


class AtOnce:
    """A policy without an engine."""

    episode_id, limits, text = "at once", LIMITS, None

    async def chat(self, messages: Any, **_: Any) -> ChatReply:
        completion = Completion((7,) * SHORTEST, (-0.5,) * SHORTEST, "length")
        return ChatReply({"role": "assistant", "content": "x" * SHORTEST}, completion, len(messages))

    async def complete(self, token_ids: Any, **_: Any) -> Completion:
        raise NotImplementedError


class Episodes:
    """Fresh policies over one engine."""

    def __init__(self, model: Path) -> None:
        generation = GenerationConfig.model_validate({"backend": "hf", "max_new_tokens": LONGEST})
        config = PolicyConfig(model_name=str(model), max_sequence_tokens=LIMITS.max_sequence_tokens)
        self.codec = codec_of(Tokenizer.of(config))
        self.engine = standalone_generation(generation, config)
        self.sampler = Sampler(self.engine, generation.sampling(ignore_eos=True), honours_clients=False)

    def open(self) -> list[LivePolicy]:
        return [
            LivePolicy(
                self.sampler, Conversation(self.codec, number), episode_id=str(number), limits=LIMITS, seed=number
            )
            for number in range(EPISODES)
        ]


def directly(policies: list[Any]) -> None:
    def asking(policy: Any) -> Ask:
        async def ask(history: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
            return dict((await policy.chat(history, options=CallOptions(max_new_tokens=tokens))).message)

        return ask

    async def play() -> None:
        await asyncio.gather(*(converse(asking(policy), number) for number, policy in enumerate(policies)))

    asyncio.run(play())


def through(gateway: Gateway, clients: subprocess.Popen[str], policies: list[Any]) -> None:
    """Over HTTP: the process of clients is told where, and says when it has done."""
    accesses = [gateway.open(policy) for policy in policies]
    assert clients.stdin is not None
    assert clients.stdout is not None
    print(json.dumps([(one.openai_base_url, one.api_key) for one in accesses]), file=clients.stdin, flush=True)
    said = clients.stdout.readline()
    assert said == "done\n", said
    for access in accesses:
        traffic = gateway.close(access)
        assert traffic.requests == TURNS, traffic


def be_clients() -> None:
    """The process of clients: a line of addresses, then a conversation with each."""

    def asking(client: httpx.AsyncClient, url: str, key: str) -> Ask:
        async def ask(history: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
            body = {"model": "policy", "messages": history, "max_tokens": tokens}
            answer = await client.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            found: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
            return found

        return ask

    async def play(addresses: list[tuple[str, str]], client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(converse(asking(client, *one), number) for number, one in enumerate(addresses)))

    async def all_rounds() -> None:
        async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None)) as client:
            for line in sys.stdin:
                await play(json.loads(line), client)
                print("done", flush=True)

    asyncio.run(all_rounds())


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of this process, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(repeats: int) -> dict[str, float]:
    clients = subprocess.Popen(
        [sys.executable, __file__, "--clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with tempfile.TemporaryDirectory() as folder, clients, Gateway() as gateway:
        episodes = Episodes(write_model(Path(folder)))
        direct, over_http, alone = [], [], []
        for number in range(repeats + 1):
            sides = [
                timed(lambda: directly(list(episodes.open()))),
                timed(lambda: through(gateway, clients, list(episodes.open()))),
                timed(lambda: through(gateway, clients, [AtOnce() for _ in range(EPISODES)])),
            ]
            if number:  # the first is to warm up
                for found, side in zip((direct, over_http, alone), sides, strict=True):
                    found.append(side)
        episodes.engine.shutdown()
        assert clients.stdin is not None
        clients.stdin.close()

    def median(values: list[tuple[float, float]], place: int) -> float:
        return statistics.median(one[place] for one in values)

    pairs = list(zip(direct, over_http, alone, strict=True))
    return {
        "generation_cpu_s": median(direct, 0),
        "generation_wall_s": median(direct, 1),
        "gateway_cpu_s": median(over_http, 0),
        "gateway_wall_s": median(over_http, 1),
        "alone_cpu_s": median(alone, 0),
        "cpu_overhead_frac": statistics.median(b[0] / a[0] - 1 for a, b, _ in pairs),
        "wall_overhead_frac": statistics.median(b[1] / a[1] - 1 for a, b, _ in pairs),
        "alone_over_generation_cpu_frac": statistics.median(c[0] / a[0] for a, _, c in pairs),
        "alone_cpu_ms_per_request": 1000 * median(alone, 0) / (EPISODES * TURNS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", action="store_true", help="be the process of clients")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    arguments = parser.parse_args()
    if arguments.clients:
        be_clients()
        return
    start_side(THREADS)
    result = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps({**result, "machine": machine(THREADS)}))
        return
    print(machine(THREADS))
    print_table("64 conversations, directly and over HTTP", [*result], [[f"{value:.3g}" for value in result.values()]])


if __name__ == "__main__":
    main()
