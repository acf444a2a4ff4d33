"""Environments and datasets of all packages but nemorl-math-env against the clauses of their kind."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from nemorl_testing import checks_for, conformance

SUM = {"text": "1+1=", "answer": "2"}
TAGS = {"name": "format", "tags": ["think", "answer"]}
TAGGED = "<think>easy</think><answer>2</answer>"
CHOICE = {"text": "Which?", "answer": "B", "row": {"letters": "ABCD"}}
PUZZLE = {"text": "Slide.", "row": {"board": [[1, 2], [0, 3]]}}

test_weighted = conformance(
    "environments",
    {
        "name": "weighted",
        "parts": {"answer": {"environment": "exact_match"}, "form": {"environment": TAGS, "weight": 0.5}},
    },
    examples=[(SUM, "2", 1.0), (SUM, TAGGED, 0.5), (SUM, "3", 0.0)],
)
test_chain = conformance(
    "environments",
    {
        "name": "chain",
        "parts": {
            "form": {"environment": TAGS, "weight": 0.1},
            "answer": {"environment": {"name": "exact_match", "contains": True}},
        },
    },
    examples=[(SUM, TAGGED, 1.1), (SUM, "2", 0.0), (SUM, TAGGED.replace("2", "3"), 0.1)],
)
test_exact_match = conformance("environments", {"name": "exact_match"}, examples=[(SUM, "2", 1.0), (SUM, "3", 0.0)])
BOX = {"text": "Where?", "answer": "[0, 0, 2, 2]"}
test_exact_alnum = conformance(
    "environments", "exact_alnum", examples=[(SUM, "<answer> 2. </answer>", 1.0), (SUM, "2", 0.0)]
)
test_bbox_giou = conformance(
    "environments", "bbox_giou", examples=[(BOX, "<answer>[0, 0, 2, 1]</answer>", 0.5), (BOX, "[0, 0, 2, 2]", 0.0)]
)
test_multiple_choice = conformance(
    "environments", "multiple_choice", examples=[(CHOICE, "Answer: B", 1.0), (CHOICE, "B", 0.0)]
)
test_format = conformance("environments", TAGS, examples=[(SUM, TAGGED, 1.0), (SUM, "2", 0.0)])
test_repetition = conformance("environments", "repetition", examples=[(SUM, "2", 0.0), (SUM, "a b c a b c", -0.25)])
CODE = {"text": "Write it.", "answer": "x = a + b"}
test_code_jaccard = conformance("environments", "code_jaccard", examples=[(CODE, "x = a + b", 1.0), (CODE, "y", 0.0)])
test_format_pattern = conformance("environments", {"name": "format", "pattern": r"\d+"}, examples=[(SUM, "2", 1.0)])
test_sliding_puzzle = conformance(
    "environments",
    {"name": "sliding_puzzle", "illegal_penalty": 0.5},
    examples=[(PUZZLE, "left", 1.0), (PUZZLE, "down", 0.0), (PUZZLE, "up", -0.5), (PUZZLE, ["up", "up", "left"], 0.0)],
)
test_sliding_puzzle_rows = conformance("datasets", "sliding_puzzle")
test_far_sliding_puzzle_rows = conformance(
    "datasets", {"name": "sliding_puzzle", "size": 4, "min_scramble": 20, "max_scramble": 40, "chat": False}
)
test_calculator = conformance(
    "environments",
    {"name": "calculator"},
    examples=[
        (SUM, "Answer: 2", 1.0),
        (SUM, "<tool>1+1</tool>", 0.0),
        (SUM, "Answer: 3", 0.0),
        (SUM, ["<tool>1+1</tool>", "Answer: 2"], 1.0),
    ],
)
test_agent = conformance(
    "environments",
    {"name": "agent", "reward": "exact_match"},
    examples=[(SUM, "2", 1.0), (SUM, "3", 0.0)],
)
FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-corpus-")
(Path(FOLDER.name) / "sums.txt").write_text("One and one are two.\n")
test_retriever = conformance(
    "environments",
    {"name": "retriever", "corpus": FOLDER.name},
    examples=[
        (SUM, "<answer>2</answer>", 1.0),
        (SUM, "<search>one</search>", 0.0),
        (SUM, "<answer>3</answer>", 0.0),
        (SUM, ["<search>one</search>", "<answer>2</answer>"], 1.0),
    ],
)
CODE_FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-reward-")
REWARD = Path(CODE_FOLDER.name) / "reward.py"
REWARD.write_text("def score(prompt, response, answer):\n    return float(response.strip() == str(answer))\n")
test_function = conformance(
    "environments",
    {"name": "function", "function": f"{REWARD}:score"},
    examples=[(SUM, "2", 1.0), (SUM, "3", 0.0)],
)
# Nobody listens there: no response is graded, and none trains anything.
test_judge = conformance(
    "environments",
    {"name": "judge", "url": "http://127.0.0.1:9/v1", "model": "none", "retries": 0, "deadline_s": 5},
    examples=[(SUM, "2", 0.0)],
)
test_calculator_rows = conformance("datasets", {"name": "calculator", "num_train": 50, "num_validation": 10})


ADD = {"text": "Write add.", "row": {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}}
READ = {"text": "Add.", "row": {"tests": [{"input": "1 2", "output": "3"}]}}
test_code = conformance(
    "environments",
    {"name": "code", "timeout_s": 20, "allow_weaker_sandbox": True},
    examples=[
        (ADD, "```python\ndef add(a, b): return a + b\n```", 1.0),
        (ADD, "```python\ndef add(a, b): return 0\n```", 0.5),
        (READ, "```\nprint(sum(map(int, input().split())))\n```", 1.0),
        (READ, "```\nprint(4)\n```", 0.0),
    ],
)

SUM_OF_ROW_0 = {"task": "chain_sum", "options": {}, "seed": 0, "size": 10, "index": 0}
CHAIN_SUM = {"text": "Add up.", "row": {"reasoning_gym": SUM_OF_ROW_0}}
test_reasoning_gym = conformance("environments", "reasoning_gym", examples=[(CHAIN_SUM, "no idea", 0.0)])
test_reasoning_gym_rows = conformance("datasets", {"name": "reasoning_gym", "num_train": 20, "num_validation": 5})

# A server, or an installed taskset, is needed for the rest: tests/unit/interop_envs has toys of both.
OF_CONFIG = [check.name for check in checks_for("loggers") if check.function.__module__.endswith("every_config")]
test_verifiers = conformance("environments", {"name": "verifiers", "taskset": "reverse-text"}, only=OF_CONFIG)
test_verifiers_rows = conformance("datasets", {"name": "verifiers", "taskset": "reverse-text"}, only=OF_CONFIG)
test_verifiers_env = conformance("environments", {"name": "verifiers_env", "taskset": "reverse-text"}, only=OF_CONFIG)
test_verifiers_env_rows = conformance("datasets", {"name": "verifiers_env", "taskset": "reverse-text"}, only=OF_CONFIG)
STAND_IN = str(Path(__file__).parents[1] / "unit/interop_envs/gym_stand_in.py")
GYM_TASK = {
    "responses_create_params": {"input": [{"role": "user", "content": "1+1="}]},
    "agent_ref": {"name": "toy_simple_agent"},
    "wanted": "2",
}
test_nemo_gym = conformance(
    "environments",
    {"name": "nemo_gym", "start": {"config_paths": ["toy.yaml"], "command": [sys.executable, STAND_IN]}},
    examples=[({**SUM, "row": {"nemo_gym": GYM_TASK}}, "2", None)],
)
GYM_FOLDER = tempfile.TemporaryDirectory(prefix="nemorl-gym-rows-")
GYM_ROWS = Path(GYM_FOLDER.name) / "rows.jsonl"
GYM_ROWS.write_text(json.dumps(GYM_TASK))
test_nemo_gym_rows = conformance("datasets", {"name": "nemo_gym", "path": str(GYM_ROWS)})
test_openenv = conformance("environments", {"name": "openenv", "url": "http://localhost:8000"}, only=OF_CONFIG)
