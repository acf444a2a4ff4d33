"""``nemorl compare hindsight``: which gradient a recorded step would have had under another loss, bound or filter."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl.base.files.atomic import replacing
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.eval_output import open_display
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import console, print_list, say, styled

if TYPE_CHECKING:
    from nemorl_insight.diff.gradients import Compared
    from nemorl_insight.diff.hindsight import Hindsight

LARGE_GAP = 0.05
"""Nats between recorded and computed log-probs above which the weights are probably not those of the step."""
COLUMNS = ("VARIANT", "COSINE", "NORM RATIO", "ESS TOKENS", "CARRYING", "REWARD CHANGE", "RESPONSES")
app = plugin_app()


@app.command()
def hindsight(
    run: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    step: Annotated[int, typer.Option(min=1, help="A recorded step.", show_default=False)],
    losses: Annotated[
        str | None,
        typer.Option(help="Algorithms, with commas between. Unset: four of the family.", show_default=False),
    ] = None,
    clip: Annotated[
        list[str] | None,
        typer.Option(help="LOW:HIGH, bounds of policy over sampler. Unset: the run's own. Repeat it."),
    ] = None,
    max_staleness: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Leave out responses of weights more steps old. Repeat it.", show_default=False),
    ] = None,
    drop: Annotated[
        str, typer.Option(help="Filters, each by itself: equal_rewards, truncated; empty: none.")
    ] = "equal_rewards,truncated",
    html: Annotated[
        Path | None, typer.Option(help="Write the table with a plot to this file.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the gradient of a recorded step with those of other losses, clip bounds and filters.

    All are taken at the weights before the step, on its recorded samples; each variant changes one thing. Nothing is
    trained and the run stays as it is. It needs the step's records and the checkpoint before it.

    Examples:

      nemorl compare hindsight runs/grpo-1a2b3c4d --step 12

      nemorl compare hindsight runs/grpo-1a2b3c4d --step 12 --losses cispo,gspo,dppo --clip 0.2:0.28 --clip 0.1:0.1

      nemorl compare hindsight runs/grpo-1a2b3c4d --step 12 --max-staleness 1 --html step-12.html
    """
    from nemorl_insight.diff.hindsight import StepBefore, look_back, passes
    from nemorl_insight.diff.hindsight_variants import Asked
    from nemorl_insight.diff.run_files import RunFiles

    if html is not None and html.exists():
        raise UsageError(f"{html} exists", fix="choose another file")
    asked = Asked(_names(losses), [_bounds(text) for text in clip or ()], max_staleness or (), _filters(drop))
    files = RunFiles.of(run)
    with tempfile.TemporaryDirectory(prefix="nemorl-hindsight-") as scratch, open_display(quiet=as_json) as display:
        before = StepBefore.load(files, step, Path(scratch))
        variants = list(asked.variants(before.config, files.data.config))
        display.begin(f"gradients of {len(variants)} variants", passes(variants, before), "sequences")
        found = look_back(before, variants, display.advance)
    notes = [*_warnings(found), *(f"Left out {name}: {why}." for name, why in asked.skipped.items())]
    if html is not None:
        from nemorl_insight.diff.hindsight_page import page

        with replacing(html) as file:
            file.write(page(run, step, found, notes).encode())
    if as_json:
        rows = [row.as_dict() for row in found.rows]
        facts = {"lr": found.lr, "response_tokens": found.response_tokens, "logprob_gap": found.logprob_gap}
        echo_json({"run": str(run), "step": step, **facts, "variants": rows, "notes": notes}, indent=2)
    else:
        _show(run, step, found, notes)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _filters(text: str) -> list[str]:
    from nemorl_insight.diff.hindsight_variants import FILTERS

    found = _names(text)
    if unknown := [name for name in found if name not in FILTERS]:
        raise UsageError(f"there is no filter {unknown[0]!r}", fix=f"--drop takes {', '.join(FILTERS)}")
    return found


def _bounds(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        raise UsageError(f"--clip {text} is no pair of bounds", fix="give LOW:HIGH, e.g. 0.2:0.28") from None
    if not (0 <= found[0] < 1 and found[1] >= 0):
        raise UsageError(f"--clip {text}: 1 - LOW and 1 + HIGH bound a ratio", fix="0 <= LOW < 1 and HIGH >= 0")
    return found


def _warnings(found: Hindsight) -> list[str]:
    gap = found.logprob_gap
    if gap is None:
        return ["The trainer's log-probs were not recorded, so that the weights could not be checked against them."]
    if gap <= LARGE_GAP:
        return []
    return [
        f"Log-probs computed here and those that the trainer recorded differ by up to {gap:.2g} nats: these may not be "
        "the weights that the step began with, or the backend computes in a low precision."
    ]


def cells(row: Compared) -> list[str]:
    """A variant as the table has it."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        row.name,
        number(row.cosine, ".4f"),
        number(row.norm_ratio, ".3g"),
        f"{row.effective_tokens:.1f}",
        f"{100 * row.carrying_frac:.1f} %",
        f"{row.predicted_reward_change:+.2e}",
        str(row.responses),
    ]


def sentence(run: Path, step: int, found: Hindsight) -> str:
    """What the numbers are of."""
    return (
        f"Step {step} of {run}: {found.response_tokens} response tokens, gradients at the weights before it. Reward "
        f"change: first order, for a step of length {found.lr:g} against the gradient."
    )


def _show(run: Path, step: int, found: Hindsight, notes: Sequence[str]) -> None:
    console().print(styled(sentence(run, step, found)))
    console().print()
    print_list(COLUMNS, [cells(row) for row in found.rows], first_to_go=("RESPONSES", "ESS TOKENS"))
    for note in notes:
        say()
        console().print(styled(note))
