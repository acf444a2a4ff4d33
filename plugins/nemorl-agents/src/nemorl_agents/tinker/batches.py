"""A client's data as a batch of ours, and log-probs back as the client expects them.

# n = positions of one datum, T = those of all data, B = data, N = T + B, K = target tokens at each position

At position i of its input x_0 … x_{n-1} a client wants y_i predicted. In a batch index t describes token t, and the
first token of a sequence is not scored. So a datum is a sequence of n + 1 tokens, and what belongs to position i stands
at index i + 1:

    index        0     1     2          n
    token        x_0   x_1   x_2   …    y_{n-1}
    scored       no    y_0   y_1   …    y_{n-1}

Where the targets are the input shifted by one, token and target agree. Clients may ask for others, and for K of them:
then the batch names the targets in ``candidate_ids``. All positions are scored, whatever their weight, because clients
read the log-probs of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from nemorl_tensors import TokenBatch
from nemorl_tensors.functional import segment_ids
from torch import Tensor

from nemorl_agents.tinker.losses import ClientLoss, Number
from nemorl_agents.tinker.models import Datum

TARGETS = "target_tokens"
WHOLE = (torch.int64, torch.int32)
NUMBERS = (torch.float32, torch.float64, *WHOLE)


@dataclass(frozen=True)
class ClientBatch:
    """The data of one call as a batch, and its loss.

    Example:
        >>> from nemorl_agents.tinker.losses import loss_named
        >>> datum = Datum((5, 6), {"target_tokens": torch.tensor([6, 7])})
        >>> made = client_batch([datum], loss_named("cross_entropy"), vocabulary=10)
        >>> made.batch.token_ids.tolist(), made.batch.mask.tolist(), made.batch["weights"].tolist()
        ([5, 6, 7], [False, True, True], [0.0, 1.0, 1.0])
    """

    batch: TokenBatch
    loss: ClientLoss
    shapes: tuple[tuple[int, ...], ...]
    """[B] of the targets of each datum: (n,) or (n, K)"""

    def logprobs(self, outputs: Tensor) -> list[Tensor]:
        """Of each datum in the client's order, in the shape of its targets.

        Args:
            outputs: [N], or [N, K] of a loss over candidates: what the model says of the batch.
        """
        rows = outputs.reshape(self.batch.num_tokens, -1)
        parts = torch.split(rows, self.batch.lengths.tolist())
        return [
            part[1:, : shape[1] if len(shape) > 1 else 1].reshape(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]


def client_batch(data: Sequence[Datum], loss: ClientLoss, *, vocabulary: int) -> ClientBatch:
    """The data of one call, in its order. Loss weights are 1 at every position: the loss is a plain sum.

    If any datum has several targets at a position, or others than its input shifted by one, all are scored by
    ``candidate_ids`` [N, K] of the largest K. What pads a datum to it is token 0 with weight 0.

    Args:
        data: At least one.
        loss: Says which fields a datum has.
        vocabulary: Number of token ids that the model has.

    Raises:
        UsageError: Data that cannot be computed with; names the datum, the field and the position.
    """
    if not data:
        raise UsageError("no data: a pass takes at least one datum")
    read = [_read(datum, f"data[{number}]", loss) for number, datum in enumerate(data)]
    _refuse_unusable(read, loss, vocabulary)
    shapes = tuple(tuple(each.targets.shape) for each in read)
    width = max(each.targets.shape[1] if each.targets.ndim > 1 else 1 for each in read)
    targets_TK = torch.cat([_columns(each.targets, width) for each in read])

    lengths_B = torch.tensor([len(each.inputs) for each in read]) + 1
    size = int(lengths_B.sum())
    slots_T = torch.arange(len(targets_TK)) + segment_ids(lengths_B - 1) + 1

    def placed(values: Tensor) -> Tensor:
        """[N, …] of [T, …] values, 0 at first tokens."""
        return values.new_zeros((size, *values.shape[1:])).index_copy_(0, slots_T, values)

    token_ids = placed(targets_TK[:, 0]).index_copy_(0, slots_T - 1, torch.cat([each.inputs for each in read]))
    mask = placed(torch.ones(len(slots_T), dtype=torch.bool))
    batch = TokenBatch(token_ids, lengths_B, mask, loss_weights=mask.float())
    has_others = any(len(shape) > 1 for shape in shapes) or not torch.equal(token_ids[slots_T], targets_TK[:, 0])
    if has_others:
        batch, loss = batch.with_tokens(candidate_ids=placed(targets_TK)), loss.over_candidates()
    for name in loss.inputs:
        values = [each.fields[name] for each in read]
        if has_others and loss.takes_several:
            values = [_columns(each, width) for each in values]
        batch = batch.with_tokens(**{name: placed(torch.cat(values))})
    return ClientBatch(batch, loss, shapes)


def _columns(values: Tensor, width: int) -> Tensor:
    """[n, width] of [n] or [n, K] values: zeros fill it up."""
    values = values.reshape(len(values), -1)
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


@dataclass(frozen=True)
class _Read:
    """A datum whose tensors have the shapes and types that they should."""

    inputs: Tensor
    """[n] int64"""
    targets: Tensor
    """[n] or [n, K] int64"""
    fields: Mapping[str, Tensor]
    """float32 in the shape of ``targets``"""


def _read(datum: Datum, name: str, loss: ClientLoss) -> _Read:
    if not datum.token_ids:
        raise UsageError(f"{name} has no tokens", fix="leave it out")
    for field in datum.fields:
        if field not in {TARGETS, *loss.inputs}:
            known = [TARGETS, *loss.inputs]
            fix = did_you_mean(field, known) or f"leave it out: this loss reads {', '.join(known)}"
            raise UsageError(f"{name} has a field {shown(field)}, which this loss does not read", fix=fix)
    inputs = torch.tensor(datum.token_ids, dtype=torch.int64)
    targets = _present(datum, name, TARGETS)
    _require(targets, f"{name}.{TARGETS}", WHOLE, "int64")
    several = loss.takes_several and targets.ndim == 2 and targets.shape[1] > 0
    if len(targets) != len(inputs) or not (targets.ndim == 1 or several):
        wanted = f"[{len(inputs)}]" + f" or [{len(inputs)}, K]" * loss.takes_several
        raise UsageError(
            f"{name}.{TARGETS} has shape {list(targets.shape)} for {len(inputs)} input tokens",
            fix=f"send the tokens that each position predicts, in the shape {wanted}",
        )
    fields = {field: _values(datum, name, field, number, targets) for field, number in loss.inputs.items()}
    return _Read(inputs, targets.long(), fields)


def _values(datum: Datum, name: str, field: str, number: Number, targets: Tensor) -> Tensor:
    """A field of a datum in the shape of its targets, or its default."""
    if field not in datum.fields and number.default is not None:
        return torch.full(targets.shape, number.default, dtype=torch.float32)
    values = _present(datum, name, field)
    _require(values, f"{name}.{field}", NUMBERS, "float32")
    if values.shape != targets.shape:
        raise UsageError(
            f"{name}.{field} has shape {list(values.shape)}, and {TARGETS} {list(targets.shape)}",
            fix="send one number for each target token",
        )
    return values.float()


def _present(datum: Datum, name: str, field: str) -> Tensor:
    if field not in datum.fields:
        raise UsageError(f"{name} has no field {field}", fix="send it for each position of the input")
    return datum.fields[field]


def _require(values: Tensor, name: str, kinds: Sequence[torch.dtype], wanted: str) -> None:
    if values.dtype not in kinds:
        raise UsageError(f"{name} is {str(values.dtype).removeprefix('torch.')}", fix=f"send {wanted}")
    if values.ndim == 0:
        raise UsageError(f"{name} is a single number", fix="send one for each position of the input")


def _refuse_unusable(read: Sequence[_Read], loss: ClientLoss, vocabulary: int) -> None:
    ids = Number(0, vocabulary - 1)
    of_ids = f"the model has token ids from 0 to {vocabulary - 1}"
    _refuse_values("token_ids", [each.inputs for each in read], ids, of_ids)
    _refuse_values(TARGETS, [each.targets for each in read], ids, of_ids)
    for field, number in loss.inputs.items():
        fix = f"send {number.words} for each target token"
        _refuse_values(field, [each.fields[field] for each in read], number, fix)


def _refuse_values(field: str, values: Sequence[Tensor], number: Number, fix: str) -> None:
    if number.admits(torch.cat([each.flatten() for each in values])).all():
        return
    for datum, each in enumerate(values):
        for place in (~number.admits(each)).nonzero().tolist():
            at = "".join(f"[{index}]" for index in place)
            raise UsageError(f"data[{datum}].{field}{at} is {each[tuple(place)].item()}", fix=fix)
