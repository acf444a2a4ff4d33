"""Backends describe themselves to planners; what they say agrees with what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nemorl.config import PolicyConfig
from nemorl.errors import UsageError
from nemorl.plugins.kinds import GenerationBackendConfig, TrainingBackendConfig
from nemorl_dtensor import DTensorConfig, attention_cpu, training_memory
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory import budgets, head, models, work
from nemorl_rl.planning.memory.describing import engine_plan, training_plan
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_tensors import logprobs
from nemorl_tensors.engines import buckets, prefix_forest, rows
from recorded_messages import Raises

LLAMA = {
    **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32768},
}


class SilentTraining(TrainingBackendConfig):
    """Says nothing of itself."""


class SilentEngine(GenerationBackendConfig):
    """Says nothing of itself."""


def test_a_backend_that_says_nothing_is_named_with_what_it_lacks(raises: Raises) -> None:
    with raises(UsageError, "SilentTraining", "PlansTraining"):
        training_plan(SilentTraining())
    with raises(UsageError, "SilentEngine", "PlansEngine"):
        engine_plan(SilentEngine())


def test_limits_that_plans_count_with_are_those_of_the_engines() -> None:
    # The toolkit that plans imports no torch, so these numbers stand there again.
    assert head.CHUNK_LOGITS == logprobs.CHUNK_LOGITS
    assert head.KEPT_LOGITS_BYTES == logprobs.KEPT_LOGITS_BYTES
    assert budgets.BUCKET_BYTES == buckets.BUCKET_BYTES
    assert work.MIN_SHARING == prefix_forest.MIN_RATIO
    assert training_memory.ATTENTION_BYTES == attention_cpu.KEPT_BYTES
    assert training_memory.BLOCK_QUERIES == attention_cpu.BLOCK_QUERIES
    assert models.MICROBATCH_TOKENS == {True: rows.CPU_MICROBATCH_TOKENS, False: rows.CUDA_MICROBATCH_TOKENS}


def test_fewer_positions_at_a_time_take_less_memory_in_the_head() -> None:
    def logits(chunk: int | None) -> float:
        policy = PolicyConfig(backend=DTensorConfig(logprob_chunk_tokens=chunk), precision="bfloat16")
        model = HeldModel("policy", policy, Geometry.from_config(LLAMA), ranks=1, microbatch_tokens=8192)
        return next(part.size for part in model.moments.training["output head"] if part.name == "logits")

    # 8,192 tokens have 512 MiB of bfloat16 logits, more than are kept: chunks of 1,024 by themselves, or of 256. Of a
    # chunk there are bfloat16 logits, and float32 ones with their gradient: 10 B each; the gradient of the states is
    # 2 B x 8,192 x 1,024, the head's 4 B x 32,768 x 1,024 and is rounded beside the last chunk: + 2 B.
    assert logits(None) > logits(256)
    states, gradient = 2 * 8192 * 1024, 32768 * 1024
    assert logits(256) == pytest.approx(max(10 * 256 * 32768 + 4 * gradient, 14 * 256 * 32768 + 4 * gradient) + states)


def test_a_config_with_other_options_describes_another_model() -> None:
    policy = PolicyConfig(backend=DTensorConfig(), precision="bfloat16")
    model = HeldModel("policy", policy, Geometry.from_config(LLAMA), ranks=8, microbatch_tokens=1024)
    copies = policy.model_copy(update={"backend": DTensorConfig(data_parallel_replicas=4)})
    assert model.spread.shards == 8
    assert replace(model, policy=copies).spread.shards == 2


def test_attention_weights_are_counted_where_a_cpu_keeps_them() -> None:
    def activations(tokens: int, *, on_cpu: bool) -> float:
        policy = PolicyConfig(backend=DTensorConfig(layout="padded"), max_sequence_tokens=256)
        model = HeldModel("policy", policy, Geometry.from_config(LLAMA), 1, on_cpu, microbatch_tokens=tokens)
        return next(part.size for part in model.moments.training["output head"] if part.name == "activations")

    # Norms are fused on a CPU: 4 B in place of 8 B an element in two norms a layer and the last, of 1,024 elements.
    norms = 512 * (8 * 2 + 1) * 1024 * 4
    # 16 heads, 512 queries, on average (256 + 64) / 2 keys in float32: 5 MiB in each of 8 layers.
    kept = 8 * 4 * 16 * 512 * (256 + 64) / 2
    assert activations(512, on_cpu=True) - activations(512, on_cpu=False) == pytest.approx(kept - norms)
    # 8,192 queries would take 80 MiB a layer: they are computed again.
    assert activations(8192, on_cpu=True) < activations(8192, on_cpu=False)


MIXTURE = {
    **{**LLAMA, "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    **{"head_dim": 64},
}


def test_ranks_that_divide_experts_gather_fewer_weights_and_hold_as_many() -> None:
    def parts(expert: int) -> dict[str, float]:
        policy = PolicyConfig(backend=DTensorConfig(expert_parallel_size=expert), precision="bfloat16")
        model = HeldModel("policy", policy, Geometry.from_config(MIXTURE), ranks=8, microbatch_tokens=1024)
        moment = model.moments.training["upper layers backward"]
        found = {part.name: part.size for part in moment if part.name in ("gathered layers", "gradients")}
        return {**found, "weights": sum(part.size for part in model.moments.lasting if part.name == "weights")}

    alone, divided = parts(1), parts(4)
    # 16 experts of 3 x 1,024 x 512 in a layer, of which a rank then gathers a quarter: two layers of bfloat16.
    assert alone["gathered layers"] - divided["gathered layers"] == pytest.approx(2 * 2 * 0.75 * 16 * 3 * 1024 * 512)
    assert alone["gradients"] - divided["gradients"] == pytest.approx(4 * 0.75 * 16 * 3 * 1024 * 512)
    assert alone["weights"] == divided["weights"]  # sixteen experts on eight ranks, two each, either way


def test_layouts_of_a_mixture_divide_its_experts() -> None:
    policy = PolicyConfig(backend=DTensorConfig(), precision="bfloat16")
    mixture = HeldModel("policy", policy, Geometry.from_config(MIXTURE), ranks=8, microbatch_tokens=1024)
    dense = replace(mixture, geometry=Geometry.from_config(LLAMA))
    sizes = [
        {each["backend.expert_parallel_size"] for each in policy.backend.training_plan().layouts(model, 8)}  # type: ignore[attr-defined]
        for model in (mixture, dense)
    ]
    assert sizes == [{1, 2, 4, 8}, {1}]


def test_layouts_of_a_mixture_split_its_attention_where_its_experts_are_divided() -> None:
    policy = PolicyConfig(backend=DTensorConfig(), precision="bfloat16")
    mixture = HeldModel("policy", policy, Geometry.from_config(MIXTURE), ranks=2, microbatch_tokens=1024)
    found = {
        (each["tensor_parallel_size"], each["backend.expert_parallel_size"])
        for each in policy.backend.training_plan().layouts(mixture, 8)  # type: ignore[attr-defined]
    }
    assert found == {(1, 1), (1, 2), (2, 2)}


def test_ranks_that_split_attention_gather_a_part_of_it_and_their_own_experts() -> None:
    def gathered(tensor: int) -> float:
        backend = DTensorConfig(expert_parallel_size=2)
        policy = PolicyConfig(backend=backend, precision="bfloat16", tensor_parallel_size=tensor)
        model = HeldModel("policy", policy, Geometry.from_config(MIXTURE), ranks=8, microbatch_tokens=1024)
        (part,) = (p for p in model.moments.training["upper layers backward"] if p.name == "gathered layers")
        return part.size

    # Half of 16 experts of 3 x 1,024 x 512 in each of two layers stays, in bfloat16; of the rest a rank has half.
    experts = 2 * 2 * 8 * 3 * 1024 * 512
    assert gathered(2) - experts == pytest.approx((gathered(1) - experts) / 2)
