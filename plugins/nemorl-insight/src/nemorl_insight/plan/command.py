"""``nemorl plan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.runs import Overrides
from nemorl_cli.terminal import say

if TYPE_CHECKING:
    from nemorl_rl.planning.memory.reading import Lengths
    from nemorl_rl.planning.memory.scene import Scene

    from nemorl_insight.plan.measured import Comparison
    from nemorl_insight.plan.plan import Plan

MODE = "rollouts.mode"
"""``layouts.MODE``, for a help that imports no planner."""
app = plugin_app()


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="Config file; unset with --from.", show_default=False)] = None,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines. Unset: the config's.", show_default=False)] = None,
    gpus: Annotated[str | None, typer.Option(help="Devices of each, e.g. 8xH100.", show_default=False)] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="Memory of a device in GiB, in place of the table's.", show_default=False),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of a model that is not on this machine.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=0, help="Mean prompt.", show_default=False)] = None,
    response_tokens: Annotated[float | None, typer.Option(min=1, help="Mean response.", show_default=False)] = None,
    longest_response: Annotated[
        float | None, typer.Option(min=1, help="Longest response of a step.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts shown.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulas with their numbers.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the config with the best layout to this file.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from", help="Refit from this run's timings.", show_default=False)
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help=f"Setting that --write may change although it changes what is learnt: {MODE}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count what a run takes of each device, how long its steps last, and which layout is best. Starts nothing.

    Needs no GPU, no weights and no torch: the model's config.json is enough.

    Examples:

      nemorl plan grpo.yaml --nodes 2 --gpus 8xH100

      nemorl plan grpo.yaml policy.lora='{rank: 16}' --gpus 1xL40S --explain

      nemorl plan grpo.yaml --gpus 8xH200 --write planned.yaml && nemorl train planned.yaml

      nemorl plan grpo.yaml --gpus 8xH200 --write planned.yaml --allow rollouts.mode

      nemorl plan --from runs/grpo-1a2b3c4d
    """
    from nemorl_rl.planning.memory.reading import Lengths

    from nemorl_insight.plan.plan import Plan

    lengths, devices = Lengths(prompt_tokens, response_tokens, longest_response), (nodes, gpus, gpu_memory)
    if config is None and run is None:
        raise UsageError("there is nothing to plan", fix="give a config file, or a run with --from")
    if unknown := [key for key in allow or () if key != MODE]:
        raise UsageError(f"--allow {unknown[0]}: no layout changes it", fix=f"--allow {MODE}")
    if write is not None:
        _check_target(config, write)
    refit = _compared(run, devices, _given(model_config), lengths) if run is not None else None
    if config is None:
        assert refit is not None, "checked above"
        _answer(refit.as_dict(), refit.show, as_json=as_json)
        return
    scene = _scene(config, overrides or [], devices, _given(model_config), lengths, refit)
    found = Plan.of(scene, None if refit is None else refit.refitted, allowed=allow or ())
    written = _write(config, overrides or [], found, write) if write is not None else None

    def show_all() -> None:
        from nemorl_insight.plan.show import show

        if refit is not None:
            refit.show()
            say()
        show(found, top=top, explain=explain)
        if written is not None:
            say(f"wrote {write}: {' '.join(written) or 'nothing changed'}; nemorl train {write}")

    refitted = {} if refit is None else {"refitted": refit.as_dict()}
    _answer({**found.as_dict(top), "written": written, **refitted}, show_all, as_json=as_json)


Devices = tuple[int | None, str | None, float | None]
"""(nodes, GPUs of each, GiB of each)"""


def _scene(
    config: Path,
    changes: list[str],
    devices: Devices,
    given: dict[str, Any] | None,
    lengths: Lengths,
    refit: Comparison | None,
) -> Scene:
    from nemorl.config.load import load_config
    from nemorl_rl.planning.memory.layouts import as_overrides
    from nemorl_rl.planning.memory.reading import Sizes, asked_for, check_lengths, fleet_of, scene_of

    loaded = load_config(config, [*changes, *as_overrides(asked_for(*devices[:2]))], for_cluster=True)
    check_lengths(loaded, lengths)
    fleet = fleet_of(loaded.cluster, *devices)
    return scene_of(loaded, fleet, Sizes(given), lengths if refit is None else lengths.or_else(refit.lengths))


def _compared(run: Path, devices: Devices, given: dict[str, Any] | None, lengths: Lengths) -> Comparison:
    from nemorl_insight.plan.measured import compare

    return compare(run, fleet_from=devices, model_config=given, lengths=lengths)


def _answer(data: dict[str, Any], show: Callable[[], None], *, as_json: bool) -> None:
    if as_json:
        echo_json(data, indent=2)
    else:
        show()


def _check_target(config: Path | None, target: Path) -> None:
    """Before anything is planned."""
    if config is None:
        raise UsageError("--write needs a config to change", fix="nemorl plan CONFIG --from RUN --write FILE")
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--write {target}: what is written is YAML", fix=f"--write {target.with_suffix('.yaml')}")
    if target.exists() and target.samefile(config):
        raise UsageError(f"--write {target} would replace the config that is planned", fix="name another file")


def _given(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from nemorl.base.text.reading import UnreadableError, parse_json, read_text

    try:
        found = parse_json(read_text(path))
    except (OSError, UnreadableError) as error:
        raise UsageError(f"--model-config {path} cannot be read: {error}", fix="give a model's config.json") from error
    if not isinstance(found, dict):
        raise UsageError(f"--model-config {path} holds no mapping", fix="give a model's config.json")
    return found


def _write(config: Path, changes: list[str], found: Plan, target: Path) -> list[str]:
    from nemorl_insight.plan.plan import write_config

    if found.best is None:
        raise UsageError(
            f"no layout fits on these devices: {found.verdict}", fix="plan for more devices, or a smaller model or LoRA"
        )
    return write_config(config, changes, found.scene, found.best, target)
