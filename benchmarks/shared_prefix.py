"""The cost of a training step when tokens that sequences share are computed once, beside the tokens saved.

    python benchmarks/shared_prefix.py --steps 9 --json
    python benchmarks/shared_prefix.py --model llama27m --cases p128r64g8,p512r64g16 --sides padded,shared

Sides take turns within a round: nemorl-dtensor in layouts ``padded``, ``packed`` and ``shared``, and PrefixGrouper
(https://github.com/johncaged/PrefixGrouper, ``pip install prefix_grouper``), which shares one prompt per group, on the
same weights. Each times forward, backward and one AdamW update of the log-probs of all responses; ``forward`` is
log-probs alone. Figures are medians of CPU seconds, and of ratios within a round. ``error`` and ``gradient`` (its norm)
compare with the first side before the first update.

Cases: ``pPrRgG`` is a group of G responses of R tokens to P prompt tokens; ``dpo`` a pair of 128 tokens on 256;
``tree`` a prompt of 128, four first turns of 96, four second turns of 64 to each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table

THREADS = limit_threads()

import torch  # noqa: E402  after the thread limit
from nemorl.config import PolicyConfig  # noqa: E402
from nemorl.resources.worker import WorkerContext  # noqa: E402
from nemorl_dtensor import DTensorConfig  # noqa: E402
from nemorl_sft.loss import NLLLoss  # noqa: E402
from nemorl_tensors import TokenBatch, linear_logprobs  # noqa: E402
from nemorl_tensors.engines.prefix_forest import PrefixForest  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # noqa: E402

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "qwen0.8m": ("qwen2", {"vocab_size": 99, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}),
    "llama27m": ("llama", {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}),
    "llama135m": (
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    ),
}
HEADS = {"qwen0.8m": (4, 2), "llama27m": (8, 4), "llama135m": (9, 3)}
CASES = "p128r32g8,p128r64g8,p128r128g8,p512r64g16,p64r256g8,dpo,tree"
SIDES = "padded,packed,shared,prefix_grouper"
FIRST_TOKEN = 8
WARM_UP = 1


def sequences(case: str) -> tuple[list[list[int]], int]:
    """Token ids, and the prompt tokens of each, which are not scored."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN, 99) for _ in range(count)]

    if case == "tree":
        prompt = tokens(128)
        turns = [prompt + tokens(96) for _ in range(4)]
        return [turn + tokens(64) for turn in turns for _ in range(4)], 128
    found = re.fullmatch(r"p(\d+)r(\d+)g(\d+)", "p256r128g2" if case == "dpo" else case)
    if found is None:
        raise SystemExit(f"unknown case {case!r}: write p128r64g8, dpo or tree")
    prompt_tokens, response_tokens, count = map(int, found.groups())
    prompt = tokens(prompt_tokens)
    return [prompt + tokens(response_tokens) for _ in range(count)], prompt_tokens


def write_model(name: str, folder: Path, precision: str) -> Path:
    """Random weights, the same for all sides."""
    kind, sizes = MODELS[name]
    heads, kv_heads = HEADS[name]
    config = AutoConfig.for_model(
        kind,
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision)).save_pretrained(folder)
    return folder


class Nemorl:
    """The backend in one layout."""

    def __init__(self, model: Path, layout: str, precision: str) -> None:
        policy = PolicyConfig(
            model_name=str(model), precision=precision, optimizer={"lr": 1e-6, "weight_decay": 0.0}, max_grad_norm=None
        )
        self._backend: Any = DTensorConfig(layout=layout).build(policy, WorkerContext(), reference=False)

    def can(self, _case: str) -> bool:
        return True

    def logprobs(self, batch: TokenBatch) -> Tensor:
        found: Tensor = self._backend.get_logprobs(batch)
        return found

    def step(self, batch: TokenBatch) -> float:
        """The gradient's norm."""
        return float(self._backend.train_step(batch, NLLLoss())["grad_norm"].value)


def lower_right_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """What PrefixGrouper asks of an attention function: causal from the last query and key, [B, K] keys that count."""
    queries, keys = query.shape[2], key.shape[2]
    causal = torch.ones((queries, keys), dtype=torch.bool).tril(keys - queries)
    seen = causal & mask[:, None, None, :]
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=options["scaling"], enable_gqa=query.shape[1] != key.shape[1]
    )
    return found.transpose(1, 2), None


class Grouper:
    """PrefixGrouper as its README has it: one row per group, attention by torch."""

    def __init__(self, model: Path, _layout: str, precision: str) -> None:
        from prefix_grouper.utils.register_transformers import register_attention

        register_attention()
        AttentionInterface.register("lower_right", lower_right_attention)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, precision), attn_implementation="sdpa"
        )
        self._model.set_attn_implementation("prefix_grouper_attention")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def can(self, case: str) -> bool:
        """It shares one prefix, not a tree."""
        return case != "tree"

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        return self.scored(batch)

    def scored(self, batch: TokenBatch) -> Tensor:
        """[N] log-probs; every sequence has the same prompt."""
        from prefix_grouper import PrefixGrouper

        ids = torch.stack(batch.token_ids.split(batch.lengths.tolist()))
        prompt_tokens = int((~batch.mask[: ids.shape[1]]).sum())
        places = torch.arange(ids.shape[1])
        group = PrefixGrouper([[prompt_tokens, *[ids.shape[1] - prompt_tokens] * len(ids)]])
        parts = (ids[:1, :prompt_tokens], ids[:, prompt_tokens:])
        masks = [torch.ones_like(part, dtype=torch.bool) for part in parts]
        position_ids = group.concat_input(
            places[None, :prompt_tokens], masks[0], places[prompt_tokens:].repeat(len(ids), 1), masks[1]
        )
        states = self._model.model(
            input_ids=group.concat_input(parts[0], masks[0], parts[1], masks[1]),
            position_ids=position_ids,
            use_cache=False,
            prefix_grouper=group,
            prefix_grouper_attn_func="lower_right",
        ).last_hidden_state
        _, _, states, _ = group.split_output(states, include_prefix_last=1)
        logprobs = linear_logprobs(states[:, :-1].flatten(0, 1), self._model.lm_head.weight, parts[1].flatten())
        return torch.zeros(batch.num_tokens).masked_scatter(batch.mask, logprobs)

    def step(self, batch: TokenBatch) -> float:
        """The gradient's norm."""
        self._optimizer.zero_grad()
        loss, _ = NLLLoss()(self.scored(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._model.parameters() if p.grad is not None])
        self._optimizer.step()
        return float(norm)


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def batch_of(case: str) -> TokenBatch:
    ids, prompt_tokens = sequences(case)
    return TokenBatch.from_sequences(
        ids, [[False] * prompt_tokens + [True] * (len(row) - prompt_tokens) for row in ids]
    )


def measure(case: str, sides: dict[str, Nemorl | Grouper], logprobs: dict[str, Tensor], rounds: int) -> list[Any]:
    """One record per side that can do the case; ``logprobs`` are theirs, by name, of the first weights."""
    batch = batch_of(case)
    forest = PrefixForest.of_batch(batch)
    names = list(logprobs)
    norms = {name: sides[name].step(batch) for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    forwards: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + WARM_UP):
        for name in names:
            steps[name].append(cpu_seconds(partial(sides[name].step, batch)))
            forwards[name].append(cpu_seconds(partial(sides[name].logprobs, batch)))
    first = names[0]
    return [
        {
            "case": case,
            "side": name,
            "tokens": forest.sequence_tokens,
            "tree_tokens": forest.tokens,
            "token_ratio": forest.ratio,
            "step_cpu_s": statistics.median(steps[name][WARM_UP:]),
            "step_ratio": _ratio(steps[first], steps[name]),
            "forward_cpu_s": statistics.median(forwards[name][WARM_UP:]),
            "forward_ratio": _ratio(forwards[first], forwards[name]),
            "error": float((logprobs[name] - logprobs[first]).abs().max()),
            "gradient_norm_error": abs(norms[name] / norms[first] - 1),
        }
        for name in names
    ]


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of the first side's time in the other's."""
    return statistics.median(a / b for a, b in zip(one[WARM_UP:], other[WARM_UP:], strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen0.8m")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--sides", default=SIDES, help="the first is what the others are compared with")
    parser.add_argument("--steps", type=int, default=9, help="counted rounds")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="also print one JSON object")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.model, Path(folder), options.precision)
        sides: dict[str, Nemorl | Grouper] = {
            name: (Grouper if name == "prefix_grouper" else Nemorl)(model, name, options.precision)
            for name in options.sides.split(",")
        }
    # Before anything is updated.
    logprobs = {
        case: {name: side.logprobs(batch_of(case)) for name, side in sides.items() if side.can(case)}
        for case in options.cases.split(",")
    }
    records = [record for case, found in logprobs.items() for record in measure(case, sides, found, options.steps)]
    columns = ["case", "side", "tokens", "token ratio", "step CPU s", "ratio", "forward ratio", "error", "gradient"]
    rows = [
        [
            record["case"],
            record["side"],
            f"{record['tokens']} -> {record['tree_tokens']}",
            f"{record['token_ratio']:.2f}",
            f"{record['step_cpu_s']:.3f}",
            f"{record['step_ratio']:.2f}",
            f"{record['forward_ratio']:.2f}",
            f"{record['error']:.1e}",
            f"{record['gradient_norm_error']:.1e}",
        ]
        for record in records
    ]
    print_table(f"{options.model}, {options.precision}, {options.steps} rounds, {THREADS} thread(s)", columns, rows)
    if options.json:
        ratios = {f"{r['case']} {r['side']}": r["step_ratio"] for r in records}
        print(json.dumps({"model": options.model, "records": records, "ratios": ratios}))


if __name__ == "__main__":
    main()
