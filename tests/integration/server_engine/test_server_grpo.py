"""GRPO with a vLLM server against GRPO with vLLM in the trainer's process: the same rewards in every step.

The two sample with the same code of vLLM, from the same weights (written and read without rounding, in float32), with
the same seeds, and neither's log-probs enter the update: so tokens are equal, and rewards to the last bit. What may
differ is which requests share a batch. A product of another shape may round otherwise, in the seventh digit; a token
would change only where a random number falls into that gap.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl_testing.models import tiny_model
from server_runs import STEPS, run, seen
from vllm_server import PLAIN, VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full]


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
