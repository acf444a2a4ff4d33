"""Memory of the output head's backward pass: log-probs of scored tokens without the logits of all of them.

# M = scored tokens, V = vocabulary (of this rank), D = hidden size, b = bytes of a weight

Follows ``nemorl_tensors.logprobs`` and, where ranks share the vocabulary, ``nemorl_tensors.parallel_logprobs``.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import Part, count

CHUNK_LOGITS = 32 * 2**20
"""Logits that exist at one time."""
KEPT_LOGITS_BYTES = 128 * 2**20
"""Logits that take no more are kept from the forward pass."""
CPU_BLOCKS_BYTES = 3 * 2**20
"""Of passes over logits on a CPU, which take a part at a time that stays in its cache."""


@dataclass(frozen=True)
class Head:
    """How a backend computes log-probs.

    >>> Head(shares_vocabulary=True).chunk_tokens is None
    True
    """

    shares_vocabulary: bool
    """Ranks have parts of the vocabulary each, or the code for them runs"""
    adds_directly: bool = False
    """The head's gradient is added to the float32 sums as it comes"""
    chunk_tokens: int | None = None
    """Positions whose logits exist at one time; unset: as many as fill 128 MiB"""


def head_buffers(model: HeldModel, kind: Head) -> tuple[Part, ...]:
    """Logits and their gradient, the gradient of the states, and the head's gradient in float32.

    >>> head_buffers(model, Head(shares_vocabulary=False))[0].name  # doctest: +SKIP
    'logits'
    """
    g, b, tokens = model.geometry, model.element, model.microbatch_tokens
    if model.value_head:
        return (Part("values", 2.0 * b * tokens * g.hidden, f"gradient of {count(tokens)} states"),)
    vocabulary = g.vocabulary / model.tensor
    head = vocabulary * g.hidden if not (model.lora_rank or kind.adds_directly) else 0.0
    of_kind = _spread if kind.shares_vocabulary else _whole
    formula, logits = max(of_kind(model, kind, vocabulary, head).items(), key=lambda item: item[1])
    states = (4 if kind.shares_vocabulary else b) * tokens * g.hidden
    return (Part("logits", logits + states, f"{formula} + gradient of states {count(states)}B"),)


def scored_logits(model: HeldModel, kind: Head) -> float:
    """Bytes of logits in a forward pass without gradient: a chunk, and its normalizers in float32.

    >>> scored_logits(model, Head(shares_vocabulary=False))  # doctest: +SKIP
    201326592.0
    """
    if model.value_head:
        return 0.0
    chunk, _ = _portions(model, kind, model.geometry.vocabulary / model.tensor, kept=False)
    return (4 + model.element) * chunk


def _portions(model: HeldModel, kind: Head, vocabulary: float, *, kept: bool) -> tuple[float, float]:
    """Logits of a chunk, and of the next one."""
    tokens = model.microbatch_tokens
    chunk = kind.chunk_tokens or max(1, int(CHUNK_LOGITS / vocabulary))
    positions = tokens if kept else min(tokens, chunk)
    return positions * vocabulary, min(positions, tokens - positions) * vocabulary


def _whole(model: HeldModel, kind: Head, vocabulary: float, head: float) -> dict[str, float]:
    """One rank has the vocabulary: formula -> bytes of each moment."""
    b = model.element
    kept = kind.chunk_tokens is None and model.microbatch_tokens * vocabulary * b <= KEPT_LOGITS_BYTES
    chunk, following = _portions(model, kind, vocabulary, kept=kept)
    if model.on_cpu:
        two = b * (chunk + following) + 4 * head + CPU_BLOCKS_BYTES
        rounding = b * (following or chunk) + (4 + (b if b == 2 else 0)) * head  # beside the last chunk
        return {
            f"{b} B x {count(chunk + following)} + 4 B x {count(head)} + blocks": two,
            f"{b} B x {count(following or chunk)} + {4 + b} B x {count(head)}": rounding,
        }
    # Raw logits, the same in float32 unless they are, and their gradient, which outlives them.
    passing = 8 if b == 2 else 4
    return {
        f"{b + passing} B x {count(chunk)} + 4 B x {count(head)}": (b + passing) * chunk + 4 * head,
        f"4 B x {count(chunk)} + {b + passing} B x {count(following)} + 4 B x {count(head)}": 4
        * chunk
        * bool(following)
        + (b + passing) * following
        + 4 * head,
        f"{b + 4} B x {count(chunk)} + {4 + b} B x {count(head)}": (b + 4) * chunk + (4 + b) * head,
    }


def _spread(model: HeldModel, kind: Head, vocabulary: float, head: float) -> dict[str, float]:
    """Ranks share the vocabulary: float32 logits, less their normalizers, and their gradient; the next chunk's logits
    beside both of this one's; the product beside the sum of products."""
    b = model.element
    chunk, following = _portions(model, kind, vocabulary, kept=False)
    rounded = 2 if b == 2 else 0
    return {
        f"12 B x {count(chunk)} + 4 B x {count(head)}": 12 * chunk + 4 * head,
        f"{4 + b} B x {count(chunk)} + {4 + rounded} B x {count(following)} + 4 B x {count(head)}": (4 + b) * chunk
        + (4 + rounded) * following
        + 4 * head,
        f"{4 + b} B x {count(chunk)} + {4 + b} B x {count(head)}": (4 + b) * chunk + (4 + b) * head,
    }
