"""The columns of rollout records: one row per episode, the same in training, validation and evaluation.

Names are those of :mod:`nemorl.types` and of ``TokenBatch``. Columns are only added; ``VERSION`` rises when the meaning
of one changes. docs/records.md says what each means.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

VERSION = "1"
VERSION_KEY = b"nemorl_records"
"""In the metadata of every file."""

NUMBERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
"""Named numbers. Not a map: the readers in use show those in three different ways."""
FLOATS = pa.list_(pa.float32())

ITEM = pa.struct([("digest", pa.string()), ("kind", pa.string()), ("tokens", pa.int32())])
"""An image or a sound of an episode."""
SHOWN = pa.struct([("item", pa.int32()), ("at", pa.int32()), ("tokens", pa.int32())])
"""Where a turn shows one."""

TURN = pa.struct(
    [
        ("author", pa.string()),
        ("text", pa.string()),
        ("sequence", pa.int32()),
        ("start", pa.int32()),
        ("stop", pa.int32()),
        ("reward", pa.float64()),
        ("began_s", pa.float64()),
        ("ended_s", pa.float64()),
        ("shown", pa.list_(SHOWN)),
    ]
)
RUNS = pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int32())]))
ROUTES = pa.struct([("layers", pa.int32()), ("experts_per_token", pa.int32()), ("data", pa.binary())])
"""The experts of each token: little-endian int16 by token, layer and choice."""
SEQUENCE = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("generation_logprobs", FLOATS),
        ("old_logprobs", FLOATS),
        ("policy_logprobs", FLOATS),
        ("reference_logprobs", FLOATS),
        ("advantages", FLOATS),
        ("loss_weights", FLOATS),
        ("version_runs", RUNS),
        ("routes", ROUTES),
        ("seat", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("split", pa.string()),
        ("dataset", pa.string()),
        ("seed", pa.int64()),
        ("step", pa.int32()),
        ("time", pa.float64()),
        ("step_time", pa.float64()),
        ("began_s", pa.float64()),
        ("ended_s", pa.float64()),
        ("group_id", pa.string()),
        ("sample_id", pa.string()),
        ("group", pa.int32()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("given", pa.string()),
        ("reward", pa.float64()),
        ("components", NUMBERS),
        ("seats", NUMBERS),
        ("metrics", NUMBERS),
        ("correct", pa.bool_()),
        ("valid", pa.bool_()),
        ("outcome", pa.string()),
        ("cause", pa.string()),
        ("advantage", pa.float32()),
        ("kl", pa.float32()),
        ("filtered", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("total_tokens", pa.int32()),
        ("num_turns", pa.int32()),
        ("weight_versions", pa.list_(pa.int32())),
        ("weights_proven", pa.bool_()),
        ("media", pa.list_(ITEM)),
        ("prompt_media", pa.int32()),
        ("turns", pa.list_(TURN)),
        ("sequences", pa.list_(SEQUENCE)),
    ],
    metadata={VERSION_KEY: VERSION.encode()},
)
LIGHT_NUMBERS = ["step", "time", "group", "reward", "tokens"]
"""Columns of which files say the smallest and the largest value."""
WRITING: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_statistics": LIGHT_NUMBERS}
"""How tables are written. zstd alone makes log-probs smaller than with a dictionary, in two thirds of the time; readers
need no bounds but those of a few columns to skip files."""
HEAVY = frozenset({"turns", "sequences"})
"""Columns that hold nearly all of the bytes; lists of samples do without."""
