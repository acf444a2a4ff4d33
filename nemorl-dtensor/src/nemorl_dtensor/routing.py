"""The experts that the routers of a mixture choose: noted while sampling, given back to them in training.

# T = tokens of a pass, E = experts, K = experts of a token, L = layers of experts

Sampler and trainer round differently, so that a token whose experts score almost alike goes to others in one of them:
its log-prob then jumps. Rollout routing replay ("Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv:2510.11370, section 3) has the trainer take the sampler's choice. Only the choice is replaced:
weights are the trainer's own router's scores of the chosen experts, normalised as the family does, so that routers
learn.

A router is a module of the class that transformers records router logits of. Its choice is its one ``topk`` over all
experts, and what follows is its own code: with its own choice given back, a model computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from nemorl.metrics import Mean
from nemorl_tensors.engines.routers import replayed_choice, require_routes_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 8

Choose = Callable[[Tensor, Tensor], Tensor]
"""([T, E] scores, [T, K] int64 own choice) -> [T, K] int64 choice"""


@dataclass(frozen=True)
class Choice:
    """How many experts a router has, and how many it chooses."""

    experts: int
    chosen: int


class _ChoiceMode(TorchFunctionMode):
    """Within it, a router's choice is what ``choose`` makes of it."""

    def __init__(self, choice: Choice, choose: Choose) -> None:
        super().__init__()
        self._choice, self._choose = choice, choose
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        values, own = found
        # Groups of experts are chosen, too: their scores have another shape.
        if scores.ndim != 2 or scores.shape[1] != self._choice.experts or own.shape[1] != self._choice.chosen:
            return found
        self.calls += 1
        chosen = self._choose(scores, own)
        values = values if chosen is own else scores.gather(1, chosen)
        return torch.return_types.topk((values, chosen))


@dataclass
class Noted:
    """The choices of one pass."""

    layers: dict[int, Tensor] = field(default_factory=dict)

    @property
    def routes(self) -> Tensor:
        """[T, L, K] int16"""
        return torch.stack([self.layers[layer] for layer in sorted(self.layers)], 1).to(torch.int16)


class Routers:
    """The routers of a model, in the order of its layers. Their modules stay as they are unless a choice is wanted."""

    def __init__(self, routers: Sequence[nn.Module], choice: Choice, context: dist.ProcessGroup | None = None) -> None:
        self._routers, self.choice, self._context = routers, choice, context
        self._chooses: Callable[[int], Choose | None] = lambda layer: None
        self._routes: Tensor | None = None
        self._counted: set[int] = set()
        """Layers of the pass whose choices are counted."""
        self._flipped: Tensor | None = None
        """[2] int64: choices that the routers would have made otherwise, and all that were replayed."""
        for layer, router in enumerate(routers):
            router.forward = partial(self._routed, layer, router.forward)

    @classmethod
    def of(cls, model: PreTrainedModel, context: dist.ProcessGroup | None = None) -> Routers:
        """
        Args:
            model: A mixture.
            context: The ranks that share the tokens of each pass; ``None``: this one has all of them.

        Raises:
            BackendError: Routes of the model cannot be replayed.
        """
        if why := obstacle(model):
            raise BackendError(
                f"routes of {type(model).__name__} cannot be replayed: {why}",
                fix="set policy.backend.router.replay: false",
            )
        found: list[Any] = router_modules(model)
        return cls(found, choice_of(found[0]), context)

    @property
    def layers(self) -> int:
        return len(self._routers)

    @contextmanager
    def noting(self) -> Iterator[Noted]:
        """Within it, choices are noted."""
        noted = Noted()

        def note(layer: int, _scores: Tensor, own: Tensor) -> Tensor:
            noted.layers[layer] = own.detach()
            return own

        self._chooses = lambda layer: partial(note, layer)
        try:
            yield noted
        finally:
            self._chooses = lambda layer: None

    def replay(self, routes: Tensor | None) -> None:
        """Passes from now on, and their repetition when activations are recomputed, take these routes.

        Args:
            routes: [T, L, K] of all tokens of the pass, ``NO_ROUTE`` where the router's own choice holds. ``None``: it
                does everywhere.

        Raises:
            BackendError: They are of another model.
        """
        if routes is not None:
            require_routes_of(routes, self.layers, self.choice.chosen)
        self._routes, self._counted = routes, set()
        self._chooses = (lambda layer: None) if routes is None else self._replayed

    def take_flipped(self) -> Mean:
        """The share of replayed choices since it was last asked that the routers would have made otherwise.

        Of ranks that share tokens each has the share of all of them. Collective there.
        """
        counts, self._flipped = self._flipped, None
        if self._context is not None and counts is not None:  # these ranks have the same passes
            dist.all_reduce(counts, group=self._context)
        return Mean(0.0, 0.0) if counts is None else Mean(*map(float, counts.tolist()))

    def _replayed(self, layer: int) -> Choose:
        assert self._routes is not None, "set by replay()"
        return partial(self._recorded, layer, self._routes[:, layer])

    def _recorded(self, layer: int, recorded: Tensor, scores: Tensor, own: Tensor) -> Tensor:
        if len(recorded) != len(scores):
            raise BackendError(
                f"a layer routes {len(scores)} tokens of a pass that has {len(recorded)}",
                fix="set policy.backend.router.replay: false",
            )
        choice, flips = replayed_choice(recorded, own)
        if layer not in self._counted:  # a recomputed pass is the same one
            self._counted.add(layer)
            self._flipped = flips if self._flipped is None else self._flipped + flips
        return choice

    def _routed(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choose = self._chooses(layer)
        if choose is None:
            return forward(*args, **kwargs)
        with _ChoiceMode(self.choice, choose) as mode:
            found = forward(*args, **kwargs)
        assert mode.calls == 1, "choice_of() has tried it"
        return found


def router_modules(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, by the class that transformers records router logits of, in the order of its layers."""
    recorded = (getattr(type(module), "_can_record_outputs", None) or {} for module in model.modules())
    recorders = [each["router_logits"] for each in recorded if "router_logits" in each]
    classes = {getattr(recorder, "target_class", recorder) for recorder in recorders}
    own = tuple(kind for kind in classes if not kind.__module__.startswith("torch."))
    return [module for module in model.modules() if isinstance(module, own)] if own else []


def obstacle(model: PreTrainedModel) -> str:
    """Why routes of a model cannot be told and replayed; empty if they can.

    A router of its kind, with random weights, is given another choice than its own.
    """
    routers = router_modules(model)
    if not routers:
        return "its layers have no experts that transformers knows the router of"
    kind, config = type(routers[0]), model.config.get_text_config()
    try:
        choice = choice_of(routers[0])
        router = _random_copy(kind, config)
        with _ChoiceMode(choice, lambda _, own: (own + 1) % choice.experts) as mode, torch.no_grad():
            found = router(torch.randn(PROBE_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0)))
    except (TypeError, ValueError, AttributeError, RuntimeError) as refusal:
        return f"{kind.__name__}: {refusal}"
    weights = [each for each in found if each.is_floating_point() and each.shape == (PROBE_TOKENS, choice.chosen)]
    if mode.calls != 1 or not all(bool((each != 0).all()) for each in weights):
        return f"{kind.__name__} gives experts that it would not choose no weight"
    return ""


def choice_of(router: Any) -> Choice:
    """How many experts a router of transformers has and chooses."""
    return Choice(router.num_experts, router.top_k)


def _random_copy(kind: Callable[..., nn.Module], config: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        router = kind(config).float()
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(generator=generator)
    return router
