"""``nemorl config validate | show | docs | schema | templates``.

Imports that need pydantic are inside the commands: it takes 0.2 s, which ``--help`` need not wait for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from nemorl.base.files.atomic import replace_text
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import ConfigError, UsageError
from nemorl.plugins import registry
from nemorl.plugins.slots import CONFIG_SECTION
from nemorl_trust.source import template_text

from nemorl_cli.answers import AsJson, echo_json, reserved_stdout
from nemorl_cli.forwarding import is_launched
from nemorl_cli.help_texts import App
from nemorl_cli.plugins import as_dict
from nemorl_cli.runs import ConfigPath, Overrides
from nemorl_cli.template_choice import Match, TemplateFacts, choose, facts_of, unknown_words
from nemorl_cli.terminal import print_table, say

app = App(no_args_is_help=True, help="Check, show and describe configs.")

ForCluster = Annotated[
    bool, typer.Option("--for-cluster", help="The run is for other machines: ignore what only this one lacks.")
]


@app.command()
def validate(
    config: ConfigPath, overrides: Overrides = None, for_cluster: ForCluster = False, as_json: AsJson = False
) -> None:
    """Report every mistake of a config at once; exit 2 if there is any. Nothing is loaded or started.

    Examples:

      nemorl config validate grpo.yaml policy.precision=bfloat16

      nemorl config validate eight_nodes.yaml --for-cluster
    """
    from nemorl.config.load import load_config
    from nemorl_trust.secret_check import secret_problems
    from nemorl_trust.site_check import site_problems

    try:
        for_cluster = for_cluster or is_launched(config, overrides or [])
        loaded = load_config(config, overrides or [], for_launch=True, for_cluster=for_cluster)
        found = [*secret_problems(loaded, Path()), *site_problems(loaded, Path())]
        if found := [problem for problem in found if not (for_cluster and problem.here)]:
            raise ConfigError(found, source=str(config))
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"path": p.path, "message": p.message, "fix": p.fix} for p in error.problems]
        echo_json({"valid": False, "problems": problems})
        raise typer.Exit(2) from error
    if as_json:
        echo_json({"valid": True, "problems": []})
    else:
        say(f"{config}: ok ({loaded.algorithm})")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print a config with every default filled in.

    Example:

      nemorl config show grpo.yaml
    """
    from nemorl.config.load import load_config
    from nemorl.storage.run_directory import to_yaml

    loaded = load_config(config, overrides or [])
    if as_json:
        echo_json(loaded.model_dump(mode="json"))
    else:
        say(to_yaml(loaded), nl=False)


@app.command()
def docs(
    path: Annotated[str, typer.Argument(help="Dotted path of a section, e.g. policy.optimizer.")] = "",
    algorithm: Annotated[str, typer.Option(help="Whose config.")] = "grpo",
    as_json: AsJson = False,
) -> None:
    """Explain the keys of a config, or of one section of it. Plugins have theirs in `nemorl plugins show`.

    Examples:

      nemorl config docs policy.optimizer

      nemorl config docs --algorithm dpo
    """
    from nemorl.config.explain import config_at, field_paths

    config_class = registry().load("algorithms", algorithm)
    section = config_at(config_class, {}, path)
    if section is None:
        known = [known for known in field_paths(config_class) if config_at(config_class, {}, known) is not None]
        fix = did_you_mean(path, known) or f"sections: {', '.join(known)}"
        raise UsageError(f"{path!r} is no section of a {algorithm} config", fix=fix)
    options = section.describe_options()
    if as_json:
        echo_json(options, indent=2)
        return
    rows = []
    for option in options:
        default = "–" if option["default"] is None else str(option["default"])
        shown = "required" if option["required"] else shorten(default, 40)
        rows.append((option["name"], option["type"], shown, option["description"]))
    print_table(("KEY", "TYPE", "DEFAULT", "MEANING"), rows)


@app.command()
def schema(
    algorithm: Annotated[str, typer.Argument(help="Name of an algorithm.")] = "grpo",
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
) -> None:
    """Print the JSON Schema of an algorithm's config, installed plugins included.

    In an editor, put this first in a YAML file: # yaml-language-server: $schema=./grpo.schema.json

    Example:

      nemorl config schema grpo --output grpo.schema.json
    """
    with reserved_stdout():
        found = registry().load("algorithms", algorithm).model_json_schema()
        for key in registry().index.keys_of(CONFIG_SECTION.name):  # sections that are not the run's own
            section = CONFIG_SECTION.of(key).filled()
            found["properties"] |= {} if section is None else {key: section.schema()}
        if output is None:
            echo_json(found, indent=2)
    if output is not None:
        replace_text(output, json.dumps(found, indent=2) + "\n")
        say(f"wrote {output}")


@app.command()
def templates(
    name: Annotated[str | None, typer.Argument(help="Print this one. Unset: list all.", show_default=False)] = None,
    wish: Annotated[
        str | None,
        typer.Option("--for", help='List those that suit, e.g. "8 GPUs, math, Qwen3-8B".', show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the config templates that installed plugins offer, find one for a task, or print one to start from.

    Examples:

      nemorl config templates

      nemorl config templates --for "one GPU, LoRA, preferences"

      nemorl config templates grpo --output my-run.yaml
    """
    if name is not None and wish is not None:
        raise UsageError("--for finds a template, and one is named", fix="drop one of them")
    if name is None:
        _list_templates(wish, as_json=as_json)
        return
    text = template_text(registry().index.find("templates", name))
    if as_json:
        echo_json({"name": name, "text": text})
    elif output is None:
        say(text, nl=False)
    elif output.exists():
        raise UsageError(f"{output} exists", fix="choose another file name")
    else:
        replace_text(output, text)
        say(f"wrote {output}: fill in the model, then `nemorl train {output}`")


def _list_templates(wish: str | None, *, as_json: bool) -> None:
    """All templates by task, or those that suit a wish."""
    entries = registry().index.of_kind("templates")
    taken = Counter(entry.name for entry in entries)
    known: dict[str, dict[str, Any]] = {}
    described: list[TemplateFacts] = []
    for entry in entries:
        name = entry.name if taken[entry.name] == 1 else entry.id
        known[name] = as_dict(entry)
        text = "" if known[name]["diagnostics"] else template_text(entry)
        described.append(facts_of(name, known[name]["summary"], text))
    matches = choose(wish, described) if wish is not None else []
    if as_json:
        shown = [(m.template, {"fits": m.fits, "lacks": m.lacks}) for m in matches] or [(d, {}) for d in described]
        echo_json([{**known[d.name], "algorithm": d.algorithm, **d.facts, **more} for d, more in shown], indent=2)
    elif matches:
        _tell_matches(wish or "", matches, described)
    else:
        if wish is not None:
            say(f"no template says anything of {wish!r}; all of them:")
        columns = ("TASK", "NAME", "HARDWARE", "MODEL", "DISTRIBUTION", "SUMMARY")
        rows = [
            (", ".join(d.facts["task"]), d.name, ", ".join(d.facts["hardware"]), ", ".join(d.facts["model"]),
             known[d.name]["distribution"], d.summary)
            for d in described
        ]  # fmt: skip
        print_table(columns, sorted(rows))


def _tell_matches(wish: str, matches: Sequence[Match], described: Sequence[TemplateFacts]) -> None:
    for match in matches:
        say(f"{match.template.name}: {match.template.summary}")
        say(f"    fits: {', '.join(match.fits)}")
        if match.lacks:
            say(f"    not: {', '.join(match.lacks)}")
    if unknown := unknown_words(wish, described):
        say(f"no template says anything of {', '.join(unknown)}")
    say(f"start from one: nemorl config templates {matches[0].template.name} --output my-run.yaml")
