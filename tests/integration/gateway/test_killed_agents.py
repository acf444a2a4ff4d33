"""Two hundred programs at once over a real engine, which hang up and are killed at random: nothing is lost or left.

Each round is a rollout of the environment ``agent``. What a program was told, it prints; the reward looks it up in what
its own policy said. After a first round, open files, threads and processes must stay as they are, and no object of an
episode may be left. Resident memory is printed: what grows there is in test_engine_memory and docs/results/agents.md.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nemorl.config.component import Component
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.types import Prompt, Samples
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.placement.engines import standalone_generation
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_testing.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.full]

PROMPTS, GROUP, ROUNDS = 50, 4, 4
OURS = ("LivePolicy", "OpenEpisode", "Conversation", "WatchedPolicy", "Call", "EpisodeFolder", "Program")
MOST_OBJECTS = 5
"""For each episode, of all kinds: what the HTTP server keeps for two minutes of connections that were reset."""
AGENT = """
import http.client, json, os, random, signal, socket, sys, threading, time
from urllib.parse import urlsplit
chance = random.Random(os.environ["NEMORL_EPISODE"])
base = urlsplit(os.environ["OPENAI_BASE_URL"])
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
if chance.random() < 0.3:  # the end, at any moment
    threading.Timer(chance.random() * 3, os.kill, (os.getpid(), signal.SIGKILL)).start()
history = [{"role": "user", "content": sys.argv[1]}]
for turn in range(4):
    body = json.dumps({"model": "policy", "messages": history, "stream": False}).encode()
    for hangs_up in (*[True] * (chance.random() < 0.3), False):
        link = http.client.HTTPConnection(base.hostname, base.port, timeout=300)
        link.request("POST", base.path + "/chat/completions", body, head)
        if hangs_up:
            time.sleep(chance.random() * 0.5)
            link.close()
    answer = link.getresponse()
    said = json.load(answer)
    link.close()
    if answer.status != 200:
        break
    message = said["choices"][0]["message"]
    print(json.dumps([turn, message["content"]]), flush=True)
    history += [message, {"role": "user", "content": str(turn)}]
os._exit(0)
"""
REWARD = """
import json
def all_is_known(prompt, response, answer, episode):
    said = [message["content"] for message in episode.messages]
    lines = [line for line in episode.stdout.splitlines() if line.endswith("]")]
    told = [json.loads(line)[1] for line in lines]
    return {"known": float(all(text in said for text in told)), "told": float(len(told))}
"""


@pytest.fixture
def rollouts(tmp_path: Path) -> Iterator[RolloutEngine]:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.py").write_text(REWARD)
    model = tiny_model()
    generation = GenerationConfig.model_validate(
        {"backend": {"name": "hf", "kv_cache_tokens": 512}, "max_new_tokens": 12}
    )
    policy = standalone_generation(generation, PolicyConfig(model_name=str(model), max_sequence_tokens=256))
    every = dict.fromkeys(("crashed", "no_calls", "stopped", "timeout"), "reward")
    options = {
        "name": "agent",
        "command": [sys.executable, "-I", "-S", str(tmp_path / "agent.py"), "{prompt}"],
        "reward": f"{tmp_path / 'reward.py'}:all_is_known",
        "outcomes": every,
        "give_up_after": PROMPTS * GROUP,
    }
    environment = Component("environments").resolve(options).build()  # type: ignore[attr-defined]
    pool = EnvironmentPool(environment, episode_timeout_s=550.0, concurrency=PROMPTS * GROUP)
    yield RolloutEngine(policy, pool, Tokenizer.load(str(model)), max_sequence_tokens=256)
    pool.close()
    policy.shutdown()


def test_two_hundred_killed_and_disconnected_agents_lose_and_leave_nothing(rollouts: RolloutEngine) -> None:
    before = what_is_there()  # of other tests of this process
    left: list[dict[str, float]] = []
    for number in range(ROUNDS):
        played = play(rollouts, number)
        require_whole(played)
        del played
        left.append(what_is_there())
        print(left[-1])
    first, last = left[0], left[-1]
    assert {name: last[name] for name in (*OURS, "children")} == {name: before[name] for name in (*OURS, "children")}
    assert last["threads"] <= first["threads"]
    assert last["files"] <= first["files"]
    assert last["tasks"] <= first["tasks"]
    assert last["objects"] - first["objects"] < PROMPTS * GROUP * (ROUNDS - 1) * MOST_OBJECTS


def play(rollouts: RolloutEngine, number: int) -> Samples:
    told = rollouts.tokenizer
    prompts = [Prompt(n, f"{n}+1=", tuple(told.encode(f"{n}+1=")), row={"prompt": f"{n}+1="}) for n in range(PROMPTS)]
    sampling = GenerationConfig.model_validate({"max_new_tokens": 12}).sampling()
    return rollouts.collect(prompts, RolloutPlan(GROUP, sampling), seed=number)


def require_whole(played: Samples) -> None:
    """Every episode is there, what its program was told is its policy's, and each sampled token is trained once."""
    assert len(played) == PROMPTS * GROUP
    totals: Counter[str] = Counter()
    for sample in played:
        totals.update(sample.score.metrics)
        totals.update(sample.score.components)
        assert sample.score.components["known"] == 1.0
        assert sample.turns >= sample.score.components["told"]
        trained = sum(map(sum, (sample.response_mask, *(branch.response_mask for branch in sample.branches))))
        assert trained == sample.score.metrics["delivered_tokens"]
    print({name: totals[name] for name in ("calls", "told", "sequences", "outcome_crashed", "gateway_disconnects")})
    assert totals["outcome_crashed"] > PROMPTS * GROUP / 20, "hardly any was killed"
    assert totals["gateway_disconnects"] > PROMPTS * GROUP / 10, "hardly any hung up"
    assert totals["gateway_failures"] == 0


def what_is_there() -> dict[str, float]:
    """Resident memory, open files, threads, processes and objects, once garbage is collected."""
    gc.collect()
    types = Counter(type(one).__name__ for one in gc.get_objects())
    process = psutil.Process(os.getpid())
    return {
        "rss_mib": round(process.memory_info().rss / 2**20, 1),
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "children": len(process.children()),
        "tasks": types["Task"] + types["_asyncio.Task"],
        "objects": sum(types.values()),
        **{name: types[name] for name in OURS},
    }
