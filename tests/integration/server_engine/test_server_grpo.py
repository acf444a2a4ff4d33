"""GRPO with a vLLM server against GRPO with vLLM in the trainer's process: the same rewards in every step.

The two sample with the same code of vLLM, from the same weights (written and read without rounding, in float32), with
the same seeds, and neither's log-probs enter the update: so tokens are equal, and rewards to the last bit. What may
differ is which requests share a batch. A product of another shape may round otherwise, in the seventh digit; a token
would change only where a random number falls into that gap.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nemorl_testing.models import tiny_model
from vllm_server import EXTENDED, PLAIN, VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
STEPS = 4
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]


def digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(1, len(response))


def run(
    folder: Path, model: Path, backend: dict[str, Any], reward: Callable[[str, str], float] = digits
) -> list[dict[str, float]]:
    """The metrics of each training step."""
    from nemorl_commands.console import Console
    from nemorl_grpo.config import GRPOConfig

    config = GRPOConfig(
        model=str(model),
        policy={"optimizer": {"lr": 3e-3}, "max_sequence_tokens": 64},
        generation={"backend": backend, "max_new_tokens": 12, "temperature": 0.9},
        num_prompts_per_step=4,
        num_generations_per_prompt=8,
        kl_penalty=0.0,
        max_steps=STEPS,
        validation={"every": 0},
        checkpoint={"every": 0, "export": False},
        run_dir=folder,
    )
    config.build().fit(dataset=ROWS, reward_fn=reward, console=Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/reward" in line]


def seen(lines: list[dict[str, float]]) -> list[tuple[float, ...]]:
    names = ("train/reward", "train/mean_gen_tokens_per_sample", "train/loss", "train/grad_norm")
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.full
def test_rewards_equal_those_of_the_engine_in_process(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    server = VLLMServer(model, tmp_path / "log", options=PLAIN)
    try:
        wanted = run(tmp_path / "in-process", model, {"name": "vllm", "kv_cache_gib": 0.1})
        server.wait()
        found = run(tmp_path / "served", model, {"name": "server", "urls": [server.url]})
    finally:
        server.kill()
    assert seen(found) == seen(wanted)
    assert len({line["train/reward"] for line in found}) == STEPS
    assert max(line["train/token_mult_prob_error"] for line in found) < 1.001  # float32
    assert not list((tmp_path / "served" / "scratch" / "engines" / "weights").iterdir())


def test_a_run_whose_server_is_killed_and_replaced_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    model = tiny_model()  # tied embeddings: the workers run nemorl-vllm's extension
    server = VLLMServer(model, tmp_path / "log", options=EXTENDED)
    scored = [0]

    def kill_in_the_second_step(prompt: str, response: str) -> float:
        scored[0] += 1
        if scored[0] == 40:  # of 32 in a step: the next rollout finds nobody, then a process with the weights on disk
            server.kill()
            threading.Thread(target=server.start_again).start()
        return digits(prompt, response)

    try:
        server.wait()
        wanted = run(tmp_path / "undisturbed", model, {"name": "server", "urls": [server.url]})
        found = run(tmp_path / "killed", model, {"name": "server", "urls": [server.url]}, kill_in_the_second_step)
    finally:
        server.kill()
    assert seen(found) == seen(wanted)
    state = json.loads((tmp_path / "killed" / "scratch" / "engines" / "state.json").read_text())
    assert state["servers"][0]["lost"] >= 1
