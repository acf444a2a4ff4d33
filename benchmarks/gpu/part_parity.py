"""What the GPU computes beside what the CPU computes: the same random weights, the same batch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _figures import parse
from _models import TINY, Shape, drawn_batch, generator, trainer, write_model
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.batches import WeightedNLL
from safetensors.torch import load_file
from torch import Tensor

SHAPE = Shape(4096, 256, 768, 4, 4, 2)
LIMITS = {
    "float32": {"logprobs_max": 1e-3, "gradient": 1e-3, "loss": 1e-3, "tokens_different": 0.02},
    "bfloat16": {"logprobs_max": 0.5, "gradient": 0.1, "loss": 0.05, "tokens_different": 1.0},
}
"""Beside the CPU in float32. bfloat16 has 8 bits: a token's log-prob moves by some hundredths, and a sampled sequence
leaves the other's path at the first token that falls between."""


def exported(backend: Any) -> dict[str, Tensor]:
    return {
        name: tensor.detach().float().cpu().clone()
        for bucket in backend.export_weights()
        for name, tensor in bucket.items()
    }


def gradient(folder: Path, device: str, batch: Any, **more: Any) -> dict[str, Tensor]:
    """As the optimizer met it, times 1 - beta_1: its first moment after one step, read from a checkpoint."""
    backend = trainer(folder, device, max_grad_norm=1e9, **more)
    backend.train_step(batch, WeightedNLL())
    with tempfile.TemporaryDirectory() as name:
        backend.save_checkpoint(Path(name))
        files = sorted((Path(name) / "optimizer").glob("*.safetensors"))
        saved = {key: tensor for file in files for key, tensor in load_file(file).items()}
    backend.shutdown()
    return {key: tensor for key, tensor in saved.items() if key.endswith(".exp_avg")}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """L2 norm of the difference over that of the first."""
    size = sum(float(tensor.double().square().sum()) for tensor in one.values())
    gap = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return float((gap / size) ** 0.5)


def compare(folder: Path, options: Any, precision: str, shape: Shape, more: dict[str, Any], name: str) -> None:
    """One setting on the GPU beside float32 on the CPU."""
    limits, figures = LIMITS[precision], options.figures
    batch = drawn_batch(shape, groups=3, group_size=2, prompt=24, response=40)
    cpu, gpu = trainer(folder, "cpu", "float32", **more), trainer(folder, options.device, precision, **more)
    gap = (gpu.get_logprobs(batch) - cpu.get_logprobs(batch)).abs()[batch.mask]
    figures.require(f"{name}/logprobs_max", float(gap.max()), limits["logprobs_max"])
    figures.add(f"{name}/logprobs_mean", float(gap.mean()))
    losses = [backend.train_step(batch, WeightedNLL()) for backend in (cpu, gpu)]
    (loss, norm), (other, other_norm) = ((m["loss"].value, m["grad_norm"].value) for m in losses)
    figures.require(f"{name}/loss", abs(other - loss), limits["loss"] * max(abs(loss), 0.1))
    figures.require(f"{name}/grad_norm", abs(other_norm - norm) / norm, limits["gradient"])
    figures.add(f"{name}/weights_after_a_step", distance(exported(cpu), exported(gpu)))
    for backend in (cpu, gpu):
        backend.shutdown()
    found = [
        gradient(folder, device, batch, precision=p, **more)
        for device, p in (("cpu", "float32"), (options.device, precision))
    ]
    figures.require(f"{name}/gradient", distance(*found), limits["gradient"])


def compare_decoding(folder: Path, options: Any, precision: str) -> None:
    """Greedy and sampled tokens of the same seeds."""
    prompts = [tuple(range(9, 9 + length)) for length in (3, 17, 30)]
    sides = [generator(folder, "cpu", "float32"), generator(folder, options.device, precision)]
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        settings = SamplingParams(temperature=temperature, max_new_tokens=32)
        asked = [GenerationRequest(prompt, settings, (1, 2, 3, 4)) for prompt in prompts]
        cpu, gpu = ([c.token_ids for group in side.generate(asked) for c in group] for side in sides)
        wrong = sum(one != other for one, other in zip(cpu, gpu, strict=True)) / len(cpu)
        options.figures.require(f"{precision}/responses_different_{kind}", wrong, LIMITS[precision]["tokens_different"])


def main() -> None:
    options = parse()
    torch.set_num_threads(min(8, torch.get_num_threads()))
    shape = TINY if options.small else SHAPE
    lora = {"lora": {"rank": 8}}
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), shape, "cpu", "float32")
        for precision in ("float32", "bfloat16"):
            for kind, more in (("", {}), (", LoRA", lora), (", recomputed", {"activation_checkpointing": True})):
                with options.figures.case(precision + kind):
                    compare(folder, options, precision, shape, more, precision + kind)
            with options.figures.case(f"{precision}, decoding"):
                compare_decoding(folder, options, precision)


if __name__ == "__main__":
    main()
