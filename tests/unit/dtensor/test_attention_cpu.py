"""Attention by matrix products is torch's attention: values, gradients, any number of shared heads and any length."""

from __future__ import annotations

import pytest
import torch
from nemorl_dtensor import attention_cpu
from nemorl_dtensor.attention_cpu import BLOCK_QUERIES, NAME, attention, use_fast_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig


def heads(kv_heads: int, tokens: int, dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, ...]:
    """Queries, keys, values of 6 and ``kv_heads`` heads, in the strides that a model has them, and a gradient."""
    draw = torch.Generator().manual_seed(tokens)
    q, k, v, g = (
        torch.randn(batch, tokens, count, 8, generator=draw).to(dtype).transpose(1, 2)
        for count in (6, kv_heads, kv_heads, 6)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None) -> list[Tensor]:
    """torch's own attention in float64: output, gradients of queries, keys and values."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, g.double())]


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK_QUERIES, BLOCK_QUERIES + 1, 150])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_are_those_of_torch_in_float64(kv_heads: int, tokens: int, scale: float | None) -> None:
    q, k, v, g = heads(kv_heads, tokens, torch.float32)
    out = attention(q, k, v, None, scale)
    found = [out.transpose(1, 2), *torch.autograd.grad(out, (q, k, v), g.transpose(1, 2))]
    for mine, expected in zip(found, reference(q, k, v, g, scale), strict=True):
        torch.testing.assert_close(mine.double(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("shared_mask", [True, False])
def test_queries_that_see_what_a_mask_leaves_them(shared_mask: bool) -> None:
    _, k, v, _ = heads(2, BLOCK_QUERIES + 30, torch.float32)
    q, *_, g = heads(2, BLOCK_QUERIES + 9, torch.float32)
    first = torch.tensor([21] if shared_mask else [21, 4])[:, None]
    seen = torch.arange(k.shape[2]) <= (first + torch.arange(q.shape[2]))[..., None]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
    out = attention(q, k, v, mask)
    found = [out.transpose(1, 2), *torch.autograd.grad(out, (q, k, v), g.transpose(1, 2))]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*wide, mask.double(), enable_gqa=True)
    for mine, theirs in zip(found, [expected, *torch.autograd.grad(expected, wide, g.double())], strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=3e-6, rtol=3e-6)


def test_in_bfloat16_it_is_as_near_to_float64_as_torch_is() -> None:
    q, k, v, g = heads(2, 200, torch.bfloat16)
    expected = reference(q, k, v, g, None)

    def errors(out: Tensor, grad: Tensor) -> list[float]:
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
        found[0] = found[0] if found[0].shape == q.shape else found[0].transpose(1, 2)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]

    own = errors(attention(q, k, v), g.transpose(1, 2))
    torchs = errors(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), g)
    # bfloat16 rounds by 2^-9 = 2e-3.
    assert all(mine < 1.5 * theirs for mine, theirs in zip(own, torchs, strict=True)), (own, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_mask", [True, False])
def test_what_is_kept_for_the_backward_pass_is_what_it_would_compute(
    dtype: torch.dtype, with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, g = heads(2, BLOCK_QUERIES + 30, dtype)
    mask = torch.full((q.shape[2],) * 2, -torch.inf, dtype=dtype).triu_(3)[None, None] if with_mask else None
    out = attention(q, k, v, mask)
    kept = [*torch.autograd.grad(out, (q, k, v), g.transpose(1, 2), retain_graph=True)]
    kept_once = [*torch.autograd.grad(out, (q, k, v), g.transpose(1, 2))]  # it has been let go of
    monkeypatch.setattr(attention_cpu, "KEPT_BYTES", 0)
    again = [*torch.autograd.grad(attention(q, k, v, mask), (q, k, v), g.transpose(1, 2))]
    for one, two, three in zip(kept, kept_once, again, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_gradients_agree_with_finite_differences() -> None:
    q, k, v, _ = heads(2, 5, torch.float64, batch=1)
    assert torch.autograd.gradcheck(attention, (q, k, v))


def tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )


def test_a_model_of_transformers_computes_the_same_with_it() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_llama(), attn_implementation="sdpa").eval()
    ids = torch.randint(0, 50, (2, 70))
    results = []
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
        use_fast_attention(model)
    assert model.config._attn_implementation == NAME
    for mine, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    assert NAME not in model.config.to_json_string()  # an export names no attention of ours


def test_padding_on_the_left_and_a_cache_go_through_transformers_own_attention() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_llama(), attn_implementation="sdpa").eval()
    ids = torch.randint(0, 50, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[:, 3:]
        use_fast_attention(model)
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[:, 3:], expected)
        start = model(input_ids=ids[:, :5], use_cache=True)
        last = model(input_ids=ids[:, 5:], past_key_values=start.past_key_values).logits
        torch.testing.assert_close(last, model(input_ids=ids).logits[:, 5:], atol=1e-5, rtol=1e-5)


def test_an_attention_that_was_asked_for_is_kept() -> None:
    model = AutoModelForCausalLM.from_config(tiny_llama(), attn_implementation="eager")
    use_fast_attention(model)
    assert model.config._attn_implementation == "eager"
