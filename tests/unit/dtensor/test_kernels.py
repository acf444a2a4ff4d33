"""The CPU kernels compute what they replace, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from nemorl_dtensor.model_kernels import OneDnnLinear, use_fast_kernels
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and all gradients under an uneven upstream gradient."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(torch.linspace(-1, 1, out.shape[-1]).to(out.dtype).expand_as(out))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (64, 96)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [2, 100])
def test_linear_equals_pytorch(inputs: int, outputs: int, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    fast = copy.deepcopy(plain)
    use_fast_kernels(fast)
    assert type(fast[0]) is OneDnnLinear
    x = torch.randn(2, rows, inputs)
    for found, expected in zip(run(fast, x), run(plain, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_rms_norm_equals_transformers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Qwen2RMSNorm(24, eps=1e-3))
    nn.init.normal_(plain[0].weight)  # type: ignore[arg-type]
    fast = copy.deepcopy(plain)
    use_fast_kernels(fast)
    assert "forward" in vars(fast[0])
    x = torch.randn(2, 5, 24)
    for found, expected in zip(run(fast, x), run(plain, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_bfloat16_norm_equals_transformers_and_has_better_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Qwen2RMSNorm(96, eps=1e-3)).bfloat16()
    nn.init.normal_(plain[0].weight)  # type: ignore[arg-type]
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    use_fast_kernels(fast)
    assert "forward" in vars(fast[0])
    x = torch.randn(4, 50, 96).bfloat16()
    mine, theirs = run(fast, x), run(plain, x)
    assert mine[0].dtype == torch.bfloat16
    # Sums in another order: at most a neighbour, and rarely.
    torch.testing.assert_close(mine[0], theirs[0], rtol=2**-7, atol=0)
    assert float((mine[0] != theirs[0]).float().mean()) < 1e-3

    # The formula in float64, with r = 1 / rms and n = x * r:
    # d/dx = r * (g * w - n * mean(g * w * n)), d/dw = sum(g * n)
    wide, weight = x.double(), exact[0].weight.detach()
    upstream = torch.linspace(-1, 1, 96).bfloat16().double().expand_as(wide)
    inverse = (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    normed, scaled = wide * inverse, upstream * weight
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_weight = (upstream * normed).sum((0, 1))
    for place, expected in ((1, grad_x), (2, grad_weight)):
        errors = [float((found[place].double() - expected).norm() / expected.norm()) for found in (mine, theirs)]
        assert errors[0] < 2**-8
        assert errors[0] <= 1.01 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_another_formula_is_left_alone(dtype: torch.dtype) -> None:
    gemma = GemmaRMSNorm(24).to(dtype)  # scales by 1 + weight
    nn.init.normal_(gemma.weight)
    use_fast_kernels(gemma)
    assert "forward" not in vars(gemma)


def test_a_norm_whose_input_is_of_another_precision_computes_as_before() -> None:
    norm = Qwen2RMSNorm(24).bfloat16()
    x = torch.randn(3, 24)
    expected = norm(x)
    use_fast_kernels(norm)
    assert torch.equal(norm(x), expected)


def test_other_precisions_are_left_alone() -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    use_fast_kernels(layer)
    assert type(layer) is nn.Linear
