"""How far a training step and a decoding step of SmolLM2-135M are from the matrix products that they cannot do without.

A model of that shape with random weights, on a CPU. Measured turn by turn in one process, in CPU seconds, medians:

- step: ``train_step`` of dtensor, and beside it the products of its linear layers and head, forward and for both
  gradients, at the same shapes and in the same library. Their sum is the floor: attention, norms, softmax, the
  optimizer and everything else are the distance from it.
- decode: a step of the generator ``hf``, its products, and the time to read its weights once at the bandwidth measured
  here. The larger of the two is the bound.
- libraries: GFLOP/s of MKL and oneDNN, float32 and bfloat16. Figures of two machines are comparable as ratios to these
  only.

Run on an otherwise idle core (under load, products lose less than what is bound by memory, and the ratio grows):
    python benchmarks/step_floor.py --json step_floor.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from _common import limit_threads, machine, print_table, start_side
from _matrices import cpu_model, matrices_line, matrix_speeds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
STEP_SHAPES = ((4, 384), (12, 128))
"""(sequences, tokens of each); the last half of each is scored. Both are one microbatch."""
DECODE_ROWS = (1, 8, 32)
PROMPT_TOKENS = 64
DECODED_TOKENS = 32
"""Room that is asked for, of which some is used: a decoder prepares for as many."""
PRECISIONS = ("bfloat16", "float32")
BANDWIDTH_BYTES = 256 << 20


@dataclass(frozen=True)
class StepFloor:
    """One training step."""

    precision: str
    sequences: int
    tokens: int
    """Of each sequence"""
    step_s: float
    products_s: float
    """Its linear layers and head, forward and both gradients"""
    gflops: float
    """Of these products, per second"""

    @property
    def ratio(self) -> float:
        return self.step_s / self.products_s


@dataclass(frozen=True)
class DecodeFloor:
    """One decoding step."""

    precision: str
    rows: int
    step_s: float
    products_s: float
    weights_s: float
    """To read the weights once"""

    @property
    def bound_frac(self) -> float:
        """Share of the step that its bound takes."""
        return max(self.products_s, self.weights_s) / self.step_s


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turns(works: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, one after the other, ``repeats`` times after a first that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            seconds = cpu_seconds(work)
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def layer_shapes(model: Any) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer, the head apart."""
    from torch import nn

    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return [(module.out_features, module.in_features) for module in linear]


def step_products(model: Any, tokens: int, scored: int, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """The products of a training step as a function, and their FLOPs.

    Each product has operands of its own shape; layers of one shape share them, as they fit no cache anyway.
    """
    head = model.get_output_embeddings().weight.shape
    calls = [(tokens, *shape) for shape in layer_shapes(model)] + [(scored, *head)]
    operands = {call: _operands(*call, dtype) for call in set(calls)}
    flops = sum(6.0 * rows * outputs * inputs for rows, outputs, inputs in calls)

    def run() -> None:
        from nemorl_tensors.products import product

        for call in calls:
            rows, weight, grad = operands[call]
            product(rows, weight)
            product(grad, weight.t())
            # oneDNN copies a first operand that is a transposed view: the smaller goes there, as in training.
            _ = product(grad.t(), rows.t()) if grad.shape[1] <= rows.shape[1] else product(rows.t(), grad.t())

    return run, flops


def _operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    return tuple(torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))  # type: ignore[return-value]


class WeightedNll:
    """Policy-gradient loss without a ratio."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        import torch

        per_token = torch.where(batch.mask, -policy_logprobs * batch["advantages"], 0.0)
        return (per_token * batch.loss_weights).sum(), {}


def make_batch(sequences: int, tokens: int, vocabulary: int) -> Any:
    """Different sequences of one length, the last half of each scored."""
    import torch
    from nemorl_tensors import TokenBatch

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (sequences, tokens), generator=draw).tolist()
    masks = [[place >= tokens // 2 for place in range(tokens)] for _ in ids]
    batch = TokenBatch.from_sequences(ids, masks)
    return batch.with_tokens(advantages=torch.randn(batch.num_tokens, generator=draw))


def training_steps(folder: Path, precision: str, shapes: Sequence[tuple[int, int]], repeats: int) -> list[StepFloor]:
    """``train_step`` against its products."""
    import torch
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_dtensor import DTensorConfig
    from nemorl_dtensor.training import DTensorBackend

    settings = PolicyConfig(model_name=str(folder), init="random", precision=precision, optimizer={"lr": 1e-5})
    backend = DTensorConfig().build(settings, WorkerContext(seed=0), reference=False)
    assert isinstance(backend, DTensorBackend)
    model, loss, found = backend._model, WeightedNll(), []
    for sequences, tokens in shapes:
        batch = make_batch(sequences, tokens, model.config.vocab_size)
        scored = int(batch.mask.sum())
        # What predicts the last token is the one before it, so a row is that much shorter.
        products, flops = step_products(model, sequences * (tokens - 1), scored, getattr(torch, precision))
        works = {"step": lambda batch=batch: backend.train_step(batch, loss), "products": products}
        times = in_turns(works, repeats)
        rate = flops / times["products"] / 1e9
        found.append(StepFloor(precision, sequences, tokens, times["step"], times["products"], rate))
    backend.shutdown()
    return found


def decoding_steps(
    folder: Path, precision: str, rows: Sequence[int], repeats: int, bytes_per_s: float
) -> list[DecodeFloor]:
    """A step of the decoder against its products and the weights' bytes."""
    import torch
    from nemorl.config import PolicyConfig
    from nemorl_dtensor.decode_llama import LlamaDecoder
    from nemorl_dtensor.model import load_model
    from nemorl_tensors.products import product

    model: Any = load_model(PolicyConfig(model_name=str(folder), init="random", precision=precision), seed=0)
    head = model.get_output_embeddings()
    weights = [
        module.weight for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]
    weights.append(head.weight)
    weights_s = sum(weight.nbytes for weight in weights) / bytes_per_s
    found = []
    with torch.inference_mode():
        for count in rows:
            decoder = LlamaDecoder(model, 2 * PROMPT_TOKENS + repeats)
            prompts = [tuple(range(row + 1, row + 1 + PROMPT_TOKENS)) for row in range(count)]
            decoder.admit(prompts, max(DECODED_TOKENS, repeats + 1), {})
            tokens = torch.arange(count)
            inputs = {size: torch.randn(count, size).to(weights[0].dtype) for size in {w.shape[1] for w in weights}}

            def products(inputs: dict[int, Tensor] = inputs) -> None:
                for weight in weights:
                    product(inputs[weight.shape[1]], weight)

            times = in_turns({"step": lambda d=decoder, t=tokens: d.step(t), "products": products}, repeats)
            found.append(DecodeFloor(precision, count, times["step"], times["products"], weights_s))
    return found


def bandwidth(repeats: int) -> float:
    """Bytes per second that one thread reads."""
    import torch

    block = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    return BANDWIDTH_BYTES / in_turns({"sum": block.sum}, repeats)["sum"]


def report(result: dict[str, Any]) -> None:
    """The tables."""
    print(f"{result['machine']}; {result['cpu']}; load {result['load']:.1f}")
    print(matrices_line(result["libraries"]))
    print(f"memory {result['bandwidth_gb_s']:.1f} GB/s read")
    print_table(
        "Training step",
        ["precision", "rows", "step s", "products s", "GFLOP/s", "step / products"],
        [
            [
                s["precision"],
                f"{s['sequences']} x {s['tokens']}",
                *(f"{s[key]:.2f}" for key in ("step_s", "products_s")),
                f"{s['gflops']:.0f}",
                f"{s['ratio']:.2f}",
            ]
            for s in result["steps"]
        ],
    )
    print_table(
        "Decoding step",
        ["precision", "rows", "step ms", "products ms", "weights ms", "bound / step"],
        [
            [
                d["precision"],
                str(d["rows"]),
                *(f"{1e3 * d[key]:.1f}" for key in ("step_s", "products_s", "weights_s")),
                f"{d['bound_frac']:.2f}",
            ]
            for d in result["decode"]
        ],
    )


def measure(precisions: Sequence[str], repeats: int, threads: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, as plain data."""
    from nemorl_rl.models.tiny import write_tiny_model

    bytes_per_s = bandwidth(repeats)
    steps: list[StepFloor] = []
    decode: list[DecodeFloor] = []
    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_model(Path(place), architecture="llama", **{**SMOLLM2_135M, **sizes})
        for precision in precisions:
            steps += training_steps(folder, precision, STEP_SHAPES, repeats)
            decode += decoding_steps(folder, precision, DECODE_ROWS, 3 * repeats, bytes_per_s)
    return {
        "machine": machine(threads),
        "cpu": cpu_model(),
        "load": os.getloadavg()[0],
        "libraries": matrix_speeds(),
        "bandwidth_gb_s": bytes_per_s / 1e9,
        "steps": [{**asdict(step), "ratio": step.ratio} for step in steps],
        "decode": [{**asdict(step), "bound_frac": step.bound_frac} for step in decode],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of " + ", ".join(PRECISIONS))
    parser.add_argument("--repeats", type=int, default=5, help="measured training steps per case")
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    start_side(options.threads)
    sizes = {"num_hidden_layers": options.layers}
    result = measure(options.precisions.split(","), options.repeats, options.threads, sizes)
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    limit_threads()
    main()
