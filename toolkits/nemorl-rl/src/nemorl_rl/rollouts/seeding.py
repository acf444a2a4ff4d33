"""Seeds derived from names and numbers, so that no random state needs to be carried or saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and its position, equal in every process and on every machine.

    ``derive_seed(run_seed, "rollout", step, prompt_index, sample_index)``
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def mixed_seed(seed: int) -> int:
    """A 63-bit seed whose low half depends on all of ``seed``: torch's generators of the CPU look at 32 bits alone.

    The finalizer of SplitMix64 (https://doi.org/10.1145/2660193.2660195).
    """
    mask = 2**64 - 1
    seed &= mask
    seed = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & mask
    seed = ((seed ^ seed >> 27) * 0x94D049BB133111EB) & mask
    return (seed ^ seed >> 31) >> 1
