"""The driver's handle of a model that workers hold: it shards a batch by tokens and puts results back in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemorl.base.files.atomic import replacing_folder
from nemorl.contracts import Loss, MomentsBackend, SnapshottingBackend, TrainingBackend, WeightsName
from nemorl.contracts.workers import P, R, ReferringGroup, ShardVerb
from nemorl.metrics import Metrics, merge

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from torch import Tensor

    _PerToken = Tensor | tuple[Tensor, ...]

Work = Literal["train", "measure", "reference", "save"]
"""Coming use of a model: learn, score with its weights, score with its initial ones, be written or read."""
Turn = Callable[[Work], AbstractContextManager[None]]
"""Has what this work needs in the device's memory, for the length of a ``with`` block."""


def always_there(_work: Work) -> AbstractContextManager[None]:
    """Of a model that nobody shares devices with."""
    return nullcontext()


class TrainingPolicy:
    """A training backend over a worker group, seen as one object."""

    def __init__(
        self, workers: ReferringGroup, turn: Turn = always_there, by_trees: bool = False, replays: bool = False
    ) -> None:
        """
        Args:
            workers: The ranks of one backend.
            turn: Gives it the devices, which it may share with others.
            by_trees: Sequences that begin alike go to one rank, which computes what they share once.
            replays: Tokens go to the experts that the field ``routes`` names.
        """
        self.workers, self._turn, self._by_trees, self._replays = workers, turn, by_trees, replays

    def train_step(self, minibatch: TokenBatch, loss: Loss) -> Metrics:
        """One optimizer step; metrics merged over ranks by their own reductions."""
        with self._turn("train"):
            return merge(self._sharded(TrainingBackend.train_step, minibatch, loss)[1])

    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        """[N] float32 nats of every token of ``batch``, in its order."""
        return self._measured(TrainingBackend.get_logprobs, batch, weights)[0]

    def with_logprobs(self, batch: TokenBatch, name: str, weights: WeightsName = "policy") -> TokenBatch:
        """The batch with log-probs as the field ``name``, which lie with the ranks until the driver reads them."""
        verb, bare = TrainingBackend.get_logprobs, self._bare(batch, weights)
        with self._turn(_work_with(weights)):
            shards = self._shards(bare)
            found = self.workers.scatter_kept(verb, batch.placed(self.workers, shards, bare), weights)
        return batch.with_held(name, shards, found, self.workers.read)

    def get_moments(self, batch: TokenBatch) -> Tensor:
        """[N, 3] log-prob, entropy and chance of two equal draws at every token (capability ``moments``)."""
        return self._measured(MomentsBackend.get_moments, batch)[0]

    def get_values(self, batch: TokenBatch) -> Tensor:
        """[N] float32 value of the state before each token of ``batch``, of a model with a value head."""
        return self._measured(TrainingBackend.get_values, batch)[0]

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        """[N, K] ids and log-probs of the k likeliest tokens in place of each token of ``batch``."""
        ids, logprobs = self._measured(TrainingBackend.get_topk_logprobs, batch, k)
        return ids, logprobs

    def save_checkpoint(self, path: Path, *, optimizer: bool = True, snapshot: bool = False) -> None:
        with self._turn("save"):
            verb = SnapshottingBackend.snapshot_checkpoint if snapshot else TrainingBackend.save_checkpoint
            if optimizer:  # a backend without the capability to leave it out need not know the word
                self.workers.call(verb, path)
            else:
                self.workers.call(verb, path, optimizer=False)

    def snapshot_files(self, *, wait: bool) -> dict[str, str] | None:
        """The files of the last snapshot and their digests, of all ranks; ``None`` while one of them is writing."""
        found = self.workers.call(SnapshottingBackend.snapshot_files, wait=wait)
        written = [files for files in found if files is not None]
        return {file: digest for files in written for file, digest in files.items()} if written == found else None

    def load_checkpoint(self, path: Path) -> None:
        with self._turn("save"):
            self.workers.call(TrainingBackend.load_checkpoint, path)

    def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face model folder, in place of the one that is there."""
        with self._turn("measure"), replacing_folder(path) as draft:
            self.workers.call(TrainingBackend.save_pretrained, draft)

    def shutdown(self) -> None:
        self.workers.shutdown()

    def _measured(
        self, verb: ShardVerb[TokenBatch, P, _PerToken], batch: TokenBatch, *args: P.args, **kwargs: P.kwargs
    ) -> list[Tensor]:
        """The results of a verb that returns per-token tensors, in the order of ``batch``."""
        weights: WeightsName = "reference" if "reference" in args else "policy"
        bare = self._bare(batch, weights)
        with self._turn(_work_with(weights)):
            shards = self._shards(bare)
            parts = self.workers.scatter(verb, batch.placed(self.workers, shards, bare), *args, **kwargs)
        results = [part if isinstance(part, tuple) else (part,) for part in parts]
        return [batch.in_order(shards, columns) for columns in zip(*results, strict=True)]

    def _sharded(
        self, verb: ShardVerb[TokenBatch, P, R], batch: TokenBatch, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[list[list[int]], list[R]]:
        shards = self._shards(batch)
        return shards, self.workers.scatter(verb, batch.placed(self.workers, shards, batch), *args, **kwargs)

    def _shards(self, batch: TokenBatch) -> list[list[int]]:
        """The sequences of each rank."""
        ranks = self.workers.data_parallel_size
        return [list(range(len(batch)))] if ranks == 1 else batch.shards(ranks, by_trees=self._by_trees)

    def _bare(self, batch: TokenBatch, weights: WeightsName) -> TokenBatch:
        """What is read to measure tokens: these, and for the policy their routes."""
        is_replayed = self._replays and "routes" in batch and weights == "policy"
        kept = {"routes": batch["routes"]} if is_replayed else {}
        return replace(batch, token_fields=kept, sequence_fields={}, sequences_per_group=1, held={})


def _work_with(weights: WeightsName) -> Work:
    return "reference" if weights == "reference" else "measure"
