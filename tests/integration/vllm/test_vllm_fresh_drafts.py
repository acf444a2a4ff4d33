"""A draft that is kept fresh: its weights come with the policy's, and its guesses are accepted as the policy learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import BackendError
from nemorl.metrics import values
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback
from nemorl_tensors.engines.drafted import DraftedHandle
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from safetensors.torch import load_file
from vllm_engines import changed, gaps, handle_of, second_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = (9, 18, 10)
TOLERANCE = 1e-4


def requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return [GenerationRequest(PROMPT, params, tuple(range(count)))]


def both(policy: Any, draft: Any, version: int) -> WeightHandle:
    return DraftedHandle.of(handle_of(policy, version), handle_of(draft, version))


def acceptance(engine: Any) -> float:
    return values(engine.take_metrics())["draft_acceptance_rate"]


def test_an_update_brings_the_draft_its_weights_and_leaves_the_policys_exact(build: Any, raises: Raises) -> None:
    policy, draft = load_reference(tiny_model()), load_reference(tiny_model(num_hidden_layers=1))
    guesses = {"method": "draft_model", "model": str(tiny_model(num_hidden_layers=1)), "num_speculative_tokens": 3}
    engine = build(tiny_model(), both(policy, draft, 0), speculative=guesses)
    asked = requests(16)
    assert max(gaps(policy, asked, engine.generate(asked))) < TOLERANCE
    stale = acceptance(engine)
    assert stale < 0.6

    # A draft of one layer that the policy's tokens are drawn from: all of the second layer adds nothing.
    for name, parameter in policy.named_parameters():
        if name.startswith("model.layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    draft.load_state_dict({name: policy.state_dict()[name] for name in draft.state_dict()})
    engine.update_weights(both(policy, draft, 1), 1)
    assert max(gaps(policy, asked, engine.generate(asked))) < TOLERANCE
    assert acceptance(engine) > 0.999

    # What is no draft of this engine leaves it unusable until an update that is.
    with raises(BackendError, varies=r"\{.*\}"):
        engine.update_weights(both(policy, load_reference(tiny_model(num_hidden_layers=3)), 2), 2)
    with raises(BackendError):
        engine.generate(asked)
    engine.update_weights(both(policy, changed(draft, seed=5), 3), 3)
    assert max(gaps(policy, asked, engine.generate(asked))) < TOLERANCE
    assert 0.05 < acceptance(engine) < 0.95


def test_tokens_are_distributed_as_the_policy_says_after_an_update_of_both(build: Any) -> None:
    policy, draft = load_reference(tiny_model()), changed(load_reference(tiny_model()), seed=7)
    guesses = {"method": "draft_model", "model": str(tiny_model()), "num_speculative_tokens": 3}
    engine = build(tiny_model(), both(changed(load_reference(tiny_model()), seed=2), policy, 0), speculative=guesses)
    engine.update_weights(both(policy, draft, 1), 1)
    (group,) = engine.generate(requests(2000, max_new_tokens=2))
    _, _, chi2, degrees = second_tokens(group, PROMPT, 1.0)
    # Mean and standard deviation of chi-squared are k and sqrt(2 k).
    assert abs(chi2 - degrees) < 4 * (2 * degrees) ** 0.5
    assert 0.05 < acceptance(engine) < 0.95


@pytest.mark.full
def test_processes_that_share_each_layer_all_get_the_draft(build: Any) -> None:
    shared = tiny_model(num_key_value_heads=2)
    guesses = {"method": "draft_model", "model": str(shared), "num_speculative_tokens": 3}
    policy = load_reference(shared)
    engine = build(shared, both(policy, policy, 0), speculative=guesses, tensor_parallel_size=2)
    changed(policy, seed=3)
    engine.update_weights(both(policy, policy, 1), 1)  # memory that the processes map, for either model
    asked = requests(8)
    assert max(gaps(policy, asked, engine.generate(asked))) < TOLERANCE
    assert acceptance(engine) > 0.999


# In a run

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]


def settings(run_dir: Path, model: Path, fresh: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    guesses = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "keep_fresh": fresh}
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "policy": {"optimizer": {"lr": 3e-3}, "max_sequence_tokens": 64},
        "generation": {
            "backend": {"name": "vllm", "kv_cache_gib": 0.1, "speculative": guesses},
            "max_new_tokens": 24,
        },
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 16,
        "kl_penalty": 0.0,
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        "max_steps": 16,
        **changes,
    }


def fit(given: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The records of all steps of a run that is rewarded for digits."""
    import nemorl

    def digits(prompt: str, response: str) -> float:
        return sum(character.isdigit() for character in response) / max(1, len(response))

    nemorl.load_config(given).build().fit(ROWS, digits, console=Console(quiet=True), **options)
    return [record for record in read_jsonl(Path(given["run_dir"]) / "metrics.jsonl") if "train/loss" in record]


def test_a_policy_that_learns_loses_a_draft_that_stays_and_keeps_one_that_follows(tmp_path: Path) -> None:
    stays = fit(settings(tmp_path / "stays", tiny_model(), None))
    follows = fit(settings(tmp_path / "follows", tiny_model(), {"lr": 3e-3, "updates": 4}))
    rates = [[step["train/draft_acceptance_rate"] for step in run] for run in (stays, follows)]
    assert rates[0][0] == rates[1][0] == 1.0  # both begin as the policy itself
    assert rates[0][-1] < 0.1
    assert rates[1][-1] > 0.7
    assert min(rates[1]) < rates[1][-1] - 0.1  # it had fallen behind, and caught up
    for one, other in zip(stays, follows, strict=True):
        assert one["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert other["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert stays[-1]["train/reward"] > 0.9
    assert follows[-1]["train/reward"] > 0.9
    losses = [step["train/draft_loss"] for step in follows]
    assert max(losses) > 0.2
    assert losses[-1] < 0.1


class KillItself(Callback):
    """Ends the process once the draft has learnt from the third step."""

    def on_rollout_end(self, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_same_draft(tmp_path: Path) -> None:
    changes = {"max_steps": 4, "checkpoint": {"every": 1, "keep_last": 9, "export": False}}
    run, whole = (settings(tmp_path / name, tiny_model(), {"lr": 3e-3}, **changes) for name in ("run", "whole"))
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, __file__, json.dumps(run)], check=False, timeout=240, env=paths)
    assert killed.returncode == -signal.SIGKILL
    found, wanted = fit(run, resume=True), fit(whole)
    names = ("train/draft_loss", "train/draft_acceptance_rate", "train/reward", "train/loss")
    assert [[step[name] for name in names] for step in found] == [[step[name] for name in names] for step in wanted]
    for step in range(1, 5):
        [one], [other] = (
            list((tmp_path / name / f"checkpoints/step_{step:06d}/draft/model").iterdir()) for name in ("run", "whole")
        )
        weights = load_file(one), load_file(other)
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


if __name__ == "__main__":
    fit(json.loads(sys.argv[1]), callbacks=[KillItself()])
