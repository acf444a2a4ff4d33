"""A loop made again: its requests run on models anew, in their order, and the answers that these give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from nemorl.base.files.atomic import remove

from nemorl_agents.tinker.execution import LossNamed, derived_seed
from nemorl_agents.tinker.flight.operations import FOLDER, LOADED, Operation, last_uses
from nemorl_agents.tinker.models import Models
from nemorl_agents.tinker.sampling import encoded_answer
from nemorl_agents.tinker.wire.bodies import LoadWeights, OptimStep, body_of
from nemorl_agents.tinker.wire.data import pass_body
from nemorl_agents.tinker.wire.outputs import encoded_pass
from nemorl_agents.tinker.wire.sampling import Sample

SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})


class Repeating:
    """Runs the steps of one loop."""

    def __init__(self, models: Models, loop: str, run_dir: Path, scratch: Path, loss_named: LossNamed) -> None:
        """
        Args:
            models: What trains and samples; the loop's adapter is there.
            loop: Its id.
            run_dir: Of the loop that was recorded: states that it loaded lie there.
            scratch: A folder for weights that are sampled from.
            loss_named: Losses by the client's names.
        """
        self._models, self._loop, self._run_dir, self._scratch = models, loop, run_dir, scratch
        self._loss_named = loss_named
        self._last_uses = last_uses(run_dir / FOLDER)
        self.not_repeated = 0
        """Samples of the last step whose weights are of a time before the first step that was made here."""

    def step(self, number: int, operations: Sequence[Operation]) -> list[Operation]:
        """The same requests with the answers that they get now.

        Args:
            number: Of the step.
            operations: Its requests.
        """
        self.not_repeated = 0
        made: list[Operation] = []
        for call, group in groupby(operations, key=lambda each: each.call):
            alike = [*group]
            made += self._sampled(alike) if call else [self._repeated(each) for each in alike]
        for seq, last in self._last_uses.items():
            if last == number:  # weights of a long loop would fill the disk
                remove(self._weights(seq))
        return made

    def _repeated(self, operation: Operation) -> Operation:
        models, loop = self._models, self._loop
        match operation.kind:
            case "forward_backward":
                body = pass_body(operation.body)
                call = models.forward if body.forward_only else models.forward_backward
                passed = call(loop, body.data(), self._loss_named(body.loss_name, body.loss_config))
                return replace(operation, answer=encoded_pass(passed))
            case "optim_step":
                metrics = models.step(loop, body_of(OptimStep, operation.body).adam())
                return replace(operation, answer=json.dumps({"metrics": metrics}).encode())
            case "load_weights":
                whole = body_of(LoadWeights, operation.body).optimizer
                models.load(loop, self._run_dir / LOADED / f"{operation.seq:08d}", optimizer=whole)
            case kind if kind in SAVES and operation.seq in self._last_uses:
                folder = self._weights(operation.seq)
                remove(folder)
                models.snapshot(loop, folder)
        return operation

    def _sampled(self, operations: Sequence[Operation]) -> list[Operation]:
        """Samples of one call."""
        folder = self._weights(operations[0].weights)
        if not folder.is_dir():
            self.not_repeated += len(operations)
            return [*operations]
        base = self._models.bases[0]
        bodies = [body_of(Sample, each.body) for each in operations]
        requests = [
            body.request(derived_seed(each.id), base.max_context_tokens)
            for body, each in zip(bodies, operations, strict=True)
        ]
        found = self._models.sample(base.name, folder, requests)
        answers = [encoded_answer(*pair) for pair in zip(found, bodies, strict=True)]
        return [replace(each, answer=answer) for each, answer in zip(operations, answers, strict=True)]

    def _weights(self, seq: int) -> Path:
        return self._scratch / f"{seq:08d}"
