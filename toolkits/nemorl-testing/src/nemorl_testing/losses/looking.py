"""The certificate of a loss that is named by where it stands, for ``nemorl plugins check MODULE:NAME``."""

from __future__ import annotations

import importlib
from typing import Any

from nemorl.errors import NemorlError, UsageError

from nemorl_testing.losses.certificate import Outcome, certify_loss

FIX = "paste this test beside the loss, and change the loss until it passes"
FIX_OF_OTHERS = "often the same mistake: look again when the first is gone; its test is in the answer of --json"


def look_at_loss(path: str) -> dict[str, Any]:
    """The answer of a process that tried one loss: clauses that hold, that say nothing, and a problem for each other.

    Args:
        path: ``module:name`` of a loss, or of a class of losses that can be made without arguments.
    """
    answer: dict[str, Any] = {"problems": [], "notes": [], "passed": [], "skipped": {}, "import_s": None}
    try:
        certificate = certify_loss(_loaded(path))
    except NemorlError as error:
        answer["problems"].append({"what": error.message, "fix": error.fix or ""})
        return answer
    answer["passed"] = [outcome.name for outcome in certificate.outcomes if outcome.state == "holds"]
    answer["skipped"] = {outcome.name: outcome.skipped for outcome in certificate.outcomes if outcome.skipped}
    answer["problems"] = [_problem(outcome, index == 0) for index, outcome in enumerate(certificate.broken)]
    answer["notes"] = [f"{name} says nothing of it: {why}" for name, why in answer["skipped"].items()]
    return answer


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        loss = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError) as error:
        fix = (
            "as MODULE:NAME, name a class that needs no arguments, or a loss that the module has "
            "(`LOSS = MyLoss(0.1)`); plugins: `nemorl plugins list`"
        )
        raise UsageError(f"{path} is no plugin, and no loss: {error}", fix=fix) from error
    if not callable(loss) or "requires" not in dir(loss):
        raise UsageError(
            f"{path} is no loss: it cannot be called, or has no `requires`", fix="see nemorl.contracts.Loss"
        )
    return loss


def _problem(outcome: Outcome, is_first: bool) -> dict[str, str]:
    """One mistake breaks several clauses: the test of the first is what is read."""
    what = f"{outcome.name}: {outcome.clause}\n  seen: {outcome.failure}"
    if is_first:
        what += f"\n\n{outcome.test}"
    return {"what": what, "fix": FIX if is_first else FIX_OF_OTHERS, "test": outcome.test}
