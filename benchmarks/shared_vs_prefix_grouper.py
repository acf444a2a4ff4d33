"""Groups of responses to one prompt: layouts ``shared`` and ``padded``, and PrefixGrouper (2506.05433) on plain torch.

    pip install prefix-grouper==0.0.1.post1
    python benchmarks/shared_vs_prefix_grouper.py --json

A training step of each (forward, backward, AdamW) on the same weights and groups, in turn; CPU seconds, medians. The
three must agree: log-probs, and the weights after one step. PrefixGrouper runs as its documentation says, its attention
registered with transformers over torch's SDPA; its own needs flash attention. Its head sees the scored tokens alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side, write_model
from _matrices import cpu_model, matrices_line, matrix_speeds

THREADS = limit_threads()
CASES = ("p128r64g8", "p512r64g16", "p64r256g8")
ROWS = 64
"""Responses per step."""
SIZES = re.compile(r"p(\d+)r(\d+)g(\d+)")
OPTIMIZER: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
"""AdamW whose first update is g / (|g| + 1): it shows the gradient."""
TOLERANCE = {"logprobs": 1e-4, "update": 1e-4}
"""In nats, and relative to the norm of the update: float32 in other orders of summation."""
ATTENTION = "prefix_grouper_sdpa"


def attend(module: Any, query: Any, key: Any, value: Any, _mask: Any, *, prefix_grouper: Any, **options: Any) -> Any:
    """PrefixGrouper's two calls of attention, as transformers calls an attention function."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def one_call(q: Any, k: Any, v: Any, _padding: Any) -> Any:
        # As flash attention aligns them: the last query sees the last key. All lengths are equal, so nothing is padded.
        before = k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before) if before else None
        options_of = {"is_causal": seen is None, "scale": options.get("scaling"), "enable_gqa": True}
        return scaled_dot_product_attention(q, k, v, seen, **options_of).transpose(1, 2)

    return prefix_grouper.forward(one_call, query, key, value), None


class Grouped:
    """A transformers model trained with PrefixGrouper."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION, attend)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=ATTENTION)
        self.model.eval()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIMIZER, fused=True)

    def logprobs(self, groups: Sequence[tuple[list[int], list[list[int]]]]) -> Any:
        """[responses, tokens] of equal lengths."""
        import torch
        from prefix_grouper import PrefixGrouper

        prompts = torch.tensor([prompt for prompt, _ in groups])
        responses = torch.tensor([response for _, group in groups for response in group])
        size = len(groups[0][1])
        masks = torch.ones_like(prompts), torch.ones_like(responses)
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=masks[0], suffix_mask=masks[1], group_sizes=size, padding_mode="right", device="cpu"
        )
        ids = grouper.concat_input(prompts, masks[0], responses, masks[1])
        after = torch.arange(prompts.shape[1], prompts.shape[1] + responses.shape[1]).repeat(size)
        positions = torch.cat([torch.arange(prompts.shape[1]), after]).expand(len(groups), -1)
        states = self.model.model(
            input_ids=ids, position_ids=positions, use_cache=False, prefix_grouper=grouper
        ).last_hidden_state
        _, _, found, _ = grouper.split_output(states, include_prefix_last=1)
        logits = self.model.lm_head(found[:, :-1])
        return logits.gather(-1, responses[..., None]).squeeze(-1) - logits.logsumexp(-1)

    def step(self, groups: Sequence[tuple[list[int], list[list[int]]]], advantages: Any) -> None:
        """-mean(advantage * log-prob), backward, one update."""
        logprobs = self.logprobs(groups)
        (-(logprobs * advantages).sum() / logprobs.numel()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


class Backend:
    """The backend ``dtensor`` in a layout."""

    def __init__(self, model: Path, layout: str) -> None:
        from nemorl.config import PolicyConfig
        from nemorl.resources.worker import WorkerContext

        policy = PolicyConfig.model_validate(
            {"model_name": str(model), "backend": {"name": "dtensor", "layout": layout}, "optimizer": OPTIMIZER,
             "max_grad_norm": None}
        )  # fmt: skip
        self._inner = policy.backend.build(policy, WorkerContext(), reference=False)

    def batch(self, groups: Sequence[tuple[list[int], list[list[int]]]], advantages: Any) -> Any:
        import torch
        from nemorl_tensors import TokenBatch

        rows = [(prompt, response) for prompt, group in groups for response in group]
        batch = TokenBatch.from_sequences(
            [prompt + response for prompt, response in rows],
            [[False] * len(prompt) + [True] * len(response) for prompt, response in rows],
        )
        per_token = torch.zeros(batch.num_tokens)
        per_token[batch.mask] = advantages.flatten()
        return batch.with_tokens(advantages=per_token)

    def logprobs(self, groups: Any, advantages: Any) -> Any:
        batch = self.batch(groups, advantages)
        return self._inner.get_logprobs(batch)[batch.mask].view(advantages.shape)

    def step(self, groups: Any, advantages: Any) -> None:
        from nemorl_testing.batches import WeightedNLL

        self._inner.train_step(self.batch(groups, advantages), WeightedNLL())

    def weights(self) -> dict[str, Any]:
        return {name: t.detach().clone() for bucket in self._inner.export_weights() for name, t in bucket.items()}


def drawn_groups(case: str) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, responses) of the sizes that a case names."""
    import random

    sizes = SIZES.fullmatch(case)
    if sizes is None:
        raise SystemExit(f"there is no case {case!r}: use sizes such as p128r64g8")
    prompt, response, size = map(int, sizes.groups())
    draw = random.Random(case)

    def text(count: int) -> list[int]:
        return [draw.randrange(8, 90) for _ in range(count)]

    return [(text(prompt), [text(response) for _ in range(size)]) for _ in range(ROWS // size)]


def update_gaps(sides: dict[str, Any], groups: Any, advantages: Any, start: dict[str, Any]) -> dict[str, float]:
    """How far the update of each layout is from PrefixGrouper's, relative to its norm.

    Raises:
        RuntimeError: They do not compute the same.
    """
    for side in sides.values():
        side.step(groups, advantages)
    wanted = {name: tensor - start[name] for name, tensor in sides["PrefixGrouper"].weights().items()}
    size = sum(float(tensor.double().square().sum()) for tensor in wanted.values()) ** 0.5
    gaps: dict[str, float] = {}
    for name, side in sides.items():
        if name == "PrefixGrouper":
            continue
        update = {key: tensor - start[key] for key, tensor in side.weights().items()}
        gap = sum(float((update[key] - wanted[key]).double().square().sum()) for key in wanted) ** 0.5 / size
        gaps[f"{name}: update"] = gap
        if gap > TOLERANCE["update"]:
            raise RuntimeError(f"{name} and PrefixGrouper learn differently: {gap:.3g} of the update")
    return gaps


def cpu_seconds(work: Callable[[], Any]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def measure(case: str, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Median CPU seconds of a step of each side, and how far they are apart."""
    import torch

    groups = drawn_groups(case)
    shape = (ROWS, len(groups[0][1][0]))
    advantages = torch.empty(shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name))
        sides = {
            "shared": Backend(model, "shared"),
            "padded": Backend(model, "padded"),
            "PrefixGrouper": Grouped(model),
        }
        with torch.no_grad():
            expected = sides["PrefixGrouper"].logprobs(groups)
        gaps = {
            f"{side}, log-probs": float((sides[side].logprobs(groups, advantages) - expected).abs().max())
            for side in ("shared", "padded")
        }
        for what, gap in gaps.items():
            if gap > TOLERANCE["logprobs"]:
                raise RuntimeError(f"{what} differ from PrefixGrouper's by {gap:.3g} nats")
        gaps |= update_gaps(sides, groups, advantages, sides["PrefixGrouper"].weights())
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, found in times.items():
                found.append(cpu_seconds(lambda side=side: sides[side].step(groups, advantages)))
    return {side: statistics.median(found) for side, found in times.items()}, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    start_side(THREADS)
    speeds = matrix_speeds()
    print(machine(THREADS), cpu_model(), matrices_line(speeds), sep="\n")
    rows, found = [], {}
    for case in options.cases:
        times, gaps = measure(case, options)
        found[case] = {"cpu_s": times, "differences": gaps}
        for side, cpu_s in times.items():
            gap = gaps.get(f"{side}, log-probs"), gaps.get(f"{side}: update")
            rows.append(
                [case, side, f"{cpu_s:.3f}", f"{times['PrefixGrouper'] / cpu_s:.2f}",
                 *("-" if value is None else f"{value:.1e}" for value in gap)]
            )  # fmt: skip
    columns = ["case", "side", "CPU s/step", "PrefixGrouper / this", "log-probs differ", "update differs"]
    print_table(f"Training steps of {ROWS} responses, medians of {options.repeats}", columns, rows)
    if options.json:
        ratios = {
            case: round(part["cpu_s"]["PrefixGrouper"] / part["cpu_s"]["shared"], 3) for case, part in found.items()
        }
        where = {"cpu": cpu_model(), "gflop_per_cpu_s": speeds}
        print(json.dumps({"ratios": ratios, "cases": found, "machine": where}))


if __name__ == "__main__":
    main()
