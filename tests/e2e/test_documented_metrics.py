"""docs/metrics.md against what runs log: every name is explained there, and every name there is logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.config.run import declared_metrics
from nemorl.metrics import PREFIXES, MetricInfo, is_called
from nemorl.plugins import PluginEntry, registry
from nemorl.types import Score
from nemorl_cli.console import Console
from nemorl_cli.report.efficiency.declared_metrics import EFFICIENCY_METRICS, SYSTEM_METRICS
from nemorl_testing.models import tiny_model

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROLLOUT = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
PROMPTS = [{"prompt": f"{n}+1="} for n in range(4)]
PAIRS = [{"prompt": "a", "chosen": "bc", "rejected": "c"}] * 4
TEXTS = [{"prompt": "a", "response": "b"}] * 4
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "grpo": (
        {
            **ROLLOUT,
            "importance_correction": "truncated",
            "max_sequence_error": 9.0,
            "filtered_logprobs": True,
            "generation": {"top_k": 5},
            "message_penalties": {"malformed_thinking_advantage": -5.0},
        },
        PROMPTS,
    ),
    "reinforce_plus_plus": (
        {
            **ROLLOUT,
            "entropy_bonus": 0.01,
            "high_entropy_frac": 0.5,
            "off_policy_mask": 9.0,
            "prompt_sampling": "pass_rate",
        },
        PROMPTS,
    ),
    "ppo": ({**ROLLOUT, "value_clip": 0.2, "positive_nll_weight": 0.1}, PROMPTS),
    "dpo": ({"batch_size": 2}, PAIRS),
    "kto": ({"batch_size": 2}, PAIRS),
    "orpo": ({"batch_size": 2}, PAIRS),
    "simpo": ({"batch_size": 2}, PAIRS),
    "rm": ({"batch_size": 2, "center_loss_weight": 0.1}, PAIRS),
    "sft": ({"batch_size": 2}, TEXTS),
    "distillation": (
        {
            "num_prompts_per_step": 2,
            "topk": 4,
            "kl_type": "jsd",
            "dataset_fraction": 0.5,
            "sft_loss_weight": 0.1,
            "teacher": {"align": "text"},
        },
        TEXTS,
    ),
    "opd": ({**ROLLOUT}, PROMPTS),
    "opsd": (
        {"num_prompts_per_step": 2, "topk": 4, "context_column": "response", "teacher_prompt": "{solution}{prompt}"},
        TEXTS,
    ),
    "mopd": ({**ROLLOUT}, PROMPTS),
}
OF_ROUTERS = ("expert_load_max", "dead_experts", "balance_loss", "routes_flipped")
ELSEWHERE = {
    "train/avg_trajectory_age",  # asynchronous rollouts
    "train/max_trajectory_age",
    "train/dropped_stale_groups",
    "train/requeued_stale_groups",
    "train/token_staleness",
    "train/stale_masked_frac",
    "validation/failed_frac",  # environments that fail
    *(f"train/prompts/pass_rate/{name}" for name in ("easy", "medium", "hard")),  # prompts of all kinds
    "train/dropped_unwanted_groups",
    "train/weight_sync_fallbacks",  # weights that travel as changes
    "timing/train/exposed_generation",
    *("timing/train/checkpointing", "timing/train/checkpointing/wait"),  # runs that save and go on
    "train/environment/environment_timeout",  # environments that hang
    "train/environment/episode_timeout",
    *(f"train/environment/{name}" for name in ("calls", "sequences", "ended_by_*")),  # agents
    *(f"train/environment/{kind}_tokens" for kind in ("delivered", "dropped", "forked", "realigned")),
    *(f"train/environment/{name}" for name in ("malformed_tool_calls", "broken_tool_choices", "constrained_tokens")),
    "validation/avg_turns",  # several turns
    "train/reverse_kl/*",  # several teachers
    "performance/generator_busy_s",  # asynchronous rollouts
    "performance/generator_idle_frac",
    "train/draft_acceptance_length",  # vLLM, where it guesses tokens ahead
    "train/draft_acceptance_rate",
    *("train/draft_loss", "timing/train/draft_training"),  # a draft that is kept fresh
    *(f"train/mtp_{name}" for name in ("loss", "acceptance", "grad_norm")),  # megatron, which trains MTP layers
    "train/draft_guessed_tokens",
    "performance/average_token_imbalance",  # several generators
    *(f"train/{part}{name}" for part in ("", "*/") for name in OF_ROUTERS),  # mixtures of experts
    *(
        f"train/{name}" for name in ("passes", "sampled_sequences", "sampled_checksum", "samples_not_repeated")
    ),  # clients
    *(re.sub(r"<\w+>", "*", name) for name in SYSTEM_METRICS),  # runs that take longer than a second
}


def reward(prompt: str, response: str) -> Score:
    """Parts, a metric and an answer to vote on, so that all metrics of rollouts and validation appear."""
    return Score(float(len(response) % 3), {"part": float(len(response) % 2)}, {"name": 1.0}, answer=response[:1])


def logged(algorithm: str, folder: Path) -> set[str]:
    """The names of all metrics of a run of one step, each declared by the algorithm or as a pattern."""
    (knobs, rows), model = RUNS[algorithm], tiny_model()
    samples = "batch_size" not in knobs
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "model": str(model),
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "validation": {"every": 1, "max_samples": 2},
        "max_steps": 1,
        "run_dir": str(folder / algorithm),
        **knobs,
    }
    if samples:
        settings["generation"] = {"max_new_tokens": 4, **knobs.get("generation", {})}
        settings["validation"] |= {"num_generations": 2, "temperature": 1.0}
    is_taught = algorithm in ("distillation", "opd", "opsd")
    if algorithm in ("distillation", "opd", "mopd"):
        settings |= {"teacher": {"model": str(model), **knobs.get("teacher", {})}}
    if is_taught:
        settings["validation"] = {"every": 1, "max_samples": 2}
    trainer = load_config(settings).build()
    score = reward if samples and not is_taught else None
    inputs = (rows, score) if samples else (rows,)
    history = trainer.fit(*inputs, val_dataset=rows, console=Console(quiet=True)).history
    names = {name for record in history for name in record} - {"step"}
    declared = {**declared_metrics(trainer.config), **EFFICIENCY_METRICS}
    assert sorted(name for name in names if not any(is_called(name, known) for known in declared)) == []
    return names


def metrics_of(environment: PluginEntry) -> Mapping[str, MetricInfo]:
    declared: Mapping[str, MetricInfo] = registry().load("environments", environment.id).metrics
    return declared


def documented() -> list[str]:
    """The names in the tables of the page, as patterns: ``<part>`` becomes ``*``."""
    tables = PAGE.read_text(encoding="utf-8").split("## Metrics of your own")[0]
    rows = (line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `"))
    names = (re.sub(r"<\w+>", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row))
    return [name for name in names if name.startswith((*PREFIXES, "system/"))]


def test_every_metric_is_documented_and_every_documented_one_exists(tmp_path: Path) -> None:
    patterns = documented()
    names = {name for algorithm in RUNS for name in logged(algorithm, tmp_path)}
    assert sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)) == []
    never = {pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)}
    environments = {name for entry in registry().index.of_kind("environments") for name in metrics_of(entry)}
    assert sorted(never - ELSEWHERE - environments) == []
    assert sorted((ELSEWHERE | environments) - set(patterns)) == []
