"""``compare replay --generation vllm``: a step of a run that another engine sampled, sampled or scored by vLLM."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import Command, command
from nemorl_rl.models.tiny import write_tiny_model
from real_runs import real_run

pytestmark = [pytest.mark.full, pytest.mark.vllm]

BOUND = 1.4e-3
"""Nats. Between embedding and log-prob of this model lie two layers of seven matrices and one of the head, whose sums
have at most 256 terms: fewer than 3,900 roundings one after the other, each of 2^-24 = 6e-8 of values that are below 6:
3900 * 6e-8 * 6."""
SEQUENCE = tuple[list[int], list[float]]


@pytest.fixture
def nemorl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch, capfd)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of each token the most likely one is taken, so that seeds decide nothing."""
    model = write_tiny_model(tmp_path / "model")
    return real_run(model, tmp_path / "run", max_steps=2, generation={"top_k": 1})


def test_vllm_takes_the_tokens_of_another_engine_and_scores_them_up_to_rounding(
    run: Path, nemorl: Command, tmp_path: Path
) -> None:
    recorded = _sampled(run)
    for only in ([], ["--only", "sampler"]):
        folder = tmp_path / f"replay{len(only)}"
        asked = ["compare", "replay", run, "--step", 2, "--generation", "vllm", *only, "--output", folder, "--json"]
        done = nemorl(*asked, "--tolerance", BOUND)
        assert done.code == 0, done.err + done.out
        parts = [finding["part"] for finding in done.json["steps"]]
        assert parts[:2] == (["tokens"] if only else ["data", "tokens"])
        found = _sampled(folder)
        assert [ids for ids, _ in found] == [ids for ids, _ in recorded]
        gaps = [
            abs(a - b)
            for (_, one), (_, two) in zip(found, recorded, strict=True)
            for a, b in zip(one, two, strict=True)
        ]
        assert 0 < max(gaps) < BOUND  # another computation, of the same thing


def _sampled(run: Path) -> list[SEQUENCE]:
    """Token ids and the sampler's log-probs of step 2, by sample."""
    rows = pq.read_table(run / "records/train/step_000002.parquet").to_pylist()
    rows.sort(key=lambda row: row["sample_id"])
    return [(row["sequences"][0]["token_ids"], row["sequences"][0]["generation_logprobs"]) for row in rows]
