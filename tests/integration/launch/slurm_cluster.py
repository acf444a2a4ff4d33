"""A real Slurm on this machine: munged, slurmctld and three slurmd on the loopback, all below one folder.

Needs root and Debian's packages (slurmctld, slurmd, slurm-client, munge, slurm-wlm-basic-plugins), which are installed
where apt-get can. No systemd, no cgroups, no database.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nemorl.resources.ports import free_port

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "munged")
NODES = ("n0", "n1", "n2")
CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket.2
CredType=cred/munge
CryptoType=crypto/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
OverTimeLimit=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
"""
NODE = """NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=2 RealMemory=4000 Gres=gpu:2
"""
PARTITIONS = """PartitionName=debug Nodes=n[0-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=n[0-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
"""A job of ``urgent`` preempts those of ``debug``, which are told 90 seconds before."""


def missing() -> str | None:
    """Why there can be no Slurm here, after trying to install it; ``None``: it can be."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        absent = [name for name in PROGRAMS if shutil.which(name) is None]
        if absent:
            said = next(iter(done.stderr.strip().splitlines()[-1:]), "")
            return f"Slurm cannot be installed: apt-get gave {said!r}, without {', '.join(absent)}"
    if absent:
        return f"no Slurm here ({', '.join(absent)} missing), and only root can install it with apt-get"
    return None if os.geteuid() == 0 else "several slurmd on one machine need root"


@contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """A running cluster; yields its slurm.conf, which ``SLURM_CONF`` shall name."""
    host = socket.gethostname().partition(".")[0]
    for name in ("munge", "run", "state", "spool", "log", "fake"):
        (folder / name).mkdir()
    gpus = [folder / "fake" / f"gpu{index}" for index in range(2)]
    for gpu in gpus:
        gpu.touch()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    text = CONF.format(host=host, folder=folder, port=free_port())
    text += "".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
    conf.write_text(text + PARTITIONS)
    (folder / "gres.conf").write_text(f"NodeName=n[0-2] Name=gpu File={folder}/fake/gpu[0-1]\n")
    try:
        _start(folder, conf, key)
        _await_idle(conf)
        yield conf
    finally:
        _stop(folder, conf)


def _start(folder: Path, conf: Path, key: Path) -> None:
    munge = folder / "munge"
    options = {
        "key-file": key,
        "socket": munge / "munge.socket.2",
        "pid-file": munge / "munged.pid",
        "seed-file": munge / "munge.seed",
        "log-file": munge / "munged.log",
    }
    subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in options.items())], check=True)
    subprocess.run(["slurmctld", "-f", conf, "-c"], check=True)
    for name in NODES:
        subprocess.run(["slurmd", "-f", conf, "-N", name], check=True)


def _await_idle(conf: Path) -> None:
    def idle() -> bool:
        asked = ["sinfo", "--Node", "--noheader", "--partition=debug", "--format=%T"]
        done = subprocess.run(
            asked, env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, check=False
        )
        return done.stdout.split() == ["idle"] * len(NODES)

    await_true(idle, 60)


def _stop(folder: Path, conf: Path) -> None:
    files = (*folder.glob("run/*.pid"), folder / "munge" / "munged.pid")
    ids = [int(path.read_text()) for path in files if path.is_file()]
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, check=False)
    asked = ["squeue", "--noheader"]

    def is_empty() -> bool:
        return not subprocess.run(asked, env=environment, capture_output=True, check=False).stdout

    with suppress(AssertionError):
        await_true(is_empty, 30)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in ids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(AssertionError):
            await_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ids), 5)


def await_true(check: Callable[[], object], limit_s: float, explain: Callable[[], str] = str) -> None:
    """Wait until ``check`` holds; a test that waits for longer fails, with what ``explain`` says."""
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s: {explain()}"
        time.sleep(0.5)
