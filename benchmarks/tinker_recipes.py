"""Recipes of tinker-cookbook, as they are, against `nemorl serve --tinker` with a tiny model.

    PYTHONPATH=COOKBOOK python benchmarks/tinker_recipes.py --work DIRECTORY [--only NAME] [--json]

COOKBOOK: a folder with tinker_cookbook 0.6.1 and what it imports. One server serves all recipes, one after the other;
each is a process of `python -m tinker_cookbook.recipes...`, or of one call of its own entry point where it has no words
for the file. What a recipe wrote into its `metrics.jsonl` is the evidence: the first and the last fifth of its steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _tinker import NAME, serving, write_model

RECIPES = "tinker_cookbook.recipes"
RL = (
    "model_name=" + NAME,
    "loss_fn=importance_sampling",
    "groups_per_batch=16",
    "group_size=8",
    "max_tokens=6",
    "eval_every=0",
)
REWARD = "env/all/reward/total"
SL_BASIC = f"""
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
import sys

common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer="{NAME}", renderer_name="qwen3_instruct",
    max_length=256, batch_size=16, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
own = FromConversationFileBuilder(common_config=common, file_path="sums.jsonl")
blueprint = sl_basic.build_config_blueprint("{NAME}").apply({{"dataset_builder": own}})
blueprint.make_from_argv(sys.argv[1:])
sl_basic.main(blueprint.make())
"""
"""The end of the recipe's file, and the dataset in the place that its comment names."""


@dataclass(frozen=True)
class Recipe:
    """One recipe and what its metrics have to show."""

    name: str
    module: str
    words: Sequence[str]
    metric: str
    better: int = 0
    """1: it rises; -1: it falls; 0: the recipe ends."""
    after: str | None = None
    """It begins with the last state of this one."""
    code: str | None = None
    """In place of ``python -m``."""


def sums(name: str, *words: str) -> Recipe:
    """After a little SFT, which taught the form; its reward is -0.1 without the form and 1 for the sum."""
    return Recipe(name, "math_rl.train", ["env=arithmetic", *RL, *words], REWARD, better=1, after="chat_sl")


SL = ["model_name=" + NAME, "batch_size=16", "learning_rate=3e-3", "max_length=256"]
ALL = [
    Recipe("chat_sl", "chat_sl.train", [*SL, "dataset=sums.jsonl", "max_steps=12"], "train_mean_nll", better=-1),
    Recipe(
        "sl_basic",
        "sl_basic",
        ["learning_rate=3e-3", "max_steps=20"],
        "train_mean_nll",
        better=-1,
        code=SL_BASIC,
    ),
    Recipe(
        "prompt_distillation",
        "prompt_distillation.train",
        [*SL, "file_path=languages.jsonl", "num_epochs=1", "max_steps=30"],
        "train_mean_nll",
        better=-1,
    ),
    sums("math_rl sync", "learning_rate=1e-3", "max_steps=30"),
    sums("math_rl async", "learning_rate=1e-3", "max_steps=20", "max_steps_off_policy=2"),
    sums(
        "math_rl stream",
        "learning_rate=1e-3",
        "max_steps=20",
        "stream_minibatch_config.groups_per_batch=16",
        "stream_minibatch_config.num_minibatches=2",
    ),
    Recipe(
        "guess_number",
        "multiplayer_rl.guess_number.train",
        [
            "model_name=" + NAME,
            "renderer_name=qwen3_instruct",
            "group_size=4",
            "batch_size=4",
            "max_tokens=12",
            "learning_rate=1e-3",
            "eval_every=0",
            "max_steps=3",
        ],
        REWARD,
    ),
    Recipe(
        "rl_numerics_check",
        "rl_numerics_check.train",
        [
            "model_name=" + NAME,
            "group_size=4",
            "groups_per_batch=2",
            "max_tokens=48",
            "max_trajectory_tokens=3500",
            "task.num_pages_min=1",
            "task.num_pages_max=2",
            "task.page_chars=300",
            "learning_rate=1e-3",
            "max_steps=3",
        ],
        "optim/kl_sample_train_v1",
    ),
    Recipe(
        "shorter",
        "preference.shorter.train",
        [
            "model_name=" + NAME,
            "renderer_name=qwen3_instruct",
            "batch_size=8",
            "group_size=8",
            "max_tokens=24",
            "learning_rate=3e-3",
            "eval_every=0",
            "max_steps=30",
        ],
        "env/all/ac_tokens_per_turn",
        better=-1,
    ),
]


@dataclass
class Outcome:
    """What a recipe did."""

    name: str
    wall_s: float
    error: str = ""
    steps: int = 0
    metric: str = ""
    first: float = float("nan")
    last: float = float("nan")
    learned: bool | None = None
    """By more than two standard errors of both ends. None: it only had to end."""
    kl: Mapping[str, float] = field(default_factory=dict)
    """Largest of all steps."""


def write_files(work: Path) -> None:
    """Conversations for SFT, and a corpus under the name that rl_numerics_check loads."""
    draw = random.Random(0)
    with (work / "sums.jsonl").open("w") as file:
        for _ in range(2048):
            one, other = draw.randint(0, 100), draw.randint(0, 100)
            asked = [("user", "What is 4 + 5?"), ("assistant", "9"), ("user", f"What is {one} + {other}?")]
            turns = [*asked, ("assistant", str(one + other))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    with (work / "languages.jsonl").open("w") as file:
        for _ in range(512):
            text, label = draw.choice([("guten Tag", "de"), ("good day", "en"), ("bonne journee", "fr")])
            turns = [("user", text), ("assistant", label)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    corpus = work / "Salesforce" / "wikitext"
    corpus.mkdir(parents=True)
    words = ["after", "before", "many", "time", "river", "stone", "under", "house"]
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(3000)]
    (corpus / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    parts = [
        "configs:",
        "- config_name: wikitext-103-raw-v1",
        "  data_files:",
        "  - split: train",
        "    path: train.jsonl",
    ]
    card = "\n".join(["---", *parts, "---", ""])
    (corpus / "README.md").write_text(card)


def last_state(log: Path) -> str:
    """Path of the last state that a recipe saved."""
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    return str([each["state_path"] for each in saved if "state_path" in each][-1])


def run(recipe: Recipe, work: Path, env: dict[str, str], *, timeout_s: float) -> Outcome:
    """Run one recipe to its end and read its metrics."""
    log = work / "logs" / recipe.name.replace(" ", "_")
    start = ["-m", f"{RECIPES}.{recipe.module}"] if recipe.code is None else ["-c", recipe.code]
    words = [*recipe.words, f"log_path={log}"]
    if recipe.after is not None:
        words.append(f"load_checkpoint_path={last_state(work / 'logs' / recipe.after)}")
    log.parent.mkdir(exist_ok=True)
    started = time.perf_counter()
    with log.with_suffix(".out").open("w") as out:
        try:
            rc = subprocess.run(
                [sys.executable, *start, *words],
                cwd=work,
                env=env,
                stdout=out,
                stderr=out,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            rc = 124
    outcome = Outcome(recipe.name, time.perf_counter() - started)
    if rc != 0:
        outcome.error = f"exit status {rc}: {log.with_suffix('.out').read_text()[-1500:]}"
    if (log / "metrics.jsonl").exists():
        read_metrics(recipe, [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()], outcome)
    return outcome


def read_metrics(recipe: Recipe, rows: list[dict[str, Any]], outcome: Outcome) -> None:
    """The metric at both ends, and the largest difference between sampler and trainer."""
    numbers = [row[recipe.metric] for row in rows if recipe.metric in row]
    outcome.steps, outcome.metric = len(numbers), recipe.metric
    if numbers:
        fifth = max(1, len(numbers) // 5)
        outcome.first, outcome.last = statistics.mean(numbers[:fifth]), statistics.mean(numbers[-fifth:])
        if recipe.better:
            change = (outcome.last - outcome.first) * recipe.better
            ends = numbers[:fifth], numbers[-fifth:]
            error = sum(statistics.variance(each) / fifth for each in ends if fifth > 1) ** 0.5
            outcome.learned = change > 2 * error
    for name in ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2"):
        seen = [abs(row[name]) for row in rows if name in row]
        if seen:
            outcome.kl = {**outcome.kl, name: max(seen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a new folder; it is kept")
    parser.add_argument("--only", action="append", help="a recipe's name; repeat it")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="tinker_recipes_"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_model(work)
    write_files(work)
    outcomes = []
    with serving(work, "--max-sequence-tokens", "4096") as served:
        for recipe in ALL:
            if options.only is None or recipe.name in options.only:
                outcomes.append(run(recipe, work, served.env, timeout_s=options.timeout_s))
                print(json.dumps(vars(outcomes[-1])) if options.json else outcomes[-1], flush=True)
    sys.exit(any(each.error or each.learned is False for each in outcomes))


if __name__ == "__main__":
    main()
