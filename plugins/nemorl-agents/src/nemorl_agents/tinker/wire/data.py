"""Bodies of ``forward_backward``: which model and loss, and its data with the text chunks of each prompt joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from nemorl.errors import DataError

from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.models import Datum
from nemorl_agents.tinker.wire.messages import messages, tensor_of

MEDIA_FIX = "train on text: images and audio are not served yet"


@dataclass(frozen=True)
class PassBody:
    """A pass that a client asks for."""

    model_id: str
    seq_id: int
    loss_name: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    message: Any
    """The protobuf message; ``data`` reads the rest."""

    def data(self) -> list[Datum]:
        """The sequences.

        Raises:
            DataError: One cannot be read; names it by its place.
        """
        if not self.message.data:
            raise DataError("no data: a pass takes at least one datum")
        return [_datum(each, f"data[{number}]") for number, each in enumerate(self.message.data)]


def pass_body(raw: bytes) -> PassBody:
    """Read a body.

    Raises:
        ApiError: The bytes are no such message.
    """
    message = messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except Exception as error:  # DecodeError, of a package that is imported in one place alone
        fix = "use a client of the versions that docs/tinker.md names"
        raise ApiError(400, "the body is no ForwardBackwardRequest", fix=fix) from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    newer: Mapping[str, Any] = message.loss_fn_config_v2
    config |= {key: value.text if value.HasField("text") else value.number for key, value in newer.items()}
    return PassBody(message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, message)


def _datum(message: Any, name: str) -> Datum:
    token_ids: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind != "encoded_text":
            raise DataError(f"{name}: its input has a chunk of type {kind}", fix=MEDIA_FIX)
        if len(chunk.encoded_text.tokens) % 4:
            raise DataError(f"{name}: the tokens of a chunk are no whole number of int32")
        token_ids += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    if not token_ids:
        raise DataError(f"{name}: its input is empty")
    fields = {key: tensor_of(value, f"{name}.{key}") for key, value in sorted(message.loss_fn_inputs.items())}
    for key, value in fields.items():
        if value.shape[0] != len(token_ids):
            raise DataError(
                f"{name}.{key} has {value.shape[0]} rows for {len(token_ids)} tokens",
                fix="each position of the input has one row",
            )
    return Datum(tuple(token_ids), fields)
