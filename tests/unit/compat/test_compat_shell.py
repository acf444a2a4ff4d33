"""Scripts as bash reads them: every construct reaches the recorder, nothing reaches the machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from nemorl.errors import DataError, UsageError
from nemorl_compat.command import app
from nemorl_compat.peers.reading import read, script_run
from nemorl_compat.shell import expand, expanding
from recorded_messages import Raises
from typer.testing import CliRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("bash") is None, reason="bash on Linux")
MAIN = "python3 -m verl.trainer.main_ppo"


def script(folder: Path, text: str, name: str = "run.sh") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def words(folder: Path, text: str, **variables: str) -> list[str]:
    """What the one command gets of a script whose last lines are ``text``."""
    (command,) = expand(script(folder, text), variables).commands
    return command[3:]


CONSTRUCTS = [
    ('A=(a=1 "b=x y"); A+=(c=3)\n{} "${{A[@]}}"', ["a=1", "b=x y", "c=3"]),
    ("n=$((1024 * 2)); {} n=$((n / 4 + 1))", ["n=513"]),
    ('{} m=${{X:-"${{HOME}}/m"}}', ["m=~/m"]),
    ("X=b\nif [ $X = a ]; then K=1; elif [[ $X == b ]]; then K=2; else K=3; fi\n{} k=$K", ["k=2"]),
    ('X=7b\ncase "$X" in 7b|8b) K=2 ;; *) K=9 ;; esac\n{} k=$K', ["k=2"]),
    ('run() {{ local extra=("$@"); {} "${{extra[@]}}"; }}\nrun a=1 b=2', ["a=1", "b=2"]),
    ("set -xeuo pipefail\n{} \\\n  a=1 \\\n  # gone\n", ["a=1"]),
    ("read -r -d '' T <<'EOF' || true\ntwo\nlines\nEOF\n{} \"t=$T\"", ["t=two\nlines"]),
    ("trap 'echo end' EXIT\nshopt -s nullglob\nexport P=8 Q\n{} p=$P; exit 3", ["p=8"]),
    ("for i in 1 2 3; do s+=$i; done; i=0; while (( i < 2 )); do ((i += 1)); done\n{} s=$s i=$i", ["s=123", "i=2"]),
    ('{} name=$(basename /a/b.parquet .parquet) dir=$(dirname "/a/b/c")', ["name=b", "dir=/a/b"]),
    ("[[ qwen3_8b =~ _([0-9]+)b ]]\n{} size=${{BASH_REMATCH[1]}}", ["size=8"]),
    ("PYTHONUNBUFFERED=1 {} a=1 > log.txt 2>&1", ["a=1"]),
    ('{} a=1 &> "logs/$(echo x).log" &\nwait', ["a=1"]),
    ("exec {} a=1", ["a=1"]),
    ("exec > log.txt 2>&1\n{} a=1", ["a=1"]),
    ("cd /nowhere/at/all\nsource /opt/env/activate\nulimit -n 65535\n{} a=1", ["a=1"]),
    ('bash -c "{} a=1"', ["a=1"]),
    ("mapfile -t rows < <(printf '%s\\n' a b)\n{} n=${{#rows[@]}}", ["n=2"]),
]


@pytest.mark.parametrize(("text", "expected"), CONSTRUCTS)
def test_a_construct_means_what_bash_says(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert words(tmp_path, text.format(MAIN)) == expected


def test_programs_by_path_wrappers_pipes_and_called_scripts_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "N=4\nPY=/opt/conda/bin/python", "lib/common.sh")
    script(tmp_path, "torchrun --nproc_per_node=$1 -m c", "child.sh")
    text = (
        'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource "$D/lib/common.sh"\n'
        '"$PY" -m a n=$N d="${D##*/}" | tee log\n'
        "ray job submit --address=x -- python3 -m b\n./child.sh 7\nbash child.sh 8\n"
    )
    assert [command for command in expand(script(tmp_path, text)).commands if command[0] != "tee"] == [
        ["/opt/conda/bin/python", "-m", "a", "n=4", f"d={tmp_path.name}"],
        ["ray", "job", "submit", "--address=x", "--", "python3", "-m", "b"],
        ["torchrun", "--nproc_per_node=7", "-m", "c"],
        ["torchrun", "--nproc_per_node=8", "-m", "c"],
    ]


def test_what_decided_a_branch_is_named(tmp_path: Path) -> None:
    text = (
        "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}\n"
        'case "$DEVICE" in npu) N=1;; *) N=2;; esac\nif [ -n "${MACHINE:-}" ]; then N=3; fi\n'
        f"if command -v nvidia-smi; then N=4; fi\n{MAIN} trainer.nnodes=$N name=$(hostname)\n"
    )
    path = script(tmp_path, text)
    given = read(path, "verl")
    assert given.values["trainer.nnodes"] == 2
    assert {key: value for key, (value, _) in given.decisions.items()} == {
        "$DEVICE": "gpu",
        "$MACHINE": None,
        "$(python3 -c 'import torch_npu')": None,
        "$(command -v nvidia-smi)": None,
        "$(…)": ["hostname"],
    }
    assert read(path, "verl", run=script_run(["MACHINE=gb200"])).values["trainer.nnodes"] == 3


def test_several_commands_are_listed_and_one_is_asked_for(tmp_path: Path, raises: Raises) -> None:
    path = script(tmp_path, f"python3 -m verl.model_merger merge\nfor n in 4 8; do {MAIN} trainer.nnodes=$n; done\n")
    with raises(UsageError, "trainer.nnodes=4", "trainer.nnodes=8", "--command"):
        read(path, "verl")
    assert read(path, "verl", run=script_run([], 2)).values["trainer.nnodes"] == 8


def test_the_command_takes_variables_and_says_what_decided(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f'set -u\nif [ "$SIZE" = small ]; then B=8; else B=64; fi\n{MAIN} algorithm.adv_estimator=grpo "$@" '
        "actor_rollout_ref.rollout.n=4 data.train_batch_size=$B actor_rollout_ref.actor.ppo_mini_batch_size=8\n",
    )
    command = ["--from", "verl", str(path), "actor_rollout_ref.model.path=org/model"]
    unset = CliRunner().invoke(app, command)
    assert unset.exit_code != 0
    assert "SIZE: unbound variable" in str(unset.exception)
    found = CliRunner().invoke(app, [*command, "SIZE=small", "--report"])
    assert found.exit_code == 0
    assert "num_prompts_per_step: 8" in found.output
    assert "model: org/model" in found.output
    assert "$SIZE = small" in found.output
    assert "the script was read with $SIZE = small\n" in CliRunner().invoke(app, [*command, "SIZE=small"]).output


# What a script may not do

REACHED = "/tmp/nemorl-reached-by-a-script"
ATTACKS = [
    f"echo x > {REACHED}; echo x >> {REACHED}; printf x >| {REACHED}",
    f"trap - DEBUG; echo x > {REACHED}",
    f"unset -f command_not_found_handle; trap - DEBUG; /usr/bin/touch {REACHED}; PATH=/usr/bin; touch {REACHED}",
    f"exec 9>{REACHED}; mkdir {REACHED}; enable -f /usr/lib/bash/mkdir mkdir; mkdir {REACHED}",
    f"trap - DEBUG; exec /usr/bin/touch {REACHED}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_script_writes_no_file_and_starts_no_program(tmp_path: Path, attack: str) -> None:
    expand(script(tmp_path, attack))
    assert not Path(REACHED).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_script_sees_no_secret_no_file_and_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    (tmp_path / "secret.txt").write_text("hunter2")
    texts = [
        "$(set; export)",
        f"$(<{tmp_path}/secret.txt)",
        f"$(</proc/{os.getpid()}/environ)",
        "$(</proc/1/environ)",
        "$(</etc/passwd)",
    ]
    said = [
        " ".join(expand(script(tmp_path, f"trap - DEBUG; python {text!r}".replace("'", '"'))).commands[0])
        for text in texts
    ]
    assert "HOME" in said[0]
    assert not any("hunter2" in one or "root:" in one for one in said)


def test_what_links_beside_a_script_lead_to_stays_unread(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("hunter2")
    for name, target in (("file.sh", "secret.txt"), ("below", "."), ("all.sh", "/")):
        script(tmp_path, "", "of/run.sh")
        (tmp_path / "of" / name).symlink_to(target if target == "/" else tmp_path / target)
    read = "; ".join(f'python "$(<{path})"' for path in ("file.sh", "below/secret.txt", f"all.sh{tmp_path}/secret.txt"))
    found = expand(script(tmp_path, f'trap - DEBUG; cd "${{0%/*}}"; {read}', "of/run.sh"))
    assert found.commands == [["python", ""]] * 3


@pytest.mark.parametrize("count", ["0", "7" * 5000])
def test_a_script_that_writes_records_of_its_own_says_nothing(tmp_path: Path, count: str) -> None:
    assert expand(script(tmp_path, f"trap - DEBUG; printf 'branch\\0%s\\0' {count} >&200")).branches == {}


def test_what_is_left_in_the_background_is_recorded_and_has_to_end(
    raises: Raises, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "(for ((n = 0; n < 20000; n++)); do :; done; python a) &"
    assert expand(script(tmp_path, slow)).commands == [["python", "a"]]
    monkeypatch.setattr(expanding, "WALL_S", 0.5)
    with raises(DataError):
        expand(script(tmp_path, "(while :; do :; done) &"))


def test_a_script_reaches_no_network_and_signals_nobody(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"trap - DEBUG; if exec 8<>/dev/tcp/127.0.0.1/{port}; then python connected; fi"
        assert expand(script(tmp_path, text)).commands == []
    text = f"trap - DEBUG; if kill -0 {os.getpid()}; then python signalled; fi; kill -9 -1; python alive"
    assert ["python", "signalled"] not in expand(script(tmp_path, text)).commands


@pytest.mark.parametrize(
    "text",
    [
        "while :; do :; done",
        "trap '' TERM INT HUP; set -m; while :; do (while :; do :; done) & done",
        ":() { : | : & }; while :; do : ; done",
        'x=aaaaaaaa; while :; do x=$x$x; python "$x"; done',
    ],
)
def test_a_script_without_end_is_ended_with_all_that_it_started(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanding, "WALL_S", 0.5)
    path = script(tmp_path, text)
    if "python" in text:
        monkeypatch.setattr(expanding, "RECORDS_BYTES", 1 << 16)
    with pytest.raises(DataError, match=r"run\.sh"):
        expand(path)
    left = [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(path).encode() in _read(entry)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_where_a_script_cannot_be_shut_off_it_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    """A kernel without Landlock: its module answers as one."""
    folder = tmp_path / "confinement"
    shutil.copytree(expanding.CONFINEMENT, folder)
    with (folder / "landlock.py").open("a") as file:
        file.write("\n\ndef version():\n    raise OSError(38, 'no Landlock here')\n")
    monkeypatch.setattr(expanding, "CONFINEMENT", folder)
    with raises(UsageError, "Landlock"):
        expand(script(tmp_path, f"{MAIN} a=1"))
