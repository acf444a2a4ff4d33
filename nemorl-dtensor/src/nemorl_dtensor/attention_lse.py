"""Attention to some of the keys, with what is needed to merge it with that to the others.

# R = rows, H and G = heads of queries and of keys, Q = queries, K = keys, d and d' = size of a key's and a value's head

The logarithm of the sum of exponentials (LSE) of a query's scores says what a part of the keys weighs: out = sum_p
exp(lse_p - lse) out_p, with lse that of all scores, as in FlashAttention (arXiv:2205.14135). Given out and lse over all
keys, the backward pass of each part is what it adds to the gradient of the whole: no other part is needed for it.

PyTorch's operators compute it. Each is asked whether it serves the tensors at hand; on a CPU and on CUDA one does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

aten: Any = torch.ops.aten
ALIGNED = 8
"""Numbers that CUDA's kernels have heads in multiples of"""
MAX_FLASH_HEAD = 256
FLASH_CAPABILITY = (8, 0)
"""Ampere, the first that flash attention is for"""
LSE_BLOCK = 32
"""Memory-efficient attention has LSE of a multiple of so many queries"""


class Part(NamedTuple):
    """Queries, and keys that they attend to."""

    query: Tensor
    """[R, H, Q, d]"""
    key: Tensor
    """[R, G, K, d] with H a multiple of G"""
    value: Tensor
    """[R, G, K, d']"""
    causal: bool
    """Query i sees the keys up to the i-th, of as many; else all of them"""
    scale: float
    """Factor of the scores"""


class Kernel(Protocol):
    """An operator for parts of equal heads, and its backward pass."""

    def serves(self, query: Tensor) -> bool:
        """It can compute with tensors like this one."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """[R, H, Q, d] answers and [R, H, Q] float32 LSE"""

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, from that of answers over all keys, these and their LSE."""


class _OnCPU:
    """Flash attention for CPUs."""

    def serves(self, query: Tensor) -> bool:
        return query.device.type == "cpu"

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        q, k, v, causal, scale = part
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, causal, scale = part
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class _Flash:
    """Flash attention for CUDA, of half precision."""

    def serves(self, query: Tensor) -> bool:
        is_half = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= MAX_FLASH_HEAD
        return query.is_cuda and is_half and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        q, k, v, causal, scale = part
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, causal, scale = part
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        sizes = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, no_dropout, no_dropout, scale=scale
        )
        return dq, dk, dv


class _Efficient:
    """Memory-efficient attention for CUDA (arXiv:2112.05682), also of float32."""

    def serves(self, query: Tensor) -> bool:
        return query.is_cuda

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        q, k, v, causal, scale = part
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, causal, scale = part
        lse = pad(lse, (0, -lse.shape[-1] % LSE_BLOCK), value=torch.inf).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, no_dropout, no_dropout, 0.0, wanted, causal, scale=scale
        )
        return dq, dk, dv


KERNELS: tuple[Kernel, ...] = (_OnCPU(), _Flash(), _Efficient())
"""The first that serves is taken."""


def attention(part: Part) -> tuple[Tensor, Tensor]:
    """[R, H, Q, d'] answers to a part's keys, and [R, H, Q] float32 LSE of the scores; without gradient."""
    alike = _alike(part)
    out, lse = _kernel(alike.query).forward(alike)
    return out[..., : part.value.shape[-1]], lse


def attention_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a part adds to the gradients of queries, keys and values, in their shapes.

    Args:
        part: Some of the keys.
        grad: [R, H, Q, d'] gradient of ``out``.
        out: [R, H, Q, d'] answers over all keys.
        lse: [R, H, Q] float32 over all keys.
    """
    alike = _alike(part)
    wide_grad, wide_out = (_filled_up(states, alike.query.shape[-1]) for states in (grad, out))
    dq, dk, dv = _kernel(alike.query).backward(alike, wide_grad, wide_out, lse)
    return dq[..., : part.query.shape[-1]], _as_given(dk, part.key), _as_given(dv, part.value)


def _kernel(query: Tensor) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.serves(query))


def _alike(part: Part) -> Part:
    """With heads of equal number and size: repeated, and filled up with zeros, which change no score and no answer."""
    share = part.query.shape[1] // part.key.shape[1]
    size = max(part.query.shape[-1], part.value.shape[-1])
    size = -(-size // ALIGNED) * ALIGNED
    key, value = (states.repeat_interleave(share, 1) if share > 1 else states for states in (part.key, part.value))
    query, key, value = (_filled_up(states, size) for states in (part.query, key, value))
    return Part(query, key, value, part.causal, part.scale)


def _filled_up(states: Tensor, size: int) -> Tensor:
    return pad(states, (0, size - states.shape[-1])) if states.shape[-1] < size else states


def _as_given(gradient: Tensor, states: Tensor) -> Tensor:
    """The gradient of states from that of their repetitions, filled up."""
    heads = states.shape[1]
    if gradient.shape[1] > heads:
        rows, repeated, keys, size = gradient.shape
        gradient = gradient.reshape(rows, heads, repeated // heads, keys, size).sum(2)
    return gradient[..., : states.shape[-1]]
