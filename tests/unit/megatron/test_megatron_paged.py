"""megatron-core's paged cache, with flash-attention's two kernels written out in PyTorch: they run on CUDA only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.testing import conformance
from nemorl.testing.models import load_reference, response_logprobs, tiny_model
from nemorl.types import GenerationRequest, SamplingParams
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron.core.inference.contexts import dynamic_context
from megatron.core.transformer import attention
from nemorl_megatron import MegatronGenerationConfig, paged

pytestmark = pytest.mark.megatron


def attend(query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, seen: int) -> Tensor:
    """[S, n, D] of the last S of a row's ``seen`` tokens, whose keys [blocks, tokens, g, D] lie in ``blocks``."""
    if not seen:
        return torch.zeros_like(query)  # padding
    key, value = (cache[blocks.long()].flatten(0, 1)[:seen].transpose(0, 1) for cache in (keys, values))
    mask = causal_lower_right(len(query), seen)
    return scaled_dot_product_attention(query.transpose(0, 1), key, value, mask, enable_gqa=True).transpose(0, 1)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **named: Any
) -> Tensor:
    assert named["causal"]
    assert named["softmax_scale"] == q.shape[-1] ** -0.5
    found = torch.zeros_like(q)
    spans = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), named["block_table"], strict=True)
    for (start, stop), (first, last), blocks in spans:
        if start < stop:
            assert stop - start <= max_q
            assert last - first <= max_k
            found[start:stop] = attend(q[start:stop], k, v, blocks, last - first)
    return found


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor, **named: Any
) -> Tensor:
    assert named["causal"]
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack([attend(query, k_cache, v_cache, blocks, seen) for query, blocks, seen in rows])


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_attn_varlen_func", flash_attn_varlen_func)
    monkeypatch.setattr(attention, "flash_attn_with_kvcache", flash_attn_with_kvcache)
    monkeypatch.setattr(attention, "is_fa_min_version", lambda _: True)
    monkeypatch.setattr(dynamic_context, "triton_append_key_value_cache", None)
    monkeypatch.setattr(paged, "require_paged", lambda _: None)


@pytest.fixture
def engine(_kernels: None) -> Iterator[Any]:
    built: list[Any] = []

    def build(engine: Any, **options: int) -> Any:
        config = MegatronGenerationConfig(engine=engine, max_batch_rows=options.get("rows", 256))
        policy = PolicyConfig(model_name=str(tiny_model()), max_sequence_tokens=64)
        built.append(config.build(GenerationConfig(), policy, WorkerContext(), None))
        return built[-1]

    yield build
    for one in built:
        one.shutdown()


def requests(lengths: Sequence[int], new_tokens: int) -> list[GenerationRequest]:
    """Prompts of these lengths, two samples each, and the first prompt once more."""
    prompts = [tuple((7 * place + length) % 80 for place in range(length)) for length in lengths]
    prompts.append(prompts[0])
    return [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=new_tokens, top_p=0.9), (number, number + 100))
        for number, prompt in enumerate(prompts)
    ]


def assert_like_rows(build: Any, asked: Sequence[GenerationRequest], **options: int) -> None:
    found, expected = (build(name, **options).generate(asked) for name in ("megatron_core", "rows"))
    assert [[one.token_ids for one in group] for group in found] == [
        [one.token_ids for one in group] for group in expected
    ]
    model = load_reference(tiny_model())
    for request, group in zip(asked, found, strict=True):
        for one in group:
            assert one.logprobs == pytest.approx(response_logprobs(model, request.token_ids, one.token_ids), abs=1e-5)


def test_responses_are_those_of_rows_and_their_log_probs_transformers(engine: Any) -> None:
    assert_like_rows(engine, requests([3, 9, 1, 20], 12))


def test_rows_join_while_others_decode(engine: Any) -> None:
    assert_like_rows(engine, requests([3, 9, 1, 20, 14, 6], 12), rows=4)


def test_rows_that_fill_a_block_get_another(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens a block: rows change their order in the cache whenever some of them need a new one."""
    monkeypatch.setattr(paged, "BLOCK_TOKENS", 4)
    assert_like_rows(engine, requests([3, 9, 1, 20, 4], 24), rows=6)


def test_prompts_that_do_not_fit_one_pass_take_several(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PREFILL_TOKENS", {"cuda": 64})
    assert_like_rows(engine, requests([40, 41, 42, 43, 44], 4))


test_the_contract = pytest.mark.usefixtures("_kernels")(
    conformance(
        "generation_backends",
        {"name": "megatron", "engine": "megatron_core"},
        skip={"weights_in_process_are_shared": "megatron-core fuses queries, keys and values: a copy by nature"},
    )
)


def test_it_is_refused_where_there_is_no_cuda() -> None:
    policy = PolicyConfig(model_name=str(tiny_model()))
    config = MegatronGenerationConfig(engine="megatron_core")
    (problem,) = config.policy_problems(policy, device="cpu", as_guest=False)
    assert (problem.path, problem.fix) == ("generation.backend.engine", "set engine: rows")
    assert "the cluster has none" in problem.message
    with pytest.raises(BackendError, match=r"(?s)flash-attention .* on CUDA, and here there is none.*engine: rows"):
        config.build(GenerationConfig(), policy, WorkerContext(), None)


@pytest.mark.gpu
def test_cuda_gives_the_responses_of_rows() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("flash_attn", reason="flash-attention is not installed: pip install flash-attn")
    policy = PolicyConfig(model_name=str(tiny_model()), precision="bfloat16", max_sequence_tokens=64)
    worker = WorkerContext(device="cuda:0")
    found: list[Any] = []
    engines: tuple[Any, Any] = ("megatron_core", "rows")
    for name in engines:
        config = MegatronGenerationConfig(engine=name)
        built = config.build(GenerationConfig(), policy, worker, None)
        found.append(built.generate(requests([3, 9, 1, 20], 12)))
        built.shutdown()
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].logprobs[0] == pytest.approx(theirs[0].logprobs[0], abs=0.1)
