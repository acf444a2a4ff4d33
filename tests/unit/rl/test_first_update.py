"""The first update of a step is the old policy's own: its forward pass finds the log-probs that the others are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl import Callback, Console
from nemorl.config import load_config
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer


class Told(Callback):
    """Notes of each optimizer step whether its loss read old log-probs, and the sequences of each pass for them."""

    def __init__(self) -> None:
        self.reads: list[bool] = []
        self.ratios: list[tuple[float, float]] = []
        self.scored: list[int] = []

    def on_fit_begin(self, trainer: Any) -> None:
        policy = trainer.run.policy
        train_step, with_logprobs = policy.train_step, policy.with_logprobs

        def step(minibatch: Any, loss: Any) -> Any:
            self.reads.append("old_logprobs" in loss.requires)
            metrics = train_step(minibatch, loss)
            self.ratios.append((metrics["probs_ratio_min"].value, metrics["probs_ratio_max"].value))
            return metrics

        def score(batch: Any, *named: Any) -> Any:
            self.scored.append(len(batch))
            return with_logprobs(batch, *named)

        policy.train_step, policy.with_logprobs = step, score


def run(tiny_model: Path, folder: Path, algorithm: str = "grpo", **changes: Any) -> tuple[Told, list[dict[str, float]]]:
    config = {
        "algorithm": algorithm,
        "model": str(tiny_model),
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-2}},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        "rollouts": {"mismatch_limit": None},
        "max_steps": 1,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "num_minibatches": 4,
        "num_epochs_per_rollout": 1,
        "kl_penalty": 0.0,
        "run_dir": str(folder),
        **changes,
    }
    told = Told()
    rows = [{"prompt": f"{a}+1="} for a in range(2)]
    given: dict[str, Any] = {"callbacks": [told], "console": Console(quiet=True)}
    found = load_config(config).build().fit(rows, lambda prompt, response: len(set(response)) / 3, **given)
    return told, [dict(record) for record in found.history]


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "ppo"])
def test_the_first_of_four_minibatches_is_not_scored_before_it(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    told, _ = run(tiny_model, tmp_path / "run", algorithm)
    assert told.reads == [False, True, True, True]
    assert told.scored == [6]  # 8 responses in 4 minibatches: three quarters of the pass
    assert told.ratios[0] == (1.0, 1.0)
    assert told.ratios[1] != (1.0, 1.0)


@pytest.mark.slow
def test_the_step_is_the_one_that_scores_all_responses_before_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correction = {"importance_correction": {"kind": "truncated"}}
    _, (found,) = run(tiny_model, tmp_path / "found", **correction)
    monkeypatch.setattr(PolicyGradientTrainer, "first_loss", None)
    told, (wanted,) = run(tiny_model, tmp_path / "wanted", **correction)
    assert told.scored == [8]
    timed = ("timing/", "performance/")
    kept = {name: value for name, value in wanted.items() if not name.startswith(timed)}
    # Quantiles of a mismatch of 1e-7 nats are those of its rounding.
    kept = {name: value for name, value in kept.items() if "logprob_error" not in name and "gen_kl" not in name}
    assert {name: found[name] for name in kept} == pytest.approx(kept, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_epochs_per_rollout": 2},
        {"max_sequence_error": 2.0},
        {"kl_penalty": 0.1, "kl_in": "reward"},
        {"filtered_logprobs": True, "generation": {"max_new_tokens": 3, "top_k": 5}},
    ],
    ids=["two epochs", "dropped responses", "charged KL", "filtered"],
)
def test_log_probs_that_are_needed_again_or_before_are_those_of_a_pass_over_all(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    told, _ = run(tiny_model, tmp_path / "run", **changes)
    assert told.reads[:4] == [True] * 4
    assert told.scored[0] == 8
