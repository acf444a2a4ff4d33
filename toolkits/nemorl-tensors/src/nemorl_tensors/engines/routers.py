"""What training backends compute beside routers: what keeps the load of experts even, and choices that are replayed.

# T = tokens of the rows, E = experts, K = experts of each token, L = layers with experts, B = sequences here
# P = tokens of all sequences, one that k of them have in common k times (``Rows.places``, ``Rows.owners``)

Auxiliary loss and bias are of sequences, not of rows: padding counts nothing, what sequences have in common counts for
each of them, and neither depends on how a batch is cut into microbatches and ranks. The options are
``nemorl_rl.models.routers``.
"""

from __future__ import annotations

import torch
from nemorl.errors import BackendError, UsageError
from torch import Tensor

from nemorl_tensors.batch import ROUTES, TokenBatch


def sequence_loads(chosen_TE: Tensor, places: Tensor, owners: Tensor, sequences: int) -> Tensor:
    """[B, E] float64: how many tokens of each sequence go to each expert.

    Args:
        chosen_TE: [T, E] bool, K in each row.
        places: [P] the row of each token, an index into T.
        owners: [P] its sequence.
        sequences: Their number.

    >>> chosen = torch.tensor([[True, False], [False, True], [True, False]])
    >>> sequence_loads(chosen, torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]), 2).tolist()
    [[1.0, 1.0], [1.0, 0.0]]
    """
    loads_BE = torch.zeros((sequences, chosen_TE.shape[1]), dtype=torch.float64, device=chosen_TE.device)
    return loads_BE.index_add_(0, owners, chosen_TE[places].double())


def balance_loss(scores_TE: Tensor, loads_BE: Tensor, places: Tensor, owners: Tensor) -> Tensor:
    """The auxiliary loss of one layer, added up over tokens: divided by their number it is the mean over them.

    sum_s T_s * E * sum_i f_si P_si                            Switch Transformers, arXiv:2101.03961, eq. 4

    Of a sequence s of T_s tokens, ``f_si = loads_si / (K T_s)`` has no gradient, and ``P_si`` is the mean over its
    tokens of ``scores_ti / sum_j scores_tj``. 1 for each token where all experts get the same.
    Differs from the paper: f and P are of a sequence, not of a batch (DeepSeek-V3, arXiv:2412.19437, eq. 17), and each
    token has K experts.

    Args:
        scores_TE: [T, E] non-negative scores of all experts, with gradient.
        loads_BE: Of ``sequence_loads``, of whole sequences where ranks have parts of them.
        places: That of ``sequence_loads``, of the tokens that are here.
        owners: Likewise.

    Returns:
        A scalar: the part of the sum that the tokens here have.
    """
    shares_BE = (loads_BE / loads_BE.sum(1, keepdim=True).clamp(min=1)).to(scores_TE.dtype)
    normalized_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    return loads_BE.shape[1] * (shares_BE[owners] * normalized_TE[places]).sum()


@torch.no_grad()
def moved_bias(bias_E: Tensor, loads_E: Tensor, rate: float) -> Tensor:
    """The bias that chooses experts, after an update: b_i + rate * sign(mean load - load_i).

    DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.

    >>> moved_bias(torch.zeros(3), torch.tensor([4.0, 1.0, 1.0]), 0.5).tolist()
    [-0.5, 0.5, 0.5]
    """
    loads = loads_E.double()
    return bias_E + rate * torch.sign(loads.mean() - loads).to(bias_E.dtype)


def replayed_choice(recorded_TK: Tensor, own_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of tokens that were recorded, or a router's own where none are (``NO_ROUTE``).

    Returns:
        [T, K] int64 experts; and [2] int64: recorded choices that are not among the router's own, and all recorded.

    >>> choice, flips = replayed_choice(torch.tensor([[2, 0], [-1, -1]]), torch.tensor([[0, 1], [3, 1]]))
    >>> choice.tolist(), flips.tolist()
    ([[2, 0], [3, 1]], [1, 2])
    """
    known = recorded_TK >= 0
    kept = (recorded_TK.unsqueeze(2) == own_TK.unsqueeze(1)).any(2)
    return torch.where(known, recorded_TK.long(), own_TK), torch.stack(((known & ~kept).sum(), known.sum()))


def require_routes(batch: TokenBatch) -> None:
    """
    Raises:
        UsageError: The batch has no routes to replay.
    """
    if ROUTES not in batch:
        raise UsageError(
            "policy.backend.router.replay is on, and this batch has no routes: its samples do not tell their experts",
            fix="sample with SamplingParams(routes=True), or set replay: false",
        )


def require_routes_of(routes: Tensor, layers: int, chosen: int) -> None:
    """
    Args:
        routes: [T, L, K]
        layers: With experts, of the model.
        chosen: Experts of each token, of the model.

    Raises:
        BackendError: They are of another model.
    """
    if tuple(routes.shape[1:]) != (layers, chosen):
        raise BackendError(
            f"the batch has routes of {routes.shape[1]} layers and {routes.shape[2]} experts per token, and this "
            f"model has {layers} and {chosen}",
            fix="sample and train the same model",
        )
