"""What communication libraries and devices say when they fail: as users reported it, or as this torch says it here.

Each text is one that none of us wrote: from the issue named beside it, or from a process of this test.
"""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from nemorl.resources.failure_texts import TEXTS, failure_in

TIMEOUT = (
    "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600067 "
    "milliseconds before timing out."
)
COLLECTIVE = {
    TIMEOUT: "ALLREDUCE",  # hiyouga/LlamaFactory#7396
    # zai-org/GLM-130B#132
    "NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1805457 milliseconds before "
    "timing out.": "BROADCAST",
    # hiyouga/LlamaFactory#6269
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, "
    "NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran for 600061 milliseconds": "_REDUCE_SCATTER_BASE",
    # NVIDIA/nccl#2076
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.31.0.1<33759> failed": "",
    # pytorch/pytorch#149984
    "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.25.1\nncclSystemError: "
    "System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n": "",
}
DEVICE = (
    "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
    "assertions.",  # tloen/alpaca-lora#123
    "CUDA error: uncorrectable NVLink error detected during the execution",  # MIC-DKFZ/nnUNet#1519
    "NVML: GPU is lost",  # nvidia-ml-py
)
OF_THE_USER = (
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "NCCL error in: NCCLUtils.hpp:317, invalid usage (run with NCCL_DEBUG=WARN for details)\nncclInvalidUsage: This "
    "usually reflects invalid usage of NCCL library.",
    "[gloo/allreduce.cc:27] Received data size doesn't match expected size. Is there a distributed collective mismatch "
    "in your code?",
    "Connection closed by peer",  # of some server that a loss asked
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
)


@pytest.mark.parametrize("text", COLLECTIVE)
def test_texts_of_communicators_are_known_and_name_the_collective(text: str) -> None:
    found = failure_in(text)
    assert found is not None
    assert (found.kind, found.operation) == ("collective", COLLECTIVE[text])
    assert found.text in text


@pytest.mark.parametrize("text", DEVICE)
def test_texts_of_devices_are_known(text: str) -> None:
    found = failure_in(text)
    assert found is not None
    assert (found.kind, found.operation) == ("device", "")


@pytest.mark.parametrize("text", OF_THE_USER)
def test_errors_that_would_come_again_are_left_to_whoever_made_them(text: str) -> None:
    assert failure_in(text) is None


def test_the_line_of_a_log_that_tells_the_failure_is_found_among_others() -> None:
    log = (
        f"step 3\n{TIMEOUT}\n[rank4]: To avoid data inconsistency, we are taking the entire process down.\nFatal Python"
    )
    found = failure_in(log)
    assert found is not None
    assert found.text == TIMEOUT


def test_gloo_says_here_what_is_looked_for() -> None:
    import torch
    import torch.distributed as dist

    store, timeout = dist.HashStore(), timedelta(seconds=0.5)
    with ThreadPoolExecutor(2) as pool:
        first, _second = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout), range(2))
        for operation in ("recv operation", "pair closure"):  # the time-out, then whoever calls once more
            with pytest.raises(RuntimeError, match=operation) as caught:
                first.allreduce([torch.ones(2)]).wait()
            found = failure_in(str(caught.value))
            assert found is not None, str(caught.value)
            assert found.kind == "collective"


def test_the_store_says_here_what_is_looked_for() -> None:
    import torch.distributed as dist

    with pytest.raises(RuntimeError) as nobody_came:
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=1))
    with pytest.raises(RuntimeError) as never_set:
        store.get("rank-1")
    for caught in (nobody_came, never_set):
        found = failure_in(str(caught.value))
        assert found is not None, str(caught.value)
        assert found.kind == "collective"


def test_where_the_text_names_no_collective_the_traceback_does() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce("not a tensor")
    except TypeError:
        found = failure_in("Gloo connectFullMesh failed with timeout", traceback.format_exc())
        assert found is not None
        assert found.operation == "all_reduce"
    finally:
        dist.destroy_process_group()


def test_no_text_is_there_for_nothing() -> None:
    """The installed torch and its gloo still say those of theirs."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    held = library.read_bytes()
    for piece in (
        b"Timed out waiting ",
        b"ms for recv operation to complete",
        b"ms for send operation to complete",
        b"Connection closed by peer ",
        b"Application timeout caused pair closure",
        b"Gloo connectFullMesh failed with ",
        b"failed to pass monitoredBarrier",
        b" timed out in monitoredBarrier",
        b"Connection was likely closed. Did the remote server shutdown or crash?",
        b" seconds waiting for clients",
        b"wait timeout after ",
    ):
        assert piece in held, piece
    assert len(TEXTS["collective"]) == len(set(TEXTS["collective"]))
