"""Ways to die in every place where a run calls code of others, tried one after the other: ``python deaths.py FOLDER``.

A plugin distribution of which every part dies as the environment variable ``DEATH`` says, and a process that has
imported all that is heavy and forks a ``nemorl train`` for each death. Prints a JSON object on stdout: death ->
exit code, stderr, events.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

PLACES = (
    "import",
    "problems",
    "build",
    "dataset",
    "rows",
    "reward",
    "loss",
    "train_step",
    "hook",
    "logger",
    "closing",
    "section",
)
WAYS = {
    "exit": "sys.exit(0)",
    "leave": "os._exit(0)",
    "segfault": "ctypes.string_at(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop iteration": "raise StopIteration('end')",
    "interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "base": "raise type('Odd', (BaseException,), {})('odd')",
}
UNCATCHABLE = ("leave", "segfault", "kill")
PLUGIN = """
import ctypes, os, signal, sys
from typing import Literal
from nemorl.contracts.environment import Environment
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig, HookConfig, LoggerConfig, ReportSectionConfig
from nemorl_grpo.config import GRPOConfig

WAYS = {ways!r}

def die(place):
    wanted, _, way = os.environ["DEATH"].partition(": ")
    if place == wanted:
        exec(compile(WAYS[way], __file__, "exec"))

die("import")

class Judge(Environment):
    def score(self, prompt, response):
        die("reward")
        return float(len(response) % 3)

class Env(EnvironmentConfig):
    def problems(self):
        yield from super().problems()
        die("problems")

    def build(self):
        die("build")
        return Judge()

class Rows(list):
    def __getitem__(self, index):
        die("rows")
        return super().__getitem__(index)

class Data(DatasetConfig):
    def build(self, split):
        die("dataset")
        return Rows([{{"prompt": "1+1="}}, {{"prompt": "1+2="}}]) if split == "train" else None

    def first_row(self):
        return None

class Log:
    def log(self, metrics, step):
        die("logger")

    def close(self):
        die("closing")

class Logger(LoggerConfig):
    def build(self, run_dir):
        return Log()

class Hook:
    essential = True

    def on_step_end(self, step):
        die("hook")

class HookPart(HookConfig):
    def build(self):
        return Hook()

def section(run):
    die("section")

class SectionPart(ReportSectionConfig):
    def build(self):
        return section

class Algorithm(GRPOConfig):
    trainer = "acme_trainer:Trainer"
    algorithm: Literal["death"] = "death"
"""
TRAINER = """
from dataclasses import dataclass
from acme_death import die
from nemorl_grpo.trainer import GRPOTrainer

class Trainer(GRPOTrainer):
    def setup(self):
        super().setup()
        self.loss = Deadly(self.loss)

    def train_step(self, rows):
        die("train_step")
        return super().train_step(rows)

@dataclass(frozen=True)
class Deadly:
    inner: object

    @property
    def requires(self):
        return self.inner.requires

    def __call__(self, outputs, batch):
        die("loss")
        return self.inner(outputs, batch)
"""
ENTRIES = """
[nemorl.environments]
death = acme_death:Env
[nemorl.datasets]
death = acme_death:Data
[nemorl.loggers]
death = acme_death:Logger
[nemorl.hooks]
death = acme_death:HookPart
[nemorl.report_sections]
death = acme_death:SectionPart
[nemorl.algorithms]
death = acme_death:Algorithm
"""


def install(site: Path) -> None:
    info = site / "acme_death-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-death\nVersion: 1.0\nRequires-Dist: nemorl-core>=0.1.0,<0.2\n"
    )
    (info / "entry_points.txt").write_text(ENTRIES)
    (site / "acme_death.py").write_text(PLUGIN.format(ways=WAYS))
    (site / "acme_trainer.py").write_text(TRAINER)


def config(model: Path) -> dict[str, object]:
    return {
        "algorithm": "death",
        "model": str(model),
        "max_steps": 1,
        "num_prompts_per_step": 1,
        "num_generations_per_prompt": 2,
        "policy": {"init": "random", "max_sequence_tokens": 16},
        "generation": {"max_new_tokens": 2},
        "checkpoint": {"export": False},
        "data": "death",
        "environment": "death",
        "loggers": ["death"],
        "plugins": {"hooks": ["death"], "report_sections": ["death"]},
    }


def run(command: list[str], death: str, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a supervised command, in a fork of this process."""
    said = folder / "stderr"
    child = os.fork()
    if child == 0:
        for descriptor, path in ((0, os.devnull), (1, str(folder / "stdout")), (2, str(said))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True)
        os.environ["DEATH"] = death
        sys.argv = ["nemorl", *command]
        from nemorl_cli.supervisor import run as nemorl

        code = 99
        try:
            nemorl()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 98
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")


def main(folder: Path, deaths: list[str]) -> None:
    site = folder / "site"
    install(site)
    sys.path.insert(0, str(site))
    import nemorl_dtensor.training  # noqa: F401
    import nemorl_rl.policy_gradient.loss  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from nemorl_rl.models.tiny import write_tiny_model

    torch.set_num_threads(1)
    model = write_tiny_model(folder / "model")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config(model)))
    found = {}
    for number, death in enumerate(deaths):
        place = folder / str(number)
        place.mkdir()
        code, said = run(["train", str(file), "--run-dir", str(place / "run")], death, place)
        events = place / "run" / "events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.is_file() else []
        found[death] = {"code": code, "stderr": said, "events": lines}
    print(json.dumps(found))


if __name__ == "__main__":
    work = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    main(work, sys.argv[2:])
    shutil.rmtree(work)
