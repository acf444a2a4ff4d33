"""Versions of the Tinker client, as published, against one `nemorl serve --tinker` with a tiny model.

    python benchmarks/tinker_versions.py PYTHON [PYTHON ...] --work DIRECTORY [--json]

PYTHON: interpreters of environments that have one version of the package `tinker` each, and torch. Every one of them
runs the same calls in a process of its own, and what fails is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

CALL_S = 120
TOKENS = [5, 9, 13, 17, 21, 25, 29, 33]
CALLS = (
    "create",
    "forward_backward",
    "forward_backward_async",
    "custom_loss",
    "importance_sampling",
    "optim_step",
    "save_state",
    "sampler",
    "sample",
    "compute_logprobs",
    "named_sampler",
    "load",
    "listed",
    "unload",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(given.client)
        return
    rows = measure(given.pythons, given.work or Path(tempfile.mkdtemp()))
    if given.json:
        print(json.dumps(rows))
        return
    print("| tinker | " + " | ".join(CALLS) + " |")
    print("|---|" + "---|" * len(CALLS))
    for row in rows:
        print("| " + " | ".join([row["version"], *(row["calls"].get(call, "-") for call in CALLS)]) + " |")


def measure(pythons: list[str], work: Path) -> list[dict[str, Any]]:
    """One row per interpreter: the version, and of each call "yes" or why not."""
    from _tinker import NAME, serving, write_model

    work.mkdir(parents=True, exist_ok=True)
    write_model(work)
    rows = []
    with serving(work) as served:
        for python in pythons:
            line = [python, str(Path(__file__).resolve()), "--client", NAME]
            ran = subprocess.run(
                line, env=served.env, cwd=work, capture_output=True, text=True, timeout=600, check=False
            )
            if ran.returncode:
                print(ran.stderr[-2000:], file=sys.stderr)
                raise SystemExit(f"{python} ended with {ran.returncode}")
            rows.append(json.loads(ran.stdout.splitlines()[-1]))
    return rows


# In the process of a client, which has torch and one version of tinker, and nothing of nemorl.


def client(name: str) -> None:
    """Make all calls, and write what became of them."""
    from importlib.metadata import version

    calls = Calls(name)
    found: dict[str, str] = {}
    for call in CALLS:
        try:
            getattr(calls, call)()
        except NoSuchCallError:
            found[call] = "-"
        except Exception as error:
            found[call] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ").replace("|", "/")
        else:
            found[call] = "yes"
    print(json.dumps({"version": version("tinker"), "calls": found}), flush=True)
    sys.stdout.flush()


class Calls:
    """Calls in their order; each leaves what the next ones need."""

    def __init__(self, name: str) -> None:
        import tinker

        self.tinker, self.types, self.name = tinker, tinker.types, name
        self.service = tinker.ServiceClient()

    def create(self) -> None:
        self.training = self.service.create_lora_training_client(self.name, rank=8, seed=1)
        assert len(settled(self.training.get_info()).model_id) > 0

    def forward_backward(self) -> None:
        found = settled(self.training.forward_backward([self.datum()], "cross_entropy"))
        self.logprobs = found.loss_fn_outputs[0]["logprobs"].to_torch().tolist()
        assert math.isclose(found.metrics["loss:sum"], -sum(self.logprobs), rel_tol=1e-4)

    def forward_backward_async(self) -> None:
        async def passed() -> Any:
            future = await self.training.forward_backward_async([self.datum()], "cross_entropy")
            return await future

        found = asyncio.run(passed())
        assert found.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == self.logprobs

    def custom_loss(self) -> None:
        def loss(data: list[Any], logprobs: list[Any]) -> Any:
            total = sum((each**2).sum() for each in logprobs)
            return total, {"squares": float(total)}

        found = settled(self.training.forward_backward_custom([self.datum(weights=False)], loss))
        assert math.isclose(found.metrics["squares"], sum(each**2 for each in self.logprobs), rel_tol=1e-4)

    def importance_sampling(self) -> None:
        targets = TOKENS[1:]
        fields = {"logprobs": self.logprobs, "advantages": [1.0] * len(targets), "target_tokens": targets}
        found = settled(self.training.forward_backward([self.datum(**fields)], "importance_sampling"))
        assert math.isclose(found.metrics["loss:sum"], -len(targets), rel_tol=1e-4)  # ratios of 1

    def optim_step(self) -> None:
        for _ in range(3):
            settled(self.training.optim_step(self.types.AdamParams(learning_rate=1e-2)))
            found = settled(self.training.forward_backward([self.datum()], "cross_entropy"))
        assert found.metrics["loss:sum"] < -sum(self.logprobs)
        self.learned = found.loss_fn_outputs[0]["logprobs"].to_torch().tolist()

    def save_state(self) -> None:
        self.path = settled(self.training.save_state("learned")).path
        assert self.path.startswith("tinker://")

    def sampler(self) -> None:
        self.sampling = settled(self.training.save_weights_and_get_sampling_client())

    def sample(self) -> None:
        params = self.types.SamplingParams(max_tokens=4, temperature=1.0, seed=3)
        prompt = self.types.ModelInput.from_ints(TOKENS[:4])
        found = settled(self.sampling.sample(prompt, 2, params))
        assert [len(each.tokens) == len(each.logprobs) for each in found.sequences] == [True, True]

    def compute_logprobs(self) -> None:
        found = settled(self.sampling.compute_logprobs(self.types.ModelInput.from_ints(TOKENS)))
        assert found[0] is None
        assert all(abs(a - b) < 1e-4 for a, b in zip(found[1:], self.learned, strict=True))

    def named_sampler(self) -> None:
        path = settled(self.training.save_weights_for_sampler("named")).path
        named = self.service.create_sampling_client(model_path=path)
        found = settled(named.compute_logprobs(self.types.ModelInput.from_ints(TOKENS)))
        assert all(abs(a - b) < 1e-4 for a, b in zip(found[1:], self.learned, strict=True))

    def load(self) -> None:
        resumed = self.service.create_training_client_from_state_with_optimizer(self.path)
        found = settled(resumed.forward([self.datum()], "cross_entropy"))
        assert found.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == self.learned

    def listed(self) -> None:
        rest = self.service.create_rest_client()
        run = self.path.removeprefix("tinker://").partition("/")[0]
        found = {each.checkpoint_id for each in settled(rest.list_checkpoints(run)).checkpoints}
        assert found == {"weights/learned", "sampler_weights/named"}, found
        settled(rest.delete_checkpoint_from_tinker_path(self.path))

    def unload(self) -> None:
        """By the client's lower half: no version has a call for it above, and newer ones have none at all."""
        model_id = self.training.model_id
        client = self.tinker._client.AsyncTinker()

        submit = getattr(client.models, "unload", None)
        if submit is None:
            raise NoSuchCallError

        async def unload() -> Any:
            future = await submit(request=self.types.UnloadModelRequest(model_id=model_id))
            raw = client.futures.with_raw_response
            while True:
                answer = await raw.retrieve(request=self.types.FutureRetrieveRequest(request_id=future.request_id))
                body = json.loads(await answer.text())
                if body.get("type") != "try_again":
                    return body

        assert asyncio.run(unload())["type"] == "unload_model"

    def datum(self, *, weights: bool = True, **fields: Any) -> Any:
        given: dict[str, Any] = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
        if fields or not weights:
            del given["weights"]
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={**given, **fields}
        )


class NoSuchCallError(Exception):
    """This version has no such call."""


def settled(found: Any) -> Any:
    """What a future gives. Some versions answer some calls at once."""
    import tinker

    return found.result(timeout=CALL_S) if isinstance(found, Future | tinker.APIFuture) else found


if __name__ == "__main__":
    main()
