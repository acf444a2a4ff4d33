"""One process: a policy built, filled and read through its bridge, and a CPU that passes for CUDA."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_rl.models.tiny import write_tiny_model
from pydantic import ValidationError
from recorded_messages import Raises

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher
from nemorl_megatron import MegatronConfig, cpu_shim
from nemorl_megatron.bridge import bridge_for
from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.sources import Tensors
from nemorl_megatron.head import OutputHead
from nemorl_megatron.model import build_model
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_megatron.settings import settings_of

pytestmark = pytest.mark.megatron


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    joined = Parallel.join(WorkerContext(), Sizes())
    yield joined
    joined.leave()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=64)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_bfloat16_policy_computes_and_exports_bfloat16(pretrained: Path, parallel: Parallel) -> None:
    from transformers import AutoModelForCausalLM

    bridge = bridge_for(PolicyConfig(model_name=str(pretrained)))
    model = bridge.build(parallel, dtype=torch.bfloat16, attention="auto", activation_checkpointing=False)
    bridge.load(model, parallel, seed=0)
    expected = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, bridge.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    head = OutputHead(model[0], parallel, bridge.vocabulary, bridge.logit_cap)
    with torch.no_grad():
        logits = head.logits(head.whole(model[0](ids)))
    torch.testing.assert_close(logits.transpose(0, 1), expected(ids).logits.float(), atol=0.02, rtol=0.02)

    exported = {name: tensor for bucket in bridge.export(model, parallel) for name, tensor in bucket.items()}
    for name, parameter in expected.named_parameters():
        assert torch.equal(exported.pop(name), parameter)
    assert not exported


def test_random_policies_of_one_seed_are_equal(pretrained: Path, parallel: Parallel) -> None:
    bridge = bridge_for(PolicyConfig(model_name=str(pretrained), init="random"))
    found = []
    for seed in (3, 3, 4):
        model = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
        bridge.load(model, parallel, seed)
        (bucket,) = bridge.export(model, parallel)
        found.append(bucket["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_weights_that_do_not_fit_the_config_are_refused(pretrained: Path, parallel: Parallel, raises: Raises) -> None:
    from transformers import AutoConfig

    settings = settings_of(AutoConfig.from_pretrained(pretrained))
    model = build_model(settings, parallel)
    names = global_names(model, settings, parallel)
    exchange = Exchange(settings, parallel)
    with raises(BackendError, "model.embed_tokens.weight"):
        exchange.fill(names, Tensors({}))
    with raises(BackendError):
        exchange.fill(names, Tensors({"model.embed_tokens.weight": torch.zeros(3, 3)}))


def test_a_second_model_of_the_process_has_the_layout_of_the_first(parallel: Parallel, raises: Raises) -> None:
    second = Parallel.join(WorkerContext(), Sizes())
    second.leave()  # which leaves the first one's groups alone
    assert parallel_state.model_parallel_is_initialized()
    with raises(BackendError):
        Parallel.join(WorkerContext(world_size=2), replace(Sizes(), tensor=2))


def test_the_last_to_leave_ends_the_groups() -> None:
    first, second = (Parallel.join(WorkerContext(), Sizes()) for _ in range(2))
    first.leave()
    first.leave()
    assert parallel_state.model_parallel_is_initialized()
    second.leave()
    assert not parallel_state.model_parallel_is_initialized()


def test_the_default_group_of_another_engine_is_used_and_all_others_are_dissolved() -> None:
    Parallel.join(WorkerContext(), Sizes()).leave()  # stands for vLLM, which makes one for itself and leaves it behind
    others = torch.distributed.group.WORLD
    groups = [*torch.distributed.distributed_c10d._world.pg_map]
    assert others in groups
    joined = Parallel.join(WorkerContext(), Sizes())
    assert joined.largest(3) == 3
    assert len(torch.distributed.distributed_c10d._world.pg_map) > len(groups)
    joined.leave()
    assert torch.distributed.group.WORLD is others
    assert [*torch.distributed.distributed_c10d._world.pg_map] == groups  # each has three threads


def test_workers_that_the_sizes_do_not_divide_are_refused(raises: Raises) -> None:
    with raises(BackendError, 8, 3):
        Sizes(pipeline=3).data(8)
    with raises(BackendError, 8, 3):
        Sizes(expert=3).data(8)
    assert Sizes(tensor=2, pipeline=2, expert=2).data(8) == 2


def test_parts_of_stages_need_stages(raises: Raises) -> None:
    with raises(ValidationError):
        MegatronConfig(virtual_pipeline_parallel_size=2)
    assert MegatronConfig(virtual_pipeline_parallel_size=2, pipeline_parallel_size=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: nothing is replaced")
def test_cuda_means_the_cpu_to_megatron_core_and_nothing_to_others() -> None:
    assert torch.zeros(2).cuda().device == torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type(torch.int64).dtype == torch.int64
    torch.cuda.synchronize()
    for name in cpu_shim.MAKERS:
        made = getattr(cpu_shim.schedules.torch, name)(torch.zeros(1) if name == "empty_like" else [1], device="cuda")
        assert made.device.type == "cpu"
        assert made.equal(made) or name.startswith("empty")
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.zeros(2, device="cuda")


def test_the_stream_of_experts_knows_events_whatever_else_stands_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU puts streams of its own in torch's place, whose events are ``None``."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    stream = token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
    stream.record_event().synchronize()


ON_CUDA = re.compile(r"""torch\.(\w+)\([^()]*(?:\([^()]*\)[^()]*)*(?:device\s*=\s*["']cuda|pin_memory\s*=\s*True)""")


UNUSED = re.compile(
    r"fp8_utils|nccl_allocator|rerun_state_machine|distributed\.(fsdp\..*|param_and_grad_buffer)"
    r"|pipeline_parallel\.hybrid_cp_schedule|fusions\.fused_indices_converter"
)
"""Modules that are loaded with others, and make tensors on CUDA in functions that this package never reaches: float8,
allocators of NCCL, sharded data parallelism, fault injection, fused kernels."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: nothing is replaced")
def test_every_module_of_megatron_core_in_use_that_asks_for_cuda_is_answered() -> None:
    asking = {}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None) if name.startswith("megatron.core") else None
        if source and (found := set(ON_CUDA.findall(Path(source).read_text()))):
            asking[name] = found
    used = {name: found for name, found in asking.items() if not UNUSED.fullmatch(name.removeprefix("megatron.core."))}
    assert used.keys() <= {module.__name__ for module in cpu_shim.USERS}
    assert set().union(*used.values()) == set(cpu_shim.MAKERS)
