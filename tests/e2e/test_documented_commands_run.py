"""Commands in the code blocks of the pages run, in their order, in a folder that has what a page takes for granted.

What they need is there in small: a config, and a run of three steps. ``launch`` submits nothing. Commands that need
more are listed with the reason; ``tests/unit/core/test_documented_commands.py`` parses those as well.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import nemorl
import pytest
import yaml
from command_line import Command, command
from documented_commands import ROOT, Documented, documented, understood
from nemorl.contracts.display import Silence
from nemorl_testing.models import tiny_model
from nemorl_trust.audit.log import user_name
from nemorl_trust.audit.recording import record

pytestmark = pytest.mark.slow

RUN, ADAPTER = "runs/grpo-1a2b3c4d", "runs/adapter"
ONLY_PARSED = {
    "serves until somebody stops it": (16, r"serve|view (?!samples|watch)|engines|launch (status|logs)"),
    "trains for minutes, in tests of its own": (8, r"quickstart|compare bisect"),
    "installs packages from an index": (19, r"plugins (un)?install|try (?!--clean)"),
    "tries every check of plugins in processes of their own": (10, r"plugins check(?! math --badge)"),
    "needs other hardware or machines": (8, r"train .*(cluster\.|megatron)|.*--generation vllm"),
    "needs a hub or a store": (8, r"eval .*--suite |runs copy .*s3://|train (my-)?run\.yaml$"),
    "needs what others made": (3, r"runs import-checkpoint|plugins index"),
    "needs what somebody noted": (1, r"audit verify --head"),
    "removes what other runs left on this machine": (2, r"doctor --clean"),
}
"""Why commands are not run, how many different ones, and how their arguments begin. Who adds one counts it here."""
DONE_ELSEWHERE = {
    "tests/e2e/test_agent_page.py": (6, "docs/agents/index.md"),
    "tests/unit/authoring/test_first_plugin_page.py": (3, "docs/first-plugin.md"),
    "tests/unit/core/test_plugin_docs.py": (3, "docs/plugin-kinds/"),
    "make benchmarks": (4, "docs/results/"),
}
"""What runs the other commands of a page, how many, and how the page's path begins."""
VERL = "actor_rollout_ref.model.path=org/model algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm"
OPENRLHF = "--pretrain org/model --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --colocate_all_models"
NEMO_RL = """
grpo: {num_prompts_per_step: 8}
policy: {model_name: org/model, dtensor_cfg: {enabled: true, cpu_offload: false}}
data: {dataset_name: OpenMathInstruct-2, shuffle: true}
env: {math: {num_workers: 8}}
"""
FILES = {
    "hard.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "train_grpo.sh": f"python3 -m openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 {OPENRLHF}\n",
    "train.sh": "trl grpo --model_name_or_path org/model --num_generations 8\n",
    "run_qwen3_grpo.sh": f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=5 {VERL}\n",
    "grpo_math_1B.yaml": NEMO_RL,
    "old.yaml": NEMO_RL,
    "examples/configs/grpo.yaml": NEMO_RL,
    "trl/config.yaml": "model_name_or_path: org/model\nnum_generations: 8\n",
    "verl/config.yaml": "actor_rollout_ref: {model: {path: org/model}, rollout: {n: 5, name: vllm}}\n"
    "algorithm: {adv_estimator: grpo}\n",
}
"""What pages take for granted besides a config and its run."""
IN_SMALL = {
    "org/name": f"{RUN}/model",
    "20": "3",  # the step, and that of a checkpoint
    "200": "2",
    "alice.jsonl": f"audit/{user_name()}.jsonl",
    "node7,10.0.0.7": f"{socket.gethostname()},10.0.0.7",
    "RUN": "runs/mine",
    "ONE_THAT_LEARNED": "runs/other",
}
ALSO = {"launch submit": ["--dry-run"], "eval": ["--max-samples", "2"]}
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACES = ("launch", "cluster", "run_dir")
"""What is taken from a page's own config that says where it is launched, unless the command says that itself."""
EXIT_1 = r"doctor( --json)?$|compare replay .*--set "
"""May say 1: this machine has a problem, or what was changed makes a difference."""


def why_not(one: Documented) -> str | None:
    """Why a command is not run here."""
    text = shlex.join(one.words[1:])
    reasons = [reason for reason, (_, pattern) in ONLY_PARSED.items() if re.match(pattern, text)]
    reasons += [test for test, (_, beginning) in DONE_ELSEWHERE.items() if one.page.startswith(beginning)]
    return reasons[0] if reasons else None


@cache
def to_run() -> dict[str, list[Documented]]:
    """By page; what several pages show is run on the first of them."""
    found: dict[tuple[str, ...], Documented] = {}
    for one in documented():
        if one.program == "nemorl" and why_not(one) is None:
            found.setdefault(one.words[1:], one)
    pages = dict.fromkeys(one.page for one in found.values())
    return {page: [one for one in found.values() if one.page == page] for page in pages}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a run of it."""
    folder, model = tmp_path_factory.mktemp("reader"), tiny_model()
    config: dict[str, Any] = {
        "algorithm": "grpo",
        "model": str(model),
        "max_steps": 3,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 2,
        "generation": {"max_new_tokens": 4},
        "environment": "math",
        "data": {"name": "arithmetic", "max_value": 5, "num_train": 16, "num_validation": 2},
        "policy": {"max_sequence_tokens": 64},
        "validation": {"every": 1, "max_samples": 2},
        "checkpoint": {"every": 1, "keep_last": 3, "keep_best": 1},
    }
    (folder / "grpo.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, changes in {RUN: [], ADAPTER: ["policy.lora={rank: 2}"]}.items():
            result = nemorl.load_config("grpo.yaml", changes).build().fit(console=Silence())
            shutil.copytree(result.run_dir, name)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(model / "config.json", folder)
    return folder


@pytest.fixture
def place(reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reader's folder, which is also the home directory."""
    folder = tmp_path / "home"
    shutil.copytree(reader, folder)
    (tmp_path / "paper").mkdir()
    shutil.copy(folder / RUN / "plugins.lock.json", tmp_path / "paper")
    for name in ("CONFIG", "STATE", "DATA", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NEMORL_AUDIT", str(folder / "audit"))
    monkeypatch.chdir(folder)
    record("evaluation_started", {})
    return folder


def arguments(one: Documented) -> list[str]:
    """What is typed here instead, with the files that it names in place."""
    words = [IN_SMALL.get(word, word).replace("~", str(Path.home())) for word in one.words[1:]]
    if "config.yaml" in words:  # of another system
        words[words.index("config.yaml")] = f"{words[words.index('--from') + 1]}/config.yaml"
    if "--adapter" in words:
        words = [ADAPTER if word.startswith("runs/") else word for word in words]
    for option, word in zip(["", *words], words, strict=False):
        path = Path(word)
        if word.startswith("runs/") and option != "--run-dir" and not path.exists():
            shutil.copytree(f"{RUN}/model" if path.name == "model" else RUN, path)
    name, given = understood(words)
    config = given.get("config")
    if config and config.suffix == ".yaml" and (not config.exists() or one.page.startswith("docs/launch/")):
        shown = [yaml.safe_load(text) for text in YAML.findall((ROOT / one.page).read_text(encoding="utf-8"))]
        places = {key: block[key] for block in shown if "launch" in block for key in PLACES if key in block}
        base = yaml.safe_load(Path("grpo.yaml").read_text())
        config.write_text(yaml.safe_dump({**base, **({} if given.get("on") else places)}))
    return [*words, *ALSO.get(name, [])]


@pytest.mark.parametrize("page", list(to_run()))
def test_the_commands_of_a_page_do_what_they_are_shown_for(
    page: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run: Command = command(monkeypatch, capfd)
    for one in to_run()[page]:
        done = run(*arguments(one))
        allowed = {0, 1} if re.match(EXIT_1, shlex.join(one.words[1:])) else {0}
        assert done.code in allowed, f"{one}\n{done.out[-2000:]}\n{done.err[-2000:]}"


def test_a_command_is_run_or_somebody_said_why_not() -> None:
    kept = {one.words[1:]: reason for one in documented() if one.program == "nemorl" and (reason := why_not(one))}
    assert Counter(kept.values()) == {why: count for why, (count, _) in (ONLY_PARSED | DONE_ELSEWHERE).items()}
    assert sum(map(len, to_run().values())) >= 108
