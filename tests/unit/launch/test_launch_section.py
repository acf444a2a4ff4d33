"""The section `launch` of a config: `nemorl train` submits it, every command reads it, `nemorl plan` fills it up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_ops.launch.prepare import Prepared, prepare
from nemorl_ops.launch.section import schema_of_section
from recorded_messages import Raises

ROOT = Path("launches")
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"""Sizes of Qwen/Qwen2.5-7B, 7.6 billion parameters: training it with Adam takes 16 bytes of each, 113 GiB."""


@pytest.fixture
def launched(run_yaml: Path) -> Path:
    """A config with a section."""
    section = {"name": "slurm", "partition": "gpu", "nodes": 2}
    run_yaml.write_text(run_yaml.read_text() + f"launch: {json.dumps(section)}\n")
    return run_yaml


def test_train_submits_what_launch_submits(launched: Path, nemorl: Command) -> None:
    assert (
        nemorl("train", "run.yaml", "--dry-run", "--json").json
        == nemorl("launch", "run.yaml", "--dry-run", "--json").json
    )
    shown = nemorl("train", "run.yaml", "launch.partition=big", "--dry-run")
    assert "#SBATCH --partition=big\n" in shown.out
    assert "# 2 nodes, no GPUs, 1 worker each; nemorl plan: not asked" in shown.out
    elsewhere = nemorl("train", "run.yaml", "--run-dir", "/scratch/a", "--dry-run", "--json").json
    assert elsewhere["run_dir"] == "/scratch/a"


@pytest.mark.slow
def test_a_login_node_needs_neither_torch_nor_ray(launched: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'ray', 'transformers', 'vllm'): sys.modules[name] = None\n"
        "sys.argv = ['nemorl', 'train', 'run.yaml', '--dry-run', '--json']\n"
        "from nemorl_cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "job.sbatch" in json.loads(done.stdout)["files"]


@pytest.mark.parametrize("option", [("--resume",), ("--fresh",), ("--from-step", "3"), ("--locked",)])
def test_what_only_a_run_here_can_have_is_refused(launched: Path, nemorl: Command, option: tuple[str, ...]) -> None:
    done = nemorl("train", "run.yaml", *option, "--dry-run")
    assert done.code == 2
    assert option[0] in done.err
    assert "launch=null" in done.err


def test_launch_null_is_a_run_here(launched: Path) -> None:
    config = load_config(launched, ["launch=null"])
    assert (config.cluster.num_nodes, config.cluster.address) == (1, None)


def test_every_command_reads_the_run_on_the_sections_nodes(launched: Path, nemorl: Command) -> None:
    config = load_config(launched, ["launch.gpus_per_node=8", "policy.tensor_parallel_size=8"], for_cluster=True)
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.address) == (2, 8, "auto")
    assert nemorl("config", "validate", "run.yaml").code == 0
    assert "num_nodes: 2" in nemorl("config", "show", "run.yaml").out


@pytest.mark.parametrize(
    ("override", "fact", "path"),
    [
        ("launch.partitoin=gpu", "partition", "launch.partitoin"),
        ("launch.name=slrum", "slurm", "launch.name"),
        ("launch={on: slurm}", "name: slurm", "launch.name"),
        ("launch=[slurm]", "mapping", "launch"),
        ("cluster.num_nodes=4", 4, "launch.nodes"),
    ],
)
def test_mistakes_in_it_are_told_with_all_others(
    launched: Path, raises: Raises, override: str, fact: object, path: str
) -> None:
    with raises(ConfigError, fact, path=[path, "max_stepps"]):
        load_config(launched, [override, "max_stepps=1"], for_launch=True, for_cluster=True)


def test_editors_know_its_options(nemorl: Command) -> None:
    _, names, *objects = schema_of_section()["anyOf"]
    assert set(names["enum"]) == {found["properties"]["name"]["const"] for found in objects}
    (slurm,) = (found for found in objects if found["properties"]["name"]["const"] == "slurm")
    assert slurm["additionalProperties"] is False
    assert slurm["properties"]["partition"]["description"]
    assert "launch" in nemorl("config", "schema", "grpo").json["properties"]


# Defaults by nemorl plan


def job_on(run_yaml: Path, *overrides: str) -> Prepared:
    """The 7B model on Slurm."""
    folder = run_yaml.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    given = [f"model={folder}", "generation.backend=vllm", *overrides]
    return prepare(run_yaml, given, on="slurm", name="a", root=ROOT)


def test_the_planner_chooses_the_fewest_devices_that_fit(run_yaml: Path) -> None:
    # One H100 has 79.6 GiB, fewer than the 113 that weights, gradients and Adam take; two have enough.
    found = job_on(run_yaml, "launch.gpu_type=h100")
    assert (found.job.num_nodes, found.job.gpus_per_node) == (1, 2)
    assert found.plan.chosen.items() >= {"cluster.num_nodes": 1, "cluster.gpus_per_node": 2}.items()
    assert found.plan.words.startswith("1 node x 2 h100: fits")
    # All that it chose is in what is submitted, and nothing else.
    assert "#SBATCH --gres=gpu:h100:2\n" in found.files["job.sbatch"]
    for path, value in found.plan.chosen.items():
        assert f"{path}={value}" in found.plan.words
        assert f"{path.rpartition('.')[2]}: {value}\n" in found.files["config.yaml"]


def test_the_planner_contradicts_nothing_that_was_written(run_yaml: Path) -> None:
    fixed = ["launch.gpu_type=h100", "launch.nodes=2", "launch.gpus_per_node=8", "policy.tensor_parallel_size=4"]
    found = job_on(run_yaml, *fixed)
    assert found.plan.chosen == {}
    assert "nothing was left to choose" in found.plan.words
    # What it has to choose leaves the written keys as they are.
    found = job_on(run_yaml, "launch.gpu_type=h100", "launch.gpus_per_node=2", "policy.microbatch_tokens=2048")
    assert "policy.microbatch_tokens" not in found.plan.chosen
    assert "cluster.gpus_per_node" not in found.plan.chosen
    assert found.job.gpus_per_node == 2


def test_what_cannot_fit_is_refused_in_the_planners_words(run_yaml: Path, raises: Raises) -> None:
    one_l4 = ["launch.gpu_type=l4", "launch.nodes=1", "launch.gpus_per_node=1"]
    with raises(ConfigError, "l4", "launch.plan=false", path="policy"):
        job_on(run_yaml, *one_l4)
    assert job_on(run_yaml, *one_l4, "launch.plan=false").plan.words == "not asked"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["launch.nodes=2"], "launch.gpu_type"),
        (["launch.gpu_type=a30x"], "'a30x'"),
        (["launch.gpu_type=h100", "model=org/unknown"], "'org/unknown'"),
        (["launch.gpu_type=h100", "launch.gpus_per_node=0"], "not asked"),
    ],
)
def test_where_it_cannot_know_it_says_so_and_chooses_nothing(run_yaml: Path, overrides: list[str], why: str) -> None:
    found = job_on(run_yaml, *overrides)
    assert found.plan.chosen == {}
    assert found.plan.words.startswith("not asked")
    assert why in found.plan.words


def test_a_dry_run_says_what_was_planned(launched: Path, nemorl: Command) -> None:
    answer: Any = nemorl("train", "run.yaml", "--dry-run", "--json").json
    assert answer["plan"] == "not asked, for want of: launch.gpu_type, e.g. h100"
    assert answer["chosen"] == {}
