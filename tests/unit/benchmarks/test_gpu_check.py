"""The GPU check: a part that crashes or is late costs only itself; every part runs in miniature on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
SIMULATED_PARTS = ("parity", "training", "shared", "decoding", "memory", "offload", "turns", "large")
LONG_PARTS = ("parity", "training", "shared", "decoding", "transports", "offload", "megatron", "stalls", "turns")
FIGURES = 'open(sys.argv[sys.argv.index("--json") + 1], "w").write(\'{"figures": {"a": 1.5}, "failures": {}}\')'
SCRIPTS = {
    "crashes": f"import sys\n{FIGURES}\nraise ValueError('the driver is gone')",
    "hangs": f"import sys, time\n{FIGURES}\ntime.sleep(600)",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "works": f"import sys\n{FIGURES}",
}


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield __import__("check")
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").is_file():
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.full
def test_a_part_costs_only_itself(check, monkeypatch, tmp_path):
    for name, script in SCRIPTS.items():
        (tmp_path / f"part_{name}.py").write_text(script)
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(check, "PARTS", [check.Part(name, 5.0 if name == "hangs" else 60.0, "") for name in SCRIPTS])
    assert check.main(["--cpu", "--no-install", "--out", str(tmp_path / "out"), "--parts", ",".join(SCRIPTS)]) == 1
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == {"crashes": "failed", "hangs": "late", "dies": "failed", "works": "ok"}
    assert report["parts"]["crashes"]["output_end"][-1] == "ValueError: the driver is gone"
    assert report["parts"]["hangs"]["figures"] == {"a": 1.5}
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "| hangs | late |" in text
    assert "the driver is gone" in text


def test_parts_without_time_are_not_begun(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "PARTS", [check.Part("works", 60.0, "")])
    assert check.main(["--cpu", "--no-install", "--out", str(tmp_path), "--parts", "works", "--minutes", "0"]) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["works"]["status"] == "no time left"


def test_parts_fit_into_the_time_of_one_check(check):
    assert sum(part.budget_s for part in check.PARTS) <= 16 * 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "on"),
    [
        ("machine", "--cpu"),
        ("stalls", "--simulated"),
        *(pytest.param(part, "--cpu", marks=pytest.mark.full) for part in ("memory", *LONG_PARTS)),
        *(pytest.param(part, "--simulated", marks=pytest.mark.full) for part in SIMULATED_PARTS),
    ],
)
def test_each_part_runs_in_miniature(check, tmp_path, part, on):
    code = check.main([on, "--no-install", "--out", str(tmp_path), "--parts", part, "--patience", "10"])
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"][part]
    assert code == 0, (found["failures"], found.get("output_end"))
    assert found["figures"]


def test_the_floor_of_decoding_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from _models import Shape
    from part_decoding import bound_s

    # One layer, hidden 4, ffn 8, 2 heads of 2, 1 key-value head: q 16, k 8, v 8, o 16, three matrices of 32, two norms
    # of 4, the last norm 4, a tied embedding of 40: 196 parameters.
    shape = Shape(10, 4, 8, 1, 2, 1)
    assert shape.geometry.parameters() == 196
    # Two steps read 2 * 196 bytes each; a token's keys and values are 2 * 2 elements. 3 rows after prompts of 5 read
    # 3 * 5 * 8 and 3 * 6 * 8 bytes. Together 1,048 bytes, at 1e-9 GB/s.
    assert bound_s(shape, 3, 5, 2, 1e-9) == pytest.approx(2 * 392 + 120 + 144)


def test_a_bare_machine_lacks_what_nemorl_needs_and_nothing_heavy(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import pack

    missing = pack.missing_packages("3.12")
    assert {"pydantic", "pydantic-core", "stevedore", "platformdirs"} <= set(missing)
    assert not {"torch", "transformers", "numpy", "ray", "datasets", "pyarrow"} & set(missing)
