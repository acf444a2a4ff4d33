"""What a loss and an advantage of the GRPO family cost, and how far that is from reading and writing the bytes once.

    python benchmarks/losses.py --repeats 9 --json
    python benchmarks/losses.py --tokens 200000 --sequences 200

Losses: forward and backward over one microbatch, log-probs given. ``floor`` is the time to read each field that the
loss needs and to write the gradient, once, at the bandwidth of a copy that is measured in turn with the losses.
Advantages: one call for the whole batch; those of responses see one number per response, those of tokens all tokens.

Times are medians, in CPU seconds of the process, so that other jobs count only by the bandwidth they take.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _common import limit_threads, machine, print_table, ragged

THREADS = limit_threads()

import torch  # noqa: E402  after the thread limit
from nemorl_grpo.loss_cispo import CappedWeightLoss  # noqa: E402
from nemorl_grpo.loss_gspo import SequenceRatioLoss  # noqa: E402
from nemorl_grpo.variants.maxrl import mean_normalized  # noqa: E402
from nemorl_rl.policy_gradient.advantages import batch_normalized, group_advantages  # noqa: E402
from nemorl_rl.policy_gradient.correction import IcePop, SequenceMask, Truncated  # noqa: E402
from nemorl_rl.policy_gradient.kl_charge import kl_to_go  # noqa: E402
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss  # noqa: E402
from nemorl_tensors import KLTerm, TokenBatch, standardized  # noqa: E402
from nemorl_tensors.batch import loss_weights  # noqa: E402
from nemorl_tensors.surrogate import ratio_metrics, sampler_metrics  # noqa: E402

GROUP = 16
MIB = 2**20
COPY_MIB = 256
"""Bytes of the copy that gives the bandwidth: far above the caches."""

LOSSES: Mapping[str, Any] = {
    "clipped, on policy": ClippedPolicyGradientLoss(on_policy=True),
    "clipped": ClippedPolicyGradientLoss(),
    "clipped, dual clip": ClippedPolicyGradientLoss(dual_clip=3.0),
    "clipped, KL": ClippedPolicyGradientLoss(kl_penalty=0.01),
    "clipped, truncated": ClippedPolicyGradientLoss(correction=Truncated()),
    "clipped, icepop": ClippedPolicyGradientLoss(correction=IcePop()),
    "clipped, sequence mask": ClippedPolicyGradientLoss(correction=SequenceMask()),
    "GSPO": SequenceRatioLoss(),
    "GSPO, KL, truncated": SequenceRatioLoss(kl_penalty=0.01, correction=Truncated()),
    "CISPO": CappedWeightLoss(),
    "CISPO, KL, truncated": CappedWeightLoss(kl_penalty=0.01, correction=Truncated()),
}


def make_batch(sequences: int, mean_tokens: int, seed: int = 0) -> TokenBatch:
    """A ragged batch with log-normal lengths and all fields; log-probs of the four kinds a few hundredths apart."""
    rng = torch.Generator().manual_seed(seed)
    lengths, mask = ragged(sequences, mean_tokens, rng)
    count = int(lengths.sum())
    sampled = -torch.rand(count, generator=rng) * 3

    def near() -> torch.Tensor:
        return sampled + 0.03 * torch.randn(count, generator=rng)

    batch = TokenBatch(torch.zeros(count, dtype=torch.int64), lengths, mask, loss_weights(mask, lengths, "token"))
    return batch.with_tokens(
        advantages=torch.repeat_interleave(torch.randn(sequences, generator=rng), lengths),
        generation_logprobs=sampled,
        old_logprobs=near(),
        reference_logprobs=near(),
        policy_logprobs=near(),
    )


def loss_bytes(loss: Any, batch: TokenBatch) -> int:
    """Bytes that forward and backward must touch: what the loss reads, once, and the gradient it leaves."""
    fields = [batch["policy_logprobs"], batch.mask, batch.loss_weights, *(batch[name] for name in loss.requires)]
    return sum(field.nbytes for field in fields) + batch["policy_logprobs"].nbytes


def forward_backward(loss: Any, batch: TokenBatch) -> Callable[[], None]:
    def call() -> None:
        logprobs = batch["policy_logprobs"].detach().requires_grad_()
        loss(logprobs, batch)[0].backward()

    return call


def copy_of(mib: int) -> Callable[[], object]:
    source, target = torch.ones(mib * MIB, dtype=torch.uint8), torch.zeros(mib * MIB, dtype=torch.uint8)
    return lambda: target.copy_(source)


def advantage_calls(batch: TokenBatch) -> dict[str, Callable[[], object]]:
    """Every advantage function, on the responses or the tokens of ``batch``."""
    dice = random.Random(0)
    count = len(batch)
    rewards = [float(dice.random() < 0.5) for _ in range(count)]
    groups = [index // GROUP for index in range(count)]
    tokens = [float(length) for length in batch.lengths]
    old, mask, lengths = batch["old_logprobs"], batch.mask, batch.lengths
    kl = KLTerm("k1").estimate(old, batch["reference_logprobs"], mask)
    return {
        "group, leave one out, std": lambda: group_advantages(rewards, groups),
        "group, whole, std": lambda: group_advantages(rewards, groups, leave_one_out=False),
        "group, leave one out (RLOO)": lambda: group_advantages(rewards, groups, normalize_std=False),
        "group, whole (Dr. GRPO)": lambda: group_advantages(rewards, groups, normalize_std=False, leave_one_out=False),
        "mean (MaxRL)": lambda: mean_normalized(rewards, groups),
        "batch (REINFORCE++-baseline, GDPO)": lambda: batch_normalized(rewards, tokens),
        "tokens: KL to go (REINFORCE++)": lambda: kl_to_go(kl, mask, lengths),
        "tokens: normalized (REINFORCE++)": lambda: standardized(old, mask, unbiased=False),
    }


def _metrics(batch: TokenBatch) -> object:
    """What every loss reports besides its value."""
    policy, old, mask = batch["policy_logprobs"], batch["old_logprobs"], batch.mask
    return {
        **ratio_metrics(policy, old, mask),
        **sampler_metrics(policy, old, batch["generation_logprobs"], mask),
    }


def medians(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """CPU seconds of each call, all of them in turn, ``repeats`` times after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if round_:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def measure(batch: TokenBatch, repeats: int) -> dict[str, Any]:
    """Losses, advantages and the copy, with what follows from them."""
    parts = {
        "copy": copy_of(COPY_MIB),
        "metrics": lambda: _metrics(batch),
    }
    losses = {name: forward_backward(loss, batch) for name, loss in LOSSES.items()}
    found = medians({**parts, **losses}, repeats)
    bandwidth = 2 * COPY_MIB * MIB / found["copy"]  # each byte is read and written
    rows = []
    for name, loss in LOSSES.items():
        touched = loss_bytes(loss, batch)
        floor_s = touched / bandwidth
        rows.append(
            {
                "name": name,
                "seconds": found[name],
                "tokens_per_s": batch.num_tokens / found[name],
                "bytes_per_token": touched / batch.num_tokens,
                "floor_s": floor_s,
                "over_floor": found[name] / floor_s,
            }
        )
    credit = medians(advantage_calls(batch), repeats)
    return {
        "tokens": batch.num_tokens,
        "sequences": len(batch),
        "copy_gb_per_s": bandwidth / 1e9,
        "metrics_s": found["metrics"],
        "losses": rows,
        "advantages": [
            {"name": name, "seconds": seconds, "tokens_per_s": batch.num_tokens / seconds}
            for name, seconds in credit.items()
        ],
    }


def print_result(result: Mapping[str, Any]) -> None:
    tokens, sequences = result["tokens"], result["sequences"]
    print(
        f"{tokens / 1e6:.2f} M tokens in {sequences} responses; copy {result['copy_gb_per_s']:.1f} GB/s read + written"
    )
    print(f"of each loss, metrics: {result['metrics_s'] * 1e3:.1f} ms")
    columns = ("loss, forward and backward", "ms", "M tokens/s", "bytes/token", "floor ms", "x floor")
    rows: Sequence[Sequence[str]] = [
        (row["name"], f"{row['seconds'] * 1e3:.1f}", f"{row['tokens_per_s'] / 1e6:.1f}",
         f"{row['bytes_per_token']:.0f}", f"{row['floor_s'] * 1e3:.2f}", f"{row['over_floor']:.0f}")
        for row in result["losses"]
    ]  # fmt: skip
    print_table("Losses", columns, rows)
    rows = [
        (row["name"], f"{row['seconds'] * 1e3:.2f}", f"{row['tokens_per_s'] / 1e6:,.0f}")
        for row in result["advantages"]
    ]
    print_table("Advantages", ("function", "ms", "M tokens/s"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the batch, prompts included")
    parser.add_argument("--sequences", type=int, default=1024, help="responses; groups are of 16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    batch = make_batch(options.sequences, options.tokens // options.sequences)
    result = {"machine": machine(THREADS), **measure(batch, options.repeats)}
    print(result["machine"])
    print_result(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
