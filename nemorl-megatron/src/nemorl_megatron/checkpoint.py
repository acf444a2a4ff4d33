"""A training checkpoint: float32 masters and moments in safetensors files, one per rank, and JSON.

No pickle, so reading one runs no code; megatron-core's own format (``torch_dist``) pickles metadata and tensors.

``megatron.json`` says how far training was and which file has which piece; ``state-<rank>.safetensors`` are the pieces,
``rng-<rank>.safetensors`` torch's generators. A piece is a range of a part of a parameter, written by the lowest rank
that has it. Parameters are counted over the whole model, so ranks that divide it otherwise put their parts together
from the pieces. Weights are not saved beside masters: they are these, rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import CheckpointError
from nemorl.tensors.random_state import random_state, restore_random_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from nemorl_megatron.bridge.held import Held
    from nemorl_megatron.optim import Learner, Share
    from nemorl_megatron.parallel import Parallel

INDEX, FORMAT = "megatron.json", 1
MASTER = "master"


@dataclass(frozen=True, order=True)
class Piece:
    """A range of one part of a parameter."""

    name: str
    """Of the parameter."""
    number: int
    """Of the part."""
    ways: int
    """Parts that the parameter is divided into."""
    start: int
    stop: int
    """Elements of the part, in memory order."""

    def key(self, state: str) -> str:
        """Of its tensor in a file."""
        return f"{self.name}.{state}.{self.number}.{self.start}"


def save(path: Path, parameters: Iterable[Held], learner: Learner, parallel: Parallel) -> None:
    """Write everything that makes the next step into the existing folder ``path``. Collective.

    Args:
        path: Of the checkpoint.
        parameters: This rank's.
        learner: Their masters, moments, and the position in the schedule.
        parallel: This rank's place.
    """
    shares: dict[Piece, Share] = {}
    for held in parameters:
        share = learner.share(held.parameter)
        if share is not None:
            shares[Piece(held.name, held.part.number, held.part.ways, share.start, share.stop)] = share
    writers = _writers(shares, parallel)
    tensors: dict[str, Tensor] = {}
    for piece, share in shares.items():
        if writers[piece] == parallel.rank:
            states = {MASTER: share.master.detach(), **share.moments()}
            tensors |= {piece.key(state): tensor.flatten().cpu() for state, tensor in states.items()}
    save_file(tensors, _state_file(path, parallel.rank))
    save_file(random_state(), _rng_file(path, parallel.rank))
    if parallel.rank == 0:
        pieces = [[*vars(piece).values(), rank] for piece, rank in sorted(writers.items())]
        index = {"format": FORMAT, "steps": learner.steps, "updates": learner.updates, "pieces": pieces}
        (path / INDEX).write_text(json.dumps(index) + "\n")


def load(path: Path, parameters: Iterable[Held], learner: Learner, parallel: Parallel) -> None:
    """Restore what :func:`save` wrote, also by ranks that divide the model otherwise. Collective.

    Raises:
        CheckpointError: Files are missing or damaged, or are of another model.
    """
    parameters = list(parameters)
    steps, updates, pieces = _read_index(path)
    _compare(path, parameters, pieces, parallel)
    with _Pieces(path, pieces) as files:
        for held in parameters:
            part = partial(files.part, held)
            share = learner.share(held.parameter)
            with torch.no_grad():
                master = part(MASTER)
                held.parameter.copy_(master)
                if share is None:
                    continue
                share.master.copy_(master.flatten()[share.start : share.stop].view_as(share.master))
                if updates == 0:
                    share.clear_moments()
                    continue
                for state, tensor in share.allocate_moments(updates).items():
                    tensor.copy_(part(state).flatten()[share.start : share.stop].view_as(tensor))
    learner.steps, learner.updates = steps, updates
    file = _rng_file(path, parallel.rank)
    with _damage_named(path):
        restore_random_state(load_file(file if file.is_file() else _rng_file(path, 0)))


class _Pieces:
    """The pieces of a checkpoint, put together into parts."""

    def __init__(self, path: Path, pieces: Mapping[str, Sequence[tuple[Piece, int]]]) -> None:
        self._path, self._pieces = path, pieces
        self._stack = ExitStack()
        self._open: dict[int, Any] = {}

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def part(self, held: Held, state: str) -> Tensor:
        """float32 what this rank holds of a parameter, of its master or one of its moments."""
        pieces = self._pieces[held.name]
        ways = pieces[0][0].ways

        def read(number: int) -> Tensor:
            flat = torch.empty(held.shape(ways).numel())
            for piece, rank in pieces:
                if piece.number == number:
                    flat[piece.start : piece.stop] = self._read(piece, rank, state)
            return flat.view(held.shape(ways))

        return held.from_parts(ways, read)

    def _read(self, piece: Piece, rank: int, state: str) -> Tensor:
        file = _state_file(self._path, rank)
        with _damage_named(file):
            if rank not in self._open:
                self._open[rank] = self._stack.enter_context(safe_open(file, "pt"))
            found: Tensor = self._open[rank].get_tensor(piece.key(state))
            return found


def _writers(shares: Iterable[Piece], parallel: Parallel) -> dict[Piece, int]:
    """The lowest rank that has each piece of all ranks. Collective."""
    everybody: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(everybody, list(shares))
    writers: dict[Piece, int] = {}
    for rank, pieces in enumerate(everybody):
        for piece in pieces:
            writers.setdefault(piece, rank)
    return writers


def _read_index(path: Path) -> tuple[int, int, dict[str, list[tuple[Piece, int]]]]:
    """Steps, updates, and by parameter the pieces with the ranks that wrote them."""
    file = path / INDEX
    if not file.is_file():
        raise CheckpointError(
            f"{path} is no checkpoint of the training backend megatron: it has no {INDEX}",
            fix="resume with the backend that wrote it, or start anew from its weights: `nemorl export RUN FOLDER`, "
            "then model: FOLDER",
        )
    with _damage_named(file):
        index = json.loads(file.read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(
                f"{file} has format {index['format']}, expected {FORMAT}", fix="use the version that wrote it"
            )
        pieces: dict[str, list[tuple[Piece, int]]] = {}
        for *fields, rank in index["pieces"]:
            piece = Piece(*fields)
            pieces.setdefault(piece.name, []).append((piece, rank))
        return int(index["steps"]), int(index["updates"]), pieces


def _compare(
    path: Path, parameters: Sequence[Held], pieces: Mapping[str, Sequence[tuple[Piece, int]]], parallel: Parallel
) -> None:
    """Refuse the checkpoint of another model, on all ranks alike. Collective."""
    wrong = [_difference(held, pieces[held.name]) for held in parameters if held.name in pieces]
    everybody: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(everybody, ([held.name for held in parameters], [text for text in wrong if text]))
    expected = dict.fromkeys(name for names, _ in everybody for name in names)
    found = [f"{name} is missing" for name in expected if name not in pieces]
    found += [f"{name} is unknown" for name in pieces if name not in expected]
    found += dict.fromkeys(text for _, texts in everybody for text in texts)
    if found:
        listed = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {listed}", fix="resume with the model it was saved with"
        )


def _difference(held: Held, pieces: Sequence[tuple[Piece, int]]) -> str:
    ways = pieces[0][0].ways
    found = max(piece.stop for piece, _ in pieces)
    expected = held.shape(ways).numel()
    return "" if found == expected else f"{held.name} has {found} elements in each part, the model {expected}"


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has an error type of its own
        raise CheckpointError(f"{path} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


def _state_file(path: Path, rank: int) -> Path:
    return path / f"state-{rank:05}.safetensors"


def _rng_file(path: Path, rank: int) -> Path:
    return path / f"rng-{rank:05}.safetensors"
