"""The first layer and token at which a training and a generation backend compute different things.

Both run the same tokens and record what they compute (``nemorl_tensors.engines.observing``): the sampler while it
generates, the trainer in one pass over prompt and response. Tensors are compared in the order in which they are
computed, token by token, and the first one that differs by more than rounding is named. Not here: log-probs, and who
builds the engines (``mismatch``).

# T = tokens, F = features
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from nemorl_tensors.engines.observing import Activations, Place
from torch import Tensor

FLOAT32_TOLERANCE = 5e-5
"""Relative difference of a token's features that is rounding in float32. Engines that agree showed 2e-6 at most."""
NOISE_FACTOR = 4.0
"""In a lower precision: how many times the rounding of the engine that is closer to float32 is still rounding."""
NOISE_FLOOR = 2**-7
"""Two units in the last place of bfloat16, for tensors that happen to round exactly."""
SMALL_TOKEN = 1e-3
"""Differences are relative to the norm of the token's features, or to this fraction of the median norm if that is
more: a token of nearly zero features is all rounding."""

ROTATION = (
    "rope_scaling or rope_theta that one side ignores: compare the configs, and policy.hf_config_overrides",
    "a rotary type whose frequencies depend on the length of the sequence",
)
NORM = (
    "another epsilon of the norm (rms_norm_eps)",
    "a norm that multiplies by 1 + weight on one side and by weight on the other",
    "the weight of the norm, exported under a wrong name or not updated",
)
PROJECTION = (
    "rows of this weight in another order, or under another name, at export: heads, fused or divided projections",
    "an update that did not reach this weight, or an adapter or bias that one side does not add",
)
STREAM = ("the branch before it is scaled or normed on one side only (Gemma, Granite, Cohere)",)
CAUSES: Mapping[str, tuple[str, ...]] = {
    "layer_input": ("the embeddings: their weight, its rows, or a factor that one side leaves out", *STREAM),
    "input_norm": NORM,
    "query": PROJECTION,
    "key": PROJECTION,
    "value": PROJECTION,
    "query_norm": NORM,
    "key_norm": NORM,
    "rotated_query": ROTATION,
    "rotated_key": ROTATION,
    "heads": (
        "the mask: a sliding window, or off by one token",
        "the factor of the scores, or their cap",
        "which query heads share a key-value head",
    ),
    "attention": PROJECTION,
    "attention_norm": NORM,
    "mlp_input": STREAM,
    "mlp_norm": NORM,
    "mlp_activation": (
        "another activation function (hidden_act): gelu and its tanh form, silu",
        "the weights of the gate and up projections, in another order",
    ),
    "mlp": (*PROJECTION, "in a mixture of experts: the router, or how its weights are normalised"),
    "mlp_out_norm": NORM,
    "last_output": STREAM,
    "final_norm": NORM,
    "logits": (
        "an output head tied to the embeddings, of which one side uses an old copy",
        "a scale or cap of the logits that one side leaves out",
    ),
}
"""Usual causes of a parting at a tensor whose predecessors agree, most frequent first."""
CACHE_CAUSE = "the cache: only generated tokens differ, whose keys and values were stored (layout, order, precision)"


@dataclass(frozen=True)
class Parting:
    """Where two engines part first."""

    place: Place
    position: int
    """Of the first token that differs, in prompt and response, from 0."""
    token_id: int
    is_generated: bool
    """The token was generated; no token of the prompt differs there."""
    difference: float
    """Norm of the difference of its features, relative to the trainer's."""
    tolerance: float
    """The difference that would be rounding."""
    largest: float
    """The same of the token that differs most there."""
    suspect: str | None
    """``trainer`` or ``sampler``: the one that is farther from float32; unknown where both compute in it."""

    @property
    def causes(self) -> tuple[str, ...]:
        found = CAUSES[self.place.role]
        return (CACHE_CAUSE, *found) if self.is_generated else found

    def __str__(self) -> str:
        token = f"{'generated' if self.is_generated else 'prompt'} token {self.position} (id {self.token_id})"
        farther = "" if self.suspect is None else f"; the {self.suspect} is farther from float32"
        return (
            f"the engines part at {self.place.description}, {token}: difference {self.difference:.3g}, rounding "
            f"{self.tolerance:.3g}, {self.largest:.3g} at the worst token{farther}"
        )

    def as_dict(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if name != "place"}
        return {"layer": self.place.layer, "role": self.place.role, **numbers, "causes": list(self.causes)}


@dataclass(frozen=True)
class LayerComparison:
    """All tensors that both engines recorded."""

    parting: Parting | None
    """``None``: they agree."""
    differences: Mapping[Place, float]
    """The largest of all tokens, per tensor, in the order of computation."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "parting": None if self.parting is None else self.parting.as_dict(),
            "differences": [
                {"layer": place.layer, "role": place.role, "largest": value}
                for place, value in self.differences.items()
            ],
        }


def compare_activations(
    trainer: Activations,
    sampler: Activations,
    token_ids: Sequence[int],
    prompt_tokens: int,
    reference: Activations | None = None,
) -> LayerComparison:
    """Find the first tensor and token that differ.

    Args:
        trainer: Of all tokens but the last, for the tensors of layers.
        sampler: Of the same tokens, or of the last of them.
        token_ids: [T + 1] prompt and response.
        prompt_tokens: How many of them are the prompt.
        reference: What the trainer computes with the same weights in float32. ``None``: both compute in float32.
    """
    differences: dict[Place, float] = {}
    parting: Parting | None = None
    for place, found in trainer.items():
        if place not in sampler:
            continue
        errors_T = relative_errors(sampler[place], found)
        differences[place] = float(errors_T.max())
        if parting is None:
            tolerance, suspect = _rounding(place, trainer, sampler, reference)
            past_T = (~(errors_T <= tolerance)).nonzero().flatten()
            if len(past_T):
                row = int(past_T[0])
                position = len(token_ids) - 1 - len(errors_T) + row
                parting = Parting(
                    place,
                    position,
                    token_ids[position],
                    position >= prompt_tokens,
                    float(errors_T[row]),
                    tolerance,
                    differences[place],
                    suspect,
                )
    return LayerComparison(parting, differences)


def relative_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """[T] norm of the difference of each token, relative to ``wanted``; of the last tokens if one has fewer than the
    other. Infinite where features are not finite, or not as many.

    Example:
        >>> relative_errors(torch.tensor([[3.0, 4.0], [0.0, 5.5]]), torch.tensor([[3.0, 4.0], [0.0, 5.0]])).tolist()
        [0.0, 0.10000000149011612]
    """
    tokens = min(len(found), len(wanted))
    found, wanted = found[-tokens:], wanted[-tokens:]
    if found.shape != wanted.shape:
        return torch.full((tokens,), torch.inf)
    norms_T = wanted.norm(dim=1)
    floor = max(float(norms_T.nanmedian()) * SMALL_TOKEN, torch.finfo(torch.float32).tiny)
    distances_T: Tensor = (found - wanted).norm(dim=1)
    errors_T: Tensor = distances_T / norms_T.clamp(min=floor)
    return errors_T.nan_to_num(nan=torch.inf)


def _rounding(
    place: Place, trainer: Activations, sampler: Activations, reference: Activations | None
) -> tuple[float, str | None]:
    """The tolerance at a place, and which engine is farther from float32.

    The engine that is closer is taken for the measure of rounding: a fault of the other does not hide itself.
    """
    if reference is None or place not in reference:
        return FLOAT32_TOLERANCE if reference is None else NOISE_FLOOR, None
    of_trainer, of_sampler = (
        float(relative_errors(engine[place], reference[place]).max()) for engine in (trainer, sampler)
    )
    suspect = "trainer" if of_trainer > of_sampler else "sampler"
    return max(NOISE_FLOOR, NOISE_FACTOR * min(of_trainer, of_sampler)), suspect
