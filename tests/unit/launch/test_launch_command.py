"""`nemorl launch`: what it reads, refuses, writes and shows, whatever the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command
from nemorl.errors import ConfigError, PluginNotFoundError, UsageError
from nemorl_ops.launch import launchers
from nemorl_ops.launch.base import LauncherConfig
from nemorl_ops.launch.prepare import prepare
from recorded_messages import Raises

ROOT = Path("launches")
SECRET = "hf_planted-value-0123456789"


def test_a_dry_run_prints_and_writes_what_would_be_submitted(run_yaml: Path, nemorl: Command) -> None:
    done = nemorl("launch", "run.yaml", "--on", "slurm", "launch.nodes=2", "--name", "a", "--dry-run")
    assert done.code == 0, done.err
    folder = run_yaml.parent / "launches" / "a"
    script = (folder / "job.sbatch").read_text()
    assert script in done.out
    assert f"sbatch --parsable --export=PATH,HOME,USER,LOGNAME,SHELL,LANG {folder}/job.sbatch" in done.out
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "job.sbatch"]
    config = (folder / "config.yaml").read_text()
    assert "num_nodes: 2" in config
    assert config not in done.out
    assert f"{folder}/config.yaml: the run's config, {len(config.splitlines())} lines" in done.out
    assert "address: auto" in config
    assert "launch:" not in config
    assert f"run_dir: {run_yaml.parent}/runs/grpo-" in config


def test_a_section_of_the_config_says_the_same(run_yaml: Path, nemorl: Command) -> None:
    section = {"name": "slurm", "partition": "gpu", "nodes": 2}
    run_yaml.write_text(run_yaml.read_text() + f"launch: {json.dumps(section)}\n")
    by_section = nemorl("launch", "run.yaml", "--dry-run", "--json").json
    by_options = nemorl(
        "launch", "run.yaml", "--on", "slurm", "launch.partition=gpu", "launch.nodes=2", "--dry-run", "--json"
    ).json
    assert by_section == by_options
    assert "#SBATCH --partition=gpu\n" in by_section["files"]["job.sbatch"]


def test_another_launcher_than_the_sections_keeps_what_all_have(run_yaml: Path) -> None:
    section = {"name": "slurm", "partition": "gpu", "environment": {"A": "1"}}
    run_yaml.write_text(run_yaml.read_text() + f"launch: {json.dumps(section)}\n")
    found = prepare(run_yaml, [], on="local", name=None, root=ROOT).launcher
    assert found.environment == {"A": "1"}
    assert "partition" not in type(found).model_fields
    chosen = prepare(run_yaml, ["launch.hosts=[gpu1]"], on="ssh", name=None, root=ROOT).launcher
    assert list(chosen.model_dump()["hosts"]) == ["gpu1"]  # what is asked for is for the launcher that is asked for


def test_nodes_are_those_of_the_cluster_unless_given(run_yaml: Path, raises: Raises) -> None:
    run_yaml.write_text(run_yaml.read_text() + "cluster: {num_nodes: 4, gpus_per_node: 8, address: auto}\n")
    job = prepare(run_yaml, [], on="slurm", name=None, root=ROOT).job
    assert (job.num_nodes, job.gpus_per_node, job.workers_per_node) == (4, 8, 8)
    with raises(ConfigError, 2, "cluster.num_nodes", 4, path="launch.nodes"):
        prepare(run_yaml, ["launch.nodes=2"], on="slurm", name=None, root=ROOT)


@pytest.mark.parametrize(
    ("override", "fact", "path"),
    [
        ("launch.partitoin=gpu", "partition", "launch.partitoin"),
        ("launch.time_limit='00:03:00'", 210, "launch.time_limit"),  # 180 s, told 120 + 30 + 60 s before
        ("launch.time_limit=4h", "4h", "launch.time_limit"),
        ("launch.partition='a; b'", "a; b", "launch.partition"),
        ("launch.environment={HF_TOKEN: abc}", "secrets: [HF_TOKEN]", "launch.environment.HF_TOKEN"),
        ("launch.secrets=['A B']", "A B", "launch.secrets"),
        ("launch.segment_size=3", 3, "launch.segment_size"),
        ("launch.template=none.j2", "none.j2", "launch.template"),
        ("launch.sbatch_options=['rm -rf']", "rm -rf", "launch.sbatch_options"),
    ],
)
def test_mistakes_are_told_with_their_place(
    run_yaml: Path, raises: Raises, override: str, fact: object, path: str
) -> None:
    with raises(ConfigError, fact, path=path):
        prepare(run_yaml, ["launch.nodes=2", override], on="slurm", name=None, root=ROOT)


def test_a_launcher_that_is_not_there(run_yaml: Path, raises: Raises) -> None:
    with raises(PluginNotFoundError, "slrum", "slurm"):
        prepare(run_yaml, [], on="slrum", name=None, root=ROOT)
    with raises(UsageError, "--on"):
        prepare(run_yaml, [], on=None, name=None, root=ROOT)


def test_the_value_of_a_secret_is_found_wherever_it_stands(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    changes = ["launch.secrets=[HF_TOKEN]", f"launch.setup=login {SECRET}"]
    with raises(ConfigError, "HF_TOKEN", path="launch.setup"):
        prepare(run_yaml, changes, on="slurm", name=None, root=ROOT)
    with raises(ConfigError, "HF_TOKEN", "config.yaml", path="policy.model_name"):
        prepare(
            run_yaml, [changes[0], f"policy.model_name=org/{SECRET}", "model=null"], on="slurm", name=None, root=ROOT
        )


def test_a_secret_that_is_not_set_stops_the_submission(run_yaml: Path, nemorl: Command) -> None:
    done = nemorl("launch", "run.yaml", "--on", "local", "launch.secrets=[NOT_SET_ANYWHERE]")
    assert done.code == 2
    assert "NOT_SET_ANYWHERE is not set here" in done.err


def test_what_was_never_launched(run_yaml: Path, nemorl: Command) -> None:
    done = nemorl("launch", "status", "nothing")
    assert done.code == 2
    assert "nothing was launched as 'nothing'" in done.err
    assert "nothing was launched from launches yet" in nemorl("launch", "status").out


def test_a_template_of_the_user_takes_the_place_of_ours(run_yaml: Path, raises: Raises) -> None:
    own = run_yaml.parent / "own.j2"
    own.write_text("#!/bin/bash\n#SBATCH --nodes={{ job.num_nodes }}\nrun {{ run }}\n")
    found = prepare(run_yaml, [f"launch.template={own}", "launch.nodes=2"], on="slurm", name="b", root=ROOT)
    assert found.files["job.sbatch"].startswith("#!/bin/bash\n#SBATCH --nodes=2\nrun ")
    own.write_text("{{ nodes }}\n")
    with raises(ConfigError, "nodes", path="template"):
        prepare(run_yaml, [f"launch.template={own}"], on="slurm", name="b", root=ROOT)


def test_all_launchers_are_launchers_with_described_options() -> None:
    assert set(launchers.installed()) >= {"local", "slurm"}
    for name in launchers.installed():
        found = launchers.load(name)
        assert issubclass(found, LauncherConfig)
        assert found.summary
        assert all(option["description"] for option in found.describe_options())
