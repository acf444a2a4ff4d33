"""The environment ``agent`` in runs and evaluations of real configs, with a random model of 40,000 weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from agent_program import PROGRAM
from chat_models import TAGGED
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.evaluation.evaluation import Evaluator
from nemorl_rl.models.tiny import ALPHABET
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

AGENTS = """
async def digits(prompt, policy):
    "Asks twice, the second time with the first answer in the history."
    messages = [{"role": "user", "content": prompt.text}]
    first = await policy.chat(messages)
    last = await policy.chat([*messages, first.message, {"role": "user", "content": "="}])
    return (share(prompt, first.text) + share(prompt, last.text)) / 2

def share(prompt, response):
    return sum(letter.isdigit() for letter in response) / max(1, len(response))

def calculate(expression: str) -> str:
    "The value of a sum."
    return str(sum(map(int, expression.split("+"))))
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return path


def config_of(model: Path, tmp_path: Path, environment: dict[str, Any], **changes: Any) -> Any:
    rows = tmp_path / "rows.jsonl"
    made = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 10) for b in range(2, 10))
    rows.write_text("\n".join(map(json.dumps, made)))
    return load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "data": {"name": "file", "path": str(rows)},
            "environment": {"name": "agent", **environment},
            "policy": {"init": "random", "max_sequence_tokens": 64, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 6},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "validation": {"every": 0, "at_end": False},
            "run_dir": str(tmp_path / "run"),
            **changes,
        }
    )


def train(config: Any) -> list[dict[str, float]]:
    history: list[dict[str, float]] = config.build().fit(console=Console(quiet=True)).history
    return history


@pytest.mark.slow
@pytest.mark.full
def test_a_coroutine_of_a_file_teaches_digits(agents: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model(), tmp_path, {"rollout": f"{agents}:digits"}, max_steps=40)
    history = train(config)
    assert history[0]["train/reward"] < 0.3
    assert history[-1]["train/reward"] > 0.75
    assert history[0]["train/environment/calls"] == 2.0
    assert history[0]["train/environment/outcome_finished"] == 1.0
    assert max(record["train/token_mult_prob_error"] for record in history) < 1.001  # trained is what was sampled


@pytest.mark.slow
def test_the_loop_with_a_tool_teaches_digits(agents: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(alphabet=ALPHABET + "{}_"), model)
    (model / "chat_template.jinja").write_text(TAGGED)
    environment = {"tools": {"functions": [f"{agents}:calculate"]}, "reward": f"{agents}:share"}
    history = train(config_of(model, tmp_path, environment, max_steps=40))
    assert history[0]["train/reward"] < 0.3
    assert history[-1]["train/reward"] > 0.75


def test_a_program_trains_and_is_evaluated(agents: Path, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    environment = {"command": ["python", "-S", str(program)], "reward": f"{agents}:share"}
    changes = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    [record] = train(config_of(tiny_model(), tmp_path, environment, max_steps=1, **changes))
    assert record["train/environment/outcome_finished"] == 1.0
    assert record["train/environment/calls"] == 1.0
    assert record["train/mean_gen_tokens_per_sample"] > 0


def test_agents_are_evaluated_as_they_are_trained(agents: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model(), tmp_path, {"rollout": f"{agents}:digits"})
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    with Evaluator(config) as evaluator:
        found = evaluator.evaluate(rows)
    assert found.metrics["avg_turns"] == 2.0
    assert 0.0 <= found.metrics["reward"] <= 1.0
    assert all(sample.score.metrics["outcome_finished"] == 1.0 for sample in found.samples)


def test_a_run_whose_agents_never_call_the_policy_ends_with_what_they_say(
    tmp_path: Path, agents: Path, raises: Raises
) -> None:
    from nemorl.errors import UsageError

    agents.write_text("async def rollout(prompt, policy):\n    return prompt.row['no_such_column']\n")
    config = config_of(tiny_model(), tmp_path, {"rollout": f"{agents}:rollout"}, max_steps=40)
    with raises(UsageError, "no_such_column", 8):
        train(config)
