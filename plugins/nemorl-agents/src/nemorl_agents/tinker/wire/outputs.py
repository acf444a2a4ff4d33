"""The two answers that clients read as protobuf: of a pass, and of sampling.

# n = tokens of one datum, K = target tokens at each position of it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemorl_agents.tinker.models import Passed, Sampled, Topk
from nemorl_agents.tinker.wire.messages import messages

PROTOBUF = "application/x-protobuf"
OUTPUT_TYPE = "ArrayRecord"
EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0
"""What clients take for an empty cell of a table of likeliest tokens."""


def encoded_pass(passed: Passed) -> bytes:
    """A ``ForwardBackwardOutput``: the log-probs of each datum under ``logprobs``, and the metrics."""
    message = messages().ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in sorted(passed.metrics.items()):
        message.metrics[name] = value
    for trailing, alike in groupby(passed.logprobs, key=lambda value: tuple(value.shape[1:])):
        _add_record(message, [*alike], trailing)
    raw: bytes = message.SerializeToString(deterministic=True)
    return raw


def _add_record(message: Any, values: Sequence[Tensor], trailing: tuple[int, ...]) -> None:
    """Data whose rows have one shape: one after the other, and the byte at which each begins."""
    record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(values))
    field = record.fields["logprobs"]
    field.dtype = messages().DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)
    arrays = [value.detach().to("cpu", torch.float32).contiguous().numpy() for value in values]
    field.data = b"".join(array.tobytes() for array in arrays)
    field.offsets = np.array([0, *accumulate(array.nbytes for array in arrays)], dtype=np.int64).tobytes()


def decoded_pass(raw: bytes) -> Passed:
    """What :func:`encoded_pass` wrote."""
    message = messages().ForwardBackwardOutput()
    message.ParseFromString(raw)
    found: list[Tensor] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        values = torch.from_numpy(np.frombuffer(field.data, dtype=np.float32).copy())
        sizes = np.diff(np.frombuffer(field.offsets, dtype=np.int64)) // values.element_size()
        trailing = tuple(field.trailing_shape)
        found += [part.reshape(-1, *trailing) for part in values.split(sizes.tolist())]  # type: ignore[no-untyped-call]
    return Passed(found, dict(message.metrics))


def encoded_samples(sampled: Sampled) -> bytes:
    """A ``SampleResponse``."""
    pb = messages()
    message = pb.SampleResponse(prompt_cache_hit_tokens=sampled.prompt_cache_hit_tokens)
    for sequence in sampled.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.token_ids, dtype=np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, dtype=np.float32).tobytes(),
        )
        if sequence.topk is not None:
            _fill_topk(added.topk_sampled_logprobs, sequence.topk)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(sampled.prompt_logprobs, dtype=np.float32).tobytes()
    if sampled.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, sampled.topk_prompt)
    raw: bytes = message.SerializeToString(deterministic=True)
    return raw


def _fill_topk(message: Any, rows: Sequence[Topk | None]) -> None:
    width = max((len(row) for row in rows if row), default=0)
    token_ids = np.full((len(rows), width), EMPTY_TOKEN, dtype=np.int32)
    logprobs = np.full((len(rows), width), EMPTY_LOGPROB, dtype=np.float32)
    for number, row in enumerate(rows):
        for rank, (token_id, logprob) in enumerate(row or ()):
            token_ids[number, rank] = token_id
            logprobs[number, rank] = logprob if math.isfinite(logprob) else EMPTY_LOGPROB
    message.token_ids, message.logprobs = token_ids.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)
