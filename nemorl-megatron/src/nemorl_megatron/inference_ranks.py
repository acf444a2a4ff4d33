"""Messages between the ranks of one copy of the model while they generate.

Hidden states go from stage to stage, parts of the logits to the first tensor-parallel rank of the last stage, which
draws, and the tokens from there to all. So every rank of a copy knows the same rows, tokens and ends of responses.

Copies know nothing of each other's rows. Where they share experts, tokens travel between them in every pass, and a copy
whose responses have ended makes passes of nothing until all have.
"""

# S = tokens of a row in this pass, B = rows, H = hidden size, M = rows to draw for, V = vocabulary
# U = tokens in this rank's part of it

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemorl.media import Media
from nemorl.types import SamplingParams
from nemorl_tensors.engines.sampling import RowSampler
from torch import Tensor
from torch.nn.functional import pad

from nemorl_megatron.head import OutputHead
from nemorl_megatron.inference import Prompts

if TYPE_CHECKING:
    from nemorl_tensors.engines.decoding import Sampler
    from nemorl_tensors.engines.observing import Recorder

    from nemorl_megatron.inference import Pass
    from nemorl_megatron.model import PolicyModel
    from nemorl_megatron.parallel import Parallel


SCORED_TOKENS = 1024
"""Positions of a prompt whose logits are in memory at one time."""


class Stages:
    """The pieces of a model on all ranks of a copy, as one function of this rank's part in it. Collective."""

    def __init__(
        self, pieces: Sequence[PolicyModel], parallel: Parallel, vocabulary: int, logit_cap: float | None
    ) -> None:
        """
        Args:
            pieces: This rank's.
            parallel: Its place.
            vocabulary: Token ids are below this.
            logit_cap: Logits l become cap * tanh(l / cap).
        """
        self.pieces, self.parallel, self.vocabulary = pieces, parallel, vocabulary
        place, stages = parallel.place, parallel.sizes.pipeline
        copy = {
            (other.pipeline, other.tensor): other.rank
            for other in parallel.places
            if (other.data, other.context) == (place.data, place.context)
        }
        self._before = copy[(place.pipeline - 1) % stages, place.tensor]
        self._after = copy[(place.pipeline + 1) % stages, place.tensor]
        self._drawing = copy[stages - 1, 0]
        self._head = OutputHead(pieces[-1], parallel, vocabulary, logit_cap) if pieces[-1].post_process else None
        self._recorder: Recorder | None = None

    @property
    def draws(self) -> bool:
        """Whether this rank is the one that is given logits."""
        return self.parallel.rank == self._drawing

    def sampler(self) -> Sampler:
        """One that draws where the logits are."""
        device = torch.device(self.parallel.device)
        if self.parallel.sizes.tensor * self.parallel.sizes.pipeline == 1:
            return RowSampler(device)
        return SharedSampler(RowSampler(device) if self.draws else None, self._drawing)

    def forward(self, token_ids: Tensor, row_pass: Pass) -> Tensor:
        """[B, S] tokens to [S, B, H] hidden states, of this rank's last piece."""
        self._meet(busy=True)
        return self._forward(token_ids, row_pass)

    def prompt_logprobs(
        self, prompts: Sequence[tuple[int, ...]], media: Mapping[int, Media]
    ) -> list[tuple[float, ...]]:
        """float32 nats of ``softmax(logits)`` for every token of each prompt, 0.0 for its first. Collective."""
        return [self._prompt_logprobs(prompt) for prompt in prompts]

    def _prompt_logprobs(self, prompt: tuple[int, ...]) -> tuple[float, ...]:
        device = torch.device(self.parallel.device)
        ids = torch.tensor(prompt, device=device)
        states = self.forward(ids[None], Prompts(len(prompt), device))
        found = torch.zeros(len(prompt), device=device)
        for start in range(0, len(prompt) - 1, SCORED_TOKENS):
            end = min(start + SCORED_TOKENS, len(prompt) - 1)
            logits = self.logits(states[start:end, 0])
            if self.draws:
                logprobs = torch.log_softmax(logits, -1)
                found[start + 1 : end + 1] = logprobs.gather(1, ids[start + 1 : end + 1, None])[:, 0]
        if self.parallel.sizes.tensor * self.parallel.sizes.pipeline > 1:
            dist.broadcast(found, self._drawing, group=parallel_state.get_model_parallel_group())
        return tuple(found.tolist())

    @torch.no_grad()
    def keep_step(self) -> None:
        """Make passes of nothing as long as a copy that shares experts with this one is generating."""
        device = torch.device(self.parallel.device)
        while self._meet(busy=False):
            self._forward(torch.zeros(1, 1, dtype=torch.int64, device=device), Prompts(1, device))

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Within it, this rank's logits are recorded."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def _meet(self, *, busy: bool) -> bool:
        """Whether any copy is about to make a pass for rows of its own."""
        if self.parallel.sizes.expert == 1:
            return False
        found = torch.tensor(busy, dtype=torch.int64, device=self.parallel.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=parallel_state.get_tensor_and_data_parallel_group())
        return bool(found)

    def _forward(self, token_ids: Tensor, row_pass: Pass) -> Tensor:
        rows, tokens = token_ids.shape
        config = self.pieces[0].config
        states = torch.empty(0)
        for piece in self.pieces:
            if not piece.pre_process:
                states = torch.empty(
                    tokens, rows, config.hidden_size, dtype=config.params_dtype, device=token_ids.device
                )
                dist.recv(states, self._before)
                piece.set_input_tensor(states)
            states = piece(token_ids, row_pass=row_pass)
            if not piece.post_process:
                dist.send(states.contiguous(), self._after)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[M, V] float32 after hidden states [M, H] where ``draws``, [M, 0] elsewhere."""
        nothing = states.new_empty(len(states), 0, dtype=torch.float32)
        if self._head is None:
            return nothing
        own = self._head.logits(states)
        if self._recorder is not None:
            self._recorder.add_last("logits", own)
        if self.parallel.sizes.tensor == 1:
            return own
        # The last ranks may have fewer tokens.
        own = pad(own, (0, self._width - own.shape[1]))
        parts = [torch.empty_like(own) for _ in range(self.parallel.sizes.tensor)] if self.draws else None
        dist.gather(own, parts, self._drawing, group=self._head.group)
        return nothing if parts is None else torch.cat(parts, 1)[:, : self.vocabulary]

    @cached_property
    def _width(self) -> int:
        width: int = self.pieces[-1].output_layer.output_size_per_partition
        return width


class SharedSampler:
    """Draws on one rank of a copy and tells the others. All of them make the same calls.

    Even equal logits may give unequal draws on two GPUs, whose sums depend on the order of threads, and ranks that
    disagree on when a response ends would wait for each other forever.
    """

    def __init__(self, sampler: RowSampler | None, source: int) -> None:
        """
        Args:
            sampler: On the rank that draws.
            source: That rank.
        """
        self._sampler, self._source = sampler, source
        self._group = parallel_state.get_model_parallel_group()

    def add(self, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int]) -> None:
        if self._sampler is not None:
            self._sampler.add(params, seeds, drawn)

    def keep(self, order: Sequence[int]) -> None:
        if self._sampler is not None:
            self._sampler.keep(order)

    def sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """As ``RowSampler.sample``; ``logits_RV`` [R, 0] where this rank does not draw."""
        # float64 holds token ids exactly: one message for both.
        drawn = torch.empty(2, len(logits_RV), dtype=torch.float64, device=logits_RV.device)
        if self._sampler is not None:
            drawn[0], drawn[1] = self._sampler.sample(logits_RV)
        dist.broadcast(drawn, self._source, group=self._group)
        return drawn[0].long(), drawn[1].float()


SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes by which megatron-core's modules and configs divide sequences. One new token cannot be divided."""


@contextmanager
def generating(pieces: Sequence[PolicyModel]) -> Iterator[None]:
    """Within the block the pieces are in evaluation mode and every rank sees whole sequences."""
    modules = [module for piece in pieces for module in piece.modules()]
    training = [module for module in modules if module.training]
    configs = [vars(module)["config"] for module in modules if "config" in vars(module)]
    owners = {id(owner): owner for owner in [*modules, *configs]}
    divided = [
        (owner, name) for owner in owners.values() for name in SEQUENCE_PARALLEL if vars(owner).get(name) is True
    ]
    for owner, name in divided:
        setattr(owner, name, False)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for owner, name in divided:
            setattr(owner, name, True)
