"""Broken plugins, written to disk as pip would install them: what somebody's environment may hold.

Every module leaves a file ``<module>.ran`` beside itself as its first act, so that a test can say whose code ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from nemorl.plugins.index import PREFIX

LEAVES_A_TRACE = "from pathlib import Path; Path(__file__).with_suffix('.ran').touch()\n"
GOOD = """
    from nemorl.contracts.environment import Environment
    from nemorl.plugins.kinds import EnvironmentConfig

    class Generous(Environment):
        def score(self, prompt, response):
            return 1.0

    class Env(EnvironmentConfig):
        "Everything is right."
        summary = "everything is right"

        def build(self):
            return Generous()
"""
HOOK = """
    from nemorl.plugins.kinds import HookConfig

    class Hook:
        def {method}: {body}

    class Config(HookConfig):
        "Is called."
        summary = "is called"

        def build(self):
            return Hook()
"""


@dataclass(frozen=True)
class Specimen:
    """One distribution, ``acme-…``, of one module with one entry point."""

    distribution: str
    said: str
    """Part of what `plugins check` has to say about it; empty where it works, if badly."""
    code: str = GOOD
    kind: str = "environments"
    entry: str = "{name} = {module}:Env"
    """Line of ``entry_points.txt``."""
    requires: str = "nemorl-core>=0.1.0,<0.2"
    metadata: str | bytes | None = (
        "Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nRequires-Dist: {requires}\n"
    )
    """``None``: there is no such file."""
    file: str = "{module}.py"
    ends_its_process: bool = False
    """Importing it ends the process, or takes longer than anybody waits."""

    @property
    def module(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def name(self) -> str:
        """Of the plugin: ``acme-import-error`` provides ``import-error``."""
        return self.distribution.removeprefix("acme-")

    @property
    def selected_as(self) -> str:
        """What a config would write to use it."""
        return self.entry.format(name=self.name, module=self.module).partition(" = ")[0]

    def install(self, site: Path) -> None:
        """Write what ``pip install`` would have written."""
        words = {"name": self.name, "module": self.module, "distribution": self.distribution, "requires": self.requires}
        info = site / f"{self.module}-1.0.dist-info"
        info.mkdir(parents=True)
        if isinstance(self.metadata, bytes):
            (info / "METADATA").write_bytes(self.metadata)
        elif self.metadata is not None:
            (info / "METADATA").write_text(self.metadata.format(**words))
        (info / "entry_points.txt").write_text(f"[{PREFIX}{self.kind}]\n{self.entry.format(**words)}\n")
        file = site / self.file.format(**words)
        file.parent.mkdir(exist_ok=True)
        trace = LEAVES_A_TRACE if file.suffix == ".py" else ""
        file.write_bytes((trace + dedent(self.code)).encode("utf-8", errors="surrogateescape"))


def importing(distribution: str, said: str, statement: str, *, ends_its_process: bool = False) -> Specimen:
    """A plugin whose module does something else first."""
    return Specimen(distribution, said, f"{statement}\n{dedent(GOOD)}", ends_its_process=ends_its_process)


def template(distribution: str, said: str, text: str) -> Specimen:
    entry, file = "{name} = {module}:config.yaml", "{module}/config.yaml"
    return Specimen(distribution, said, text, kind="templates", entry=entry, file=file)


def hook(distribution: str, said: str, method: str, body: str = "...") -> Specimen:
    return Specimen(
        distribution, said, HOOK.format(method=method, body=body), kind="hooks", entry="{name} = {module}:Config"
    )


def command(distribution: str, said: str, name: str) -> Specimen:
    code = """
        import typer

        app = typer.Typer()

        @app.command()
        def main() -> None:
            "Not what was asked for."
            print("HIJACKED")
    """
    return Specimen(distribution, said, code, kind="commands", entry=f"{name} = {{module}}:app")


ZOO = (
    Specimen("acme-good", ""),
    # Import
    importing("acme-import-error", "ImportError: no such thing", "raise ImportError('no such thing')"),
    importing("acme-syntax-error", "is not valid Python", "class Env(:"),
    importing("acme-no-parser-takes-it", "is not valid Python", f"nested = {'-' * 200_000}1"),
    importing("acme-missing-dependency", "No module named 'no_such_library'", "import no_such_library"),
    importing("acme-recursion", "RecursionError", "def again(): again()\nagain()"),
    importing("acme-sys-exit", "SystemExit: 3", "import sys; sys.exit(3)"),
    importing("acme-os-exit", "without an answer", "import os; os._exit(0)", ends_its_process=True),
    importing("acme-sleeper", "took more than", "import time; time.sleep(30)", ends_its_process=True),
    importing("acme-torch", "import acme_torch imports", "import torch"),
    importing("acme-printer", "", "print('thank you for installing')"),
    # What the entry point leads to
    Specimen("acme-no-base", "not a subclass of nemorl.plugins.kinds.EnvironmentConfig", "class Env: ..."),
    Specimen("acme-no-module", "no module acme_elsewhere", entry="{name} = acme_elsewhere:Env"),
    Specimen("acme-no-attribute", "defines no 'Nothing'", entry="{name} = {module}:Nothing"),
    Specimen("acme-no-colon", "is not `module:attribute`", entry="{name} = no colon ["),
    Specimen("acme-bad-field", "PydanticUserError", dedent(GOOD) + "    knob = 1\n"),
    Specimen(
        "acme-needs-modules",
        "no_such_library, which cannot be found",
        GOOD
        + '        requires_modules = ("no_such_library",)\n        install_hint = "pip install no-such-library"\n',
    ),
    # Names, kinds, versions
    Specimen("acme-twin-one", "both provide environment 'twin'", entry="twin = {module}:Env"),
    Specimen("acme-twin-two", "both provide environment 'twin'", entry="twin = {module}:Env"),
    Specimen("acme-bad-name", "is not a usable plugin name", entry="bad name! = {module}:Env"),
    Specimen("acme-markup-name", "is not a usable plugin name", entry="[/] = {module}:Env"),
    Specimen("acme-unknown-kind", "no plugin kind 'enviroments'", kind="enviroments"),
    Specimen("acme-of-tomorrow", "needs nemorl-core>=9", requires="nemorl-core>=9"),
    Specimen("acme-bad-requirement", "nemorl-core ?? 1", requires="nemorl-core ?? 1"),
    # Metadata
    Specimen("acme-no-name", "METADATA has no name", metadata="Metadata-Version: 2.1\n"),
    Specimen("acme-no-metadata", "METADATA has no name", metadata=None),
    Specimen("acme-broken-metadata", "METADATA cannot be read", metadata=b"\xff\xfe\x00 no text at all"),
    # Other kinds
    hook("acme-wrong-signature", "takes", "on_step_end(self, step, reward)"),
    hook("acme-unknown-event", "which nemorl never calls", "on_step_ended(self, step)"),
    hook("acme-raising-hook", "", "on_step_end(self, step)", "raise ValueError('not today')"),
    Specimen("acme-old-hook", "not a subclass of nemorl.plugins.kinds.HookConfig", "class Env: ...", kind="hooks"),
    command("acme-takes-train", "`nemorl train` is nemorl's own command", "train"),
    command("acme-takes-list", "`nemorl plugins list` is nemorl's own command", "plugins.list"),
    template("acme-no-yaml", "not valid yaml", "algorithm: [grpo"),
    template("acme-no-text", "is no UTF-8 text", "\udcff\udcfe: grpo"),
)
