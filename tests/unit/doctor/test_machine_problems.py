"""What a machine is judged by, and how its facts are read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nemorl_insight.doctor.examination import find_problems
from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.machine import Device, Machine, answers, parse_cuda, parse_devices

HEALTHY = Machine(python=(3, 12, 4), cpus=8, disk_free_gib=200.0, shared_memory_free_gib=32.0, open_files=65536)
TWO_GPUS = replace(HEALTHY, gpus=2, environment={"OMP_NUM_THREADS": "4"})


def seen(machine: Machine, folder: Path | None = None) -> list[tuple[str, str]]:
    """(code, severity) of everything found, with the packages of a folder."""
    found = find_problems(Installed([str(folder)] if folder is not None else []), machine)
    assert all(finding.what and finding.why and finding.fix for finding in found)
    return [(finding.code, finding.severity) for finding in found]


MACHINES = [
    ("NRL201", "problem", replace(HEALTHY, python=(3, 10, 14)), replace(HEALTHY, python=(3, 11, 0))),
    ("NRL201", "note", replace(HEALTHY, python=(3, 14, 0)), replace(HEALTHY, python=(3, 13, 9))),
    ("NRL218", "note", replace(HEALTHY, driver_error="couldn't communicate"), HEALTHY),
    ("NRL221", "note", replace(HEALTHY, disk_free_gib=4.9), replace(HEALTHY, disk_free_gib=5.0)),
    ("NRL221", "problem", replace(HEALTHY, disk_free_gib=0.4), HEALTHY),
    ("NRL222", "note", replace(HEALTHY, shared_memory_free_gib=0.1), replace(HEALTHY, shared_memory_free_gib=None)),
    ("NRL223", "note", replace(HEALTHY, cpus=64), replace(HEALTHY, cpus=64, environment={"OMP_NUM_THREADS": "1"})),
    ("NRL223", "note", replace(TWO_GPUS, environment={}), TWO_GPUS),
    ("NRL224", "note", replace(HEALTHY, open_files=1024), replace(HEALTHY, open_files=None)),
    (
        "NRL225",
        "note",
        replace(HEALTHY, environment={"HF_HUB_OFFLINE": "1"}),
        replace(HEALTHY, environment={"HF_HUB_OFFLINE": "0"}),
    ),
    (
        "NRL231",
        "note",
        replace(HEALTHY, environment={"RAY_ADDRESS": "node:6379"}, ray_reachable=False),
        replace(HEALTHY, environment={"RAY_ADDRESS": "auto"}, ray_reachable=None),
    ),
]


@pytest.mark.parametrize(("code", "severity", "sick", "well"), MACHINES)
def test_a_machine_is_judged_by_its_numbers(code: str, severity: str, sick: Machine, well: Machine) -> None:
    assert seen(sick) == [(code, severity)]
    assert seen(well) == []


def test_a_ray_command_of_another_environment_is_found(tmp_path: Path) -> None:
    info = tmp_path / "ray-2.60.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.60.0\n")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        (folder / "ray").touch()
    (tmp_path / "link").symlink_to(here / "ray")
    machine = replace(HEALTHY, scripts=here)
    assert seen(replace(machine, ray_command=elsewhere / "ray"), tmp_path) == [("NRL232", "note")]
    assert seen(replace(machine, ray_command=here / "ray"), tmp_path) == []
    assert seen(replace(machine, ray_command=tmp_path / "link"), tmp_path) == []
    assert seen(machine, tmp_path) == []


def test_an_address_is_asked_whether_it_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(f"127.0.0.1:{port}") is True
        assert answers(f"ray://127.0.0.1:{port}") is True
    assert answers(f"127.0.0.1:{port}") is False
    assert [answers(address) for address in ("", "auto", "local")] == [None] * 3
    assert answers("127.0.0.1:port") is False


SMI = """
| NVIDIA-SMI 570.86.10              Driver Version: 570.86.10      CUDA Version: 12.8     |
"""
LISTING = "NVIDIA H100 80GB HBM3, 81559, 570.86.10\nNVIDIA H100 80GB HBM3, [N/A], 570.86.10\n"


def test_what_nvidia_smi_prints_is_understood() -> None:
    assert parse_devices(LISTING) == (
        (Device("NVIDIA H100 80GB HBM3", 79.6), Device("NVIDIA H100 80GB HBM3", 0.0)),
        "570.86.10",
    )
    assert parse_devices("No devices were found\n") == ((), None)
    assert parse_cuda(SMI) == "12.8"
    assert parse_cuda("KMD Version: 595.1   CUDA UMD Version: 13.2") == "13.2"
    assert parse_cuda("nothing") is None


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a shell script called nvidia-smi first on PATH."""

    def install(script: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def test_a_machine_with_gpus_is_read(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    nvidia_smi(
        'case "$1" in -L) echo "GPU 0: NVIDIA H100";; --query*) echo "NVIDIA H100, 81559, 570.86.10";; '
        '*) echo "Driver Version: 570.86.10 CUDA Version: 12.8";; esac'
    )
    machine = Machine.read(tmp_path)
    assert (machine.gpus, machine.driver, machine.driver_cuda) == (1, "570.86.10", "12.8")
    assert machine.devices == (Device("NVIDIA H100", 79.6),)


def test_a_driver_that_fails_is_told_in_its_own_words(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    nvidia_smi("echo NVIDIA-SMI has failed; exit 9")
    machine = Machine.read(tmp_path)
    assert (machine.gpus, machine.driver_error) == (0, "NVIDIA-SMI has failed")


def test_this_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    machine = Machine.read(tmp_path)
    assert machine.cpus >= 1
    assert machine.disk_free_gib >= 0
    assert machine.environment["HF_HUB_OFFLINE"] == "1"
    assert "a secret" not in repr(machine)
