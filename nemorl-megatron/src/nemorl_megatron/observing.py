"""Recording of the values that megatron-core's layers compute, under the names of ``nemorl_tensors.engines.observing``.

# S = tokens, B = rows, g = key-value heads, r = query heads of each, D = head size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl_tensors.engines.observing import Recorder, Tap, entering, first, leaving, norm_taps, watching
from torch import Tensor, nn

from nemorl_megatron.layers import NormedRowParallelLinear
from nemorl_megatron.model import PolicyModel

if TYPE_CHECKING:
    from nemorl_megatron.parallel import Parallel

LAYER_TAPS: Mapping[str, tuple[Tap, ...]] = {
    "input_layernorm": norm_taps("layer_input", "input_norm"),
    "self_attention.q_layernorm": (leaving("query_norm"),),
    "self_attention.k_layernorm": (leaving("key_norm"),),
    "self_attention.core_attention": (
        entering("rotated_query", 0, newest_of=0),
        entering("rotated_key", 1, newest_of=0),
    ),
    "self_attention.linear_proj": (entering("heads"),),
    "pre_mlp_layernorm": norm_taps("mlp_input", "mlp_norm"),
    "mlp.linear_fc2": (entering("mlp_activation"),),
}
"""By the name of a module within its layer; what a layer lacks is left out."""


@contextmanager
def observed(pieces: Sequence[nn.Module], parallel: Parallel, recorder: Recorder) -> Iterator[None]:
    """Within it, forward passes of a model that is whole in this process are recorded, all but the logits.

    Raises:
        BackendError: It is not, or another library built it.
    """
    model = pieces[0]
    if parallel.world_size > 1 or len(pieces) > 1 or not isinstance(model, PolicyModel):
        raise BackendError(
            "activations of a model that is in parts, or that Megatron-Bridge built, cannot be recorded",
            fix="compare on one worker, and uninstall megatron-bridge if nemorl-megatron knows the model itself",
        )
    taps: list[tuple[nn.Module, int | None, Tap]] = []
    for index, layer in enumerate(model.decoder.layers):
        modules = dict(layer.named_modules())
        wanted = {**LAYER_TAPS, **_projections(layer, model.config.num_query_groups, model.config.kv_channels)}
        taps += [(modules[name], index, tap) for name, found in wanted.items() if name in modules for tap in found]
    taps += [(model.decoder.final_layernorm, None, tap) for tap in norm_taps("last_output", "final_norm")]
    with watching(recorder, model.embedding, taps):
        yield


def _projections(layer: nn.Module, groups: int, head: int) -> dict[str, tuple[Tap, ...]]:
    def part(which: slice, _: Any, output: Any) -> Tensor:
        states: Tensor = first(output)
        grouped = states.view(*states.shape[:-1], groups, -1, head)
        return grouped[..., which, :]

    # One projection gives each key-value head's queries, then its key and its value.
    slices = {"query": slice(None, -2), "key": slice(-2, -1), "value": slice(-1, None)}
    found: dict[str, tuple[Tap, ...]] = {
        "self_attention.linear_qkv": tuple(Tap(role, partial(part, which)) for role, which in slices.items())
    }
    modules = dict(layer.named_modules())
    for name, whole, role, norm_role in (
        ("self_attention.linear_proj", "self_attention.linear_proj", "attention", "attention_norm"),
        ("mlp.linear_fc2", "mlp", "mlp", "mlp_out_norm"),
    ):
        if isinstance(modules.get(name), NormedRowParallelLinear):
            found[f"{name}.post_layernorm"] = (entering(role), leaving(norm_role))
        else:
            found[whole] = (*LAYER_TAPS.get(whole, ()), leaving(role))
    return found
