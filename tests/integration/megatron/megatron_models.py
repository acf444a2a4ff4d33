"""What ``test_megatron_models`` compares: tiny models as transformers computes them, and as ranks compute them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.rules import Index
from nemorl_megatron.bridge.sources import SafetensorsFolder
from nemorl_megatron.head import OutputHead
from nemorl_megatron.model import PolicyModel, build_model
from nemorl_megatron.packing import Packing
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_megatron.settings import Settings, settings_of
from nemorl_tensors.engines.model_config import read_model_config
from safetensors.torch import load_file
from torch import Tensor

LENGTHS = ((12, 7), (8, 5))
"""Tokens of each row, by microbatch: rows of one are padded to its longest, or to the longest of all."""
LONGEST = 12
PACKED_WIDTH = 20
"""Of each microbatch in one row: 19 tokens and 13, and what makes them divide over ranks."""
TEMPERATURE = 0.7
PADDING = 0
BUCKET_BYTES = 20_000
"""Several buckets for a tiny model."""


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    model: str
    """Folder that ``write_reference`` wrote."""
    sizes: Sizes
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of ``build_model``."""
    is_packed: bool = False
    """The sequences of a microbatch share one row."""


@dataclass(frozen=True)
class Found:
    """By how much one rank differs from transformers; ``None`` where it does not hold the answer."""

    logits: float | None
    logprobs: float | None
    gradients: dict[str, float]
    """Largest difference of each tensor, relative to its largest entry (rank 0)."""
    export_is_equal: bool | None
    buckets: int
    read_frac: float
    """Elements read from files, of all that there are."""


def tokens(vocabulary: int) -> list[list[Tensor]]:
    """Rows by microbatch."""
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(1, vocabulary, (size,), generator=generator) for size in sizes] for sizes in LENGTHS]


def write_reference(folder: Path, architecture: str, sizes: Mapping[str, Any]) -> Path:
    """Write a random model, its logits and log-probs at ``tokens``, and the gradient of the log-probs' mean.

    Weights are spread out, so that log-probs are far from uniform and no gradient vanishes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    rows = [row for microbatch in tokens(config.vocab_size) for row in microbatch]
    logits = [model(row[None]).logits[0] for row in rows]
    logprobs = [
        torch.log_softmax(found[:-1] / TEMPERATURE, -1).gather(1, row[1:, None]).squeeze(1)
        for found, row in zip(logits, rows, strict=True)
    ]
    torch.cat(logprobs).mean().backward()
    torch.save([[found.detach() for found in kind] for kind in (logits, logprobs)], folder / "outputs.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    # Saved as a model, so that gradients have the names and shapes that weights have in files.
    model.save_pretrained(folder / "gradients")
    return folder


def compare(context: WorkerContext, case: Case) -> Found:
    """One rank: load, forward and backward through the pipeline, export, and what differs."""
    parallel = Parallel.join(context, case.sizes)
    folder = Path(case.model)
    settings = settings_of(read_model_config(PolicyConfig(model_name=case.model)))
    model = build_model(settings, parallel, **case.changes)
    exchange = Exchange(settings, parallel)
    parameters = global_names(model, settings, parallel)
    with Recorder(folder) as source:
        exchange.fill(parameters, source)
    stored = load_file(folder / "model.safetensors")

    logits, logprobs = _forward_backward(model, settings, parallel, is_packed=case.is_packed)
    _add_up_gradients(model)
    gradients = _joined(exchange, {name: _gradient(parameter) for name, parameter in parameters.items()})
    buckets = [bucket for bucket in exchange.whole(parameters, torch.float32, BUCKET_BYTES) if bucket]
    exported = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    found = Found(
        logits=_difference(logits, folder, 0) if logits else None,
        logprobs=_difference(logprobs, folder, 1) if logprobs else None,
        gradients=_relative(gradients, load_file(folder / "gradients" / "model.safetensors")) if gradients else {},
        export_is_equal=_equal(exported, stored) if context.rank == 0 else None,
        buckets=len(buckets),
        read_frac=source.elements / sum(tensor.numel() for tensor in stored.values()),
    )
    parallel.leave()
    return found


def refuse(context: WorkerContext, case: Case) -> str:
    """The error that building a model meets."""
    parallel = None
    try:
        parallel = Parallel.join(context, case.sizes)
        build_model(settings_of(read_model_config(PolicyConfig(model_name=case.model))), parallel, **case.changes)
    except BackendError as error:
        return str(error)
    finally:
        if parallel is not None:
            parallel.leave()
    return "not refused"


class Recorder(SafetensorsFolder):
    """A folder that counts what is read from it."""

    elements = 0

    def read(self, name: str, index: Index) -> Tensor:
        found = super().read(name, index)
        self.elements += found.numel()
        return found


def _forward_backward(
    model: Sequence[PolicyModel], settings: Settings, parallel: Parallel, *, is_packed: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits [T, V] and log-probs [T - 1] of each row, on ranks of the last stage; gradients of the latter's mean."""
    microbatches = tokens(settings.vocabulary)
    scored = sum(len(row) - 1 for rows in microbatches for row in rows)
    logits: list[Tensor] = []
    logprobs: list[Tensor] = []

    def step(batches: Iterator[list[Tensor]], piece: PolicyModel) -> tuple[Tensor, Any]:
        rows = next(batches)
        if is_packed:
            states = piece(*_one_row(rows))
        else:
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
            if parallel.sizes.virtual_pipeline:
                ids = torch.nn.functional.pad(ids, (0, LONGEST - ids.shape[1]), value=PADDING)
            states = piece(ids)

        def mean_logprob(states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            head = OutputHead(piece, parallel, settings.vocabulary, settings.logit_cap)
            whole = head.whole(states)
            total = torch.zeros(())
            for number, row in enumerate(rows):
                start = sum(map(len, rows[:number])) if is_packed else 0
                of_row = whole[start : start + len(row), 0 if is_packed else number]
                logits.append(_all_tokens(head, of_row.detach()))
                logprobs.append(head.score(of_row[:-1], row[1:], TEMPERATURE))
                total = total + logprobs[-1].sum()
            # megatron-core averages over microbatches; data-parallel ranks have the same rows here.
            return total * len(microbatches) / scored / parallel.data_parallel_size, {}

        return states, mean_logprob

    for piece in model:
        piece.train()  # mixtures of experts then insist on what training needs
    batches = [iter(microbatches) for _ in model]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=[*model] if len(model) > 1 else model[0],
        num_microbatches=len(microbatches),
        seq_length=PACKED_WIDTH if is_packed else LONGEST,
        micro_batch_size=1 if is_packed else len(LENGTHS[0]),
        forward_only=False,
    )
    return logits, [found.detach() for found in logprobs]


def _one_row(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, Packing]:
    """Token ids and positions [1, ``PACKED_WIDTH``], and where sequences begin: what pads the row is one, too."""
    padding = torch.full((PACKED_WIDTH - sum(map(len, sequences)),), PADDING)
    parts = [*sequences, padding]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    return torch.cat(parts)[None], positions, Packing.of(positions)


def _all_tokens(head: OutputHead, states: Tensor) -> Tensor:
    parts: list[Any] = [None] * head.group.size()
    dist.all_gather_object(parts, head.logits(states), group=head.group)
    return torch.cat(parts, -1)


def _add_up_gradients(model: Sequence[PolicyModel]) -> None:
    """What megatron-core's own gradient buffers do in training."""
    tensor, dense, sparse = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    for piece in model:
        for name, parameter in piece.named_parameters():
            assert parameter.grad is not None, name
            dist.all_reduce(parameter.grad, group=dense if getattr(parameter, "allreduce", True) else sparse)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=tensor)
        if piece.share_embeddings_and_output_weights and (piece.pre_process != piece.post_process):
            dist.all_reduce(piece.shared_embedding_or_output_weight().grad, group=parallel_state.get_embedding_group())


def _gradient(parameter: Tensor) -> Tensor:
    if not parameter.requires_grad:  # the bias of a router, a buffer
        return torch.zeros_like(parameter)
    assert parameter.grad is not None
    return parameter.grad


def _joined(exchange: Exchange, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for bucket in exchange.whole(parts, torch.float32) for name, tensor in bucket.items()}


def _difference(found: Sequence[Tensor], folder: Path, kind: int) -> float:
    expected = torch.load(folder / "outputs.pt")[kind]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def _relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: float((tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-4))
        for name, tensor in found.items()
    }


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
