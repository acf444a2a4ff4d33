"""Checks of a machine and its environment variables: disk, memory, threads, Ray, downloads."""

from __future__ import annotations

from collections.abc import Iterator

from nemorl_insight.doctor.finding import Finding, note, problem
from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.machine import Machine

LOW_DISK_GIB = 5.0
FULL_DISK_GIB = 0.5
"""Below it not even the checkpoint of a toy model is sure to fit."""
LOW_SHARED_MEMORY_GIB = 1.0
LOW_OPEN_FILES = 4096
MANY_CPUS = 16


def check_driver_answers(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    if machine.driver_error is not None:
        yield note(
            "NRL218",
            what=f"nvidia-smi is installed and fails: {machine.driver_error}",
            why="no GPU can be used until it answers",
            fix="load or repair the NVIDIA driver; in a container, start it with access to the GPUs",
        )


def check_disk(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    if machine.disk_free_gib < LOW_DISK_GIB:
        make = problem if machine.disk_free_gib < FULL_DISK_GIB else note
        yield make(
            "NRL221",
            what=f"{machine.disk_free_gib} GiB are free where runs are written",
            why="a checkpoint takes three times the trained weights and more (optimizer), and several are kept",
            fix="free some, set run_dir to another disk, or lower checkpoint.keep_last",
        )


def check_shared_memory(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    free = machine.shared_memory_free_gib
    if free is not None and free < LOW_SHARED_MEMORY_GIB:
        yield note(
            "NRL222",
            what=f"/dev/shm has {free} GiB free",
            why="Ray's object store and the weight transport shared_memory live there: several processes on one node "
            "end with `Bus error` or become slow. A run in one process does not use it",
            fix="start the container with --shm-size=8g or more, or --ipc=host; elsewhere remove stale files there",
        )


def check_threads(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    if "OMP_NUM_THREADS" not in machine.environment and (machine.gpus > 1 or machine.cpus >= MANY_CPUS):
        yield note(
            "NRL223",
            what=f"OMP_NUM_THREADS is not set, on {machine.cpus} cores",
            why="a process that nemorl does not start (a tokenizer, a grader, an engine of its own) takes a thread "
            "per core; several of them wait for each other",
            fix="export OMP_NUM_THREADS=N, with N = cores / processes; nemorl gives its workers that number too",
        )


def check_open_files(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    if machine.open_files is not None and machine.open_files < LOW_OPEN_FILES:
        yield note(
            "NRL224",
            what=f"a process may open {machine.open_files} files",
            why="Ray holds several per worker and object: `Too many open files` comes hours into a run",
            fix="raise the hard limit (limits.conf, LimitNOFILE=, or --ulimit nofile=65536 of a container)",
        )


def check_downloads(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    set_ = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if machine.environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    if set_:
        yield note(
            "NRL225",
            what=f"{' and '.join(set_)} is set",
            why="models and data sets come from the local cache or a folder, and nothing else is found",
            fix=f"unset {' '.join(set_)} to download",
        )


def check_ray_address(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    if machine.ray_reachable is False:
        yield note(
            "NRL231",
            what=f"RAY_ADDRESS={machine.environment.get('RAY_ADDRESS')} and nothing answers there",
            why="runs with the Ray launcher join the cluster at that address, and fail or wait",
            fix="start the cluster (ray start --head), or unset RAY_ADDRESS to have each run start its own",
        )


def check_ray_command(installed: Installed, machine: Machine) -> Iterator[Finding]:
    ray, command, scripts = installed.get("ray"), machine.ray_command, machine.scripts
    if ray is None or command is None or scripts is None or not (scripts / "ray").is_file():
        return
    if command.resolve() != (scripts / "ray").resolve():
        yield note(
            "NRL232",
            what=f"the `ray` on PATH is {command}, and this environment has its own in {scripts}",
            why=f"`ray start` would start the other one, and a cluster takes no driver of another version than its own "
            f"(here {ray}) or of another Python",
            fix=f"activate this environment, or call {scripts / 'ray'}",
        )
