"""A client's loop through `nemorl serve --tinker` against `nemorl train` of the same loop, and the cost of tenants.

    python benchmarks/tinker_loop.py loop --case p128r64g8 --steps 12
    python benchmarks/tinker_loop.py tenants

`loop`: one client of the package `tinker` does GRPO's step with the losses and calls of the API: sample, importance
sampling, AdamW, weights to sample from; with a record of its loop as a run, and without. The other side is GRPO of
nemorl. All train an adapter of rank 32 on the same model, by turns, one step at a time: the others wait while one
steps. CPU seconds of a client's side are those of both processes. The ratios are of single steps side by side; their
median is given.
`tenants`: in one process, the time to put another tenant's adapter in place, and one pass of 16 rows against two of 8,
which is the most that a batch with rows of both could save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, limit_threads, machine, print_table, start_side
from _grpo_cases import Case, case_of
from _tinker import NAME, serving, write_model
from _turns import StepTime, Turn, take_turns

THREADS = limit_threads()
RANK = 32
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}


class Client:
    """GRPO's steps as a client of the API makes them."""

    def __init__(self, case: Case) -> None:
        import tinker

        self.case, self.types = case, tinker.types
        self.service = tinker.ServiceClient()
        self.training = self.service.create_lora_training_client(NAME, rank=RANK, seed=0).result()
        self.tokenizer = self.training.get_tokenizer()
        texts = [row["prompt"] for row in case.rows[: case.prompts_per_step]]
        self.prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.sampler = self.training.save_weights_and_get_sampling_client().result()
        self.spent: dict[str, float] = {}

    def step(self, seed: int) -> int:
        """One step; returns the tokens that it sampled."""
        started = time.perf_counter()
        groups = self._groups(seed)
        sampled = time.perf_counter()
        data = [
            datum for prompt, group in zip(self.prompts, groups, strict=True) for datum in self._data(prompt, group)
        ]
        passed = self.training.forward_backward(data, "importance_sampling")
        adam = self.types.AdamParams(learning_rate=self.case.lr, grad_clip_norm=1.0)
        updated = self.training.optim_step(adam)
        passed.result()
        updated.result()
        trained = time.perf_counter()
        self.sampler = self.training.save_weights_and_get_sampling_client().result()
        ended = time.perf_counter()
        self.spent = {"sample_s": sampled - started, "train_s": trained - sampled, "weights_s": ended - trained}
        return sum(len(sequence.tokens) for group in groups for sequence in group)

    def _groups(self, seed: int) -> list[list[Any]]:
        case, types = self.case, self.types
        params = types.SamplingParams(max_tokens=case.new_tokens, temperature=1.0, seed=seed)
        asked = [
            self.sampler.sample(types.ModelInput.from_ints(prompt), num_samples=case.group_size, sampling_params=params)
            for prompt in self.prompts
        ]
        return [future.result().sequences for future in asked]

    def _data(self, prompt: Sequence[int], group: Sequence[Any]) -> list[Any]:
        rewards = [self.case.reward(self.tokenizer.decode(each.tokens), None) for each in group]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) + 1e-6
        found = []
        for each, reward in zip(group, rewards, strict=True):
            tokens, before = [*prompt, *each.tokens], [0.0] * (len(prompt) - 1)
            fields = {
                "target_tokens": tokens[1:],
                "logprobs": [*before, *each.logprobs],
                "advantages": [*before, *[(reward - mean) / spread / 64] * len(each.tokens)],
            }
            found.append(self._datum(tokens, fields))
        return found

    def _datum(self, tokens: Sequence[int], fields: dict[str, Any]) -> Any:
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=fields)


def run_client(work: Path, case: Case, steps: int, turn: Turn, *, records: bool = True) -> None:
    start_side(THREADS)
    words = ["--record", "--directory=recorded"] if records else ["--no-record", "--directory=unrecorded"]
    with serving(work, "--largest-rank", str(RANK), *words) as served:
        os.environ |= served.env
        os.chdir(work)
        client = Client(case)
        for step in range(steps):
            before_s = served.cpu_s()
            tokens = client.step(step)
            turn.step_done(tokens=float(tokens), server_cpu_s=served.cpu_s() - before_s, **client.spent)


def run_nemorl(work: Path, case: Case, steps: int, turn: Turn) -> None:
    """nemorl's public path; a callback ends each turn."""
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig
    from nemorl_rl.callbacks import Callback

    start_side(THREADS)

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return [case.reward(text if isinstance(text, str) else text[0]["content"], None) for text in completions]

    class EndTurn(Callback):
        essential = True

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            turn.step_done(tokens=metrics["mean_gen_tokens_per_sample"] * case.prompts_per_step * case.group_size)

    config = GRPOConfig(
        model=str(work / NAME),
        num_prompts_per_step=case.prompts_per_step,
        num_generations_per_prompt=case.group_size,
        kl_penalty=0.0,
        leave_one_out=False,
        policy={
            "optimizer": {"lr": case.lr, "weight_decay": 0.0},
            "lora": {"rank": RANK, "alpha": 32.0, "head": True},
        },
        generation={"max_new_tokens": case.new_tokens},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=steps,
        seed=0,
        run_dir=work / "run",
    )
    rows = [case.rows[number % len(case.rows)] for number in range(steps * case.prompts_per_step)]
    config.build().fit(dataset=rows, reward_fn=reward, callbacks=[EndTurn()], console=Console(quiet=True))


def loop(case: Case, steps: int) -> dict[str, Any]:
    """Medians of both sides, and the ratio."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work, **SIZES)
        sides = {"nemorl": run_nemorl, "client": run_client, "unrecorded": partial(run_client, records=False)}
        steps_of = take_turns({side: partial(run, work, case, steps) for side, run in sides.items()})
    kept = {side: each[WARMUP_STEPS:] for side, each in steps_of.items()}
    pairs = [*zip(kept["client"], kept["nemorl"], strict=True)]
    recorded = [*zip(kept["client"], kept["unrecorded"], strict=True)]
    return {
        **{side: _medians(each) for side, each in kept.items()},
        "ratio_wall": statistics.median(client.wall_s / nemorl.wall_s for client, nemorl in pairs),
        "ratio_cpu": statistics.median(_cpu_s(client) / nemorl.cpu_s for client, nemorl in pairs),
        "recorded_wall": statistics.median(one.wall_s / other.wall_s for one, other in recorded),
        "recorded_cpu": statistics.median(_cpu_s(one) / _cpu_s(other) for one, other in recorded),
        "steps": len(pairs),
    }


def _cpu_s(step: StepTime) -> float:
    return step.cpu_s + step.facts.get("server_cpu_s", 0.0)


def _medians(steps: Sequence[StepTime]) -> dict[str, float]:
    facts = {name: statistics.median(step.facts[name] for step in steps) for name in steps[0].facts}
    times = {"wall_s": [step.wall_s for step in steps], "cpu_s": [_cpu_s(step) for step in steps]}
    return {name: statistics.median(each) for name, each in times.items()} | facts


def tenants(repeats: int) -> dict[str, float]:
    """Median seconds of each call."""
    import torch
    from nemorl.contracts import AdamStep
    from nemorl_agents.tinker.losses import loss_named
    from nemorl_agents.tinker.models import Datum, ModelSettings, NewModel
    from nemorl_agents.tinker.trained import trained_models

    start_side(THREADS)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 100, (193,), generator=draw) for _ in range(16)]
    data = [Datum(tuple(row[:-1].tolist()), {"target_tokens": row[1:]}) for row in rows]
    loss = loss_named("cross_entropy", {})
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name), **SIZES)
        settings = ModelSettings(str(model), NAME, 512, RANK, "float32", {"backend": {"name": "hf", "snapshots": 2}})
        with trained_models(settings) as models:
            for tenant in ("a:1", "b:1"):
                models.create(tenant, NewModel(NAME, RANK, 0))
                models.forward_backward(tenant, data[:8], loss)
                models.step(tenant, AdamStep(lr=1e-4))

            def timed(what: str, call: Callable[[], Any]) -> None:
                started = time.perf_counter()
                call()
                times.setdefault(what, []).append(time.perf_counter() - started)

            def two_tenants() -> None:
                models.forward_backward("a:1", data[:8], loss)
                models.forward_backward("b:1", data[8:], loss)

            def one_tenant() -> None:
                models.forward_backward("a:1", data[:8], loss)
                models.forward_backward("a:1", data[8:], loss)

            for _ in range(repeats):
                models._use("a:1")
                timed("use_adapter_s", lambda: models._use("b:1"))
                timed("two tenants, 8 rows each_s", two_tenants)
                models._use("a:1")
                timed("one tenant, twice 8 rows_s", one_tenant)
                timed("one tenant, 16 rows_s", lambda: models.forward_backward("a:1", data, loss))
                timed("step_s", lambda: models.step("a:1", AdamStep(lr=1e-4)))
                models.step("b:1", AdamStep(lr=1e-4))
    return {what: statistics.median(found) for what, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["loop", "tenants"])
    parser.add_argument("--case", default="p128r64g8", help="as grpo_vs_trl names them")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.measure == "tenants":
        found: dict[str, Any] = tenants(options.steps)
        rows = [[name.removesuffix("_s"), f"{seconds * 1e3:.1f}"] for name, seconds in found.items()]
        columns = ["", "ms"]
    else:
        found = loop(case_of(options.case, 1e-4, None), options.steps)
        names = ("wall_s", "cpu_s", "tokens")
        rows = [[side, *(f"{found[side][name]:.3f}" for name in names)] for side in ("nemorl", "client", "unrecorded")]
        columns = ["", "wall s a step", "CPU s a step", "tokens sampled"]
        rows.append(["client / nemorl", f"{found['ratio_wall']:.3f}", f"{found['ratio_cpu']:.3f}", ""])
        rows.append(["client / unrecorded", f"{found['recorded_wall']:.3f}", f"{found['recorded_cpu']:.3f}", ""])
    if options.json:
        print(json.dumps({"machine": machine(THREADS), **found}))
    else:
        print_table(f"{options.measure}, {machine(THREADS)}", columns, rows)


if __name__ == "__main__":
    main()
