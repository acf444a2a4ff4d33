"""Which transport a run gets, and what the two between GPUs do: ``nccl``, here over gloo, and ``cuda_ipc``.

That what arrives is what was sent is a conformance check. With real workers: ``tests/integration/ray``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nemorl.errors import BackendError, DeadlineError, WeightsLostError
from nemorl.plugins import registry
from nemorl.weights import Distance
from nemorl_rl.placement.place import choose_transport
from nemorl_rl.transports.broadcast import Broadcast, BroadcastPayload, Keys
from nemorl_rl.transports.cuda_ipc import CudaIpc
from recorded_messages import Raises
from tiers import only
from torch import Tensor

PATIENCE_S = 60.0
"""A test that waits longer for another process or thread fails; none should come near."""
EVERY = ("in_process", "nccl", "cuda_ipc", "shared_memory", "object_store")
BUCKETS = [{"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, {"c": torch.full((4,), 7)}]


# Which one a run gets


@pytest.mark.parametrize(
    ("distance", "device", "colocated", "chosen"),
    [
        ("process", "cuda:0", True, "in_process"),
        ("node", "cpu", True, "shared_memory"),
        ("node", "cpu", False, "shared_memory"),
        ("cluster", "cpu", False, "object_store"),
        ("node", "cuda:0", True, "cuda_ipc"),  # NCCL refuses two ranks on one GPU
        ("node", "cuda:0", False, "nccl"),
        ("cluster", "cuda:0", False, "nccl"),
        ("cluster", "cuda:0", True, "object_store"),
    ],
)
def test_transports_between_gpus_are_chosen_between_gpus_only(
    distance: Distance, device: str, colocated: bool, chosen: str
) -> None:
    found = choose_transport(EVERY, EVERY, distance, plugins=registry(), device=device, colocated=colocated)
    assert (found or "").rpartition(":")[2] == (chosen or "")


# The broadcast


@pytest.fixture
def sender() -> Iterator[Broadcast]:
    made = Broadcast(deadline_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Broadcast]:
    made = Broadcast(deadline_s=1.0)
    yield made
    made.close()


def collect(payload: BroadcastPayload) -> dict[str, Tensor]:
    return {name: tensor for bucket in Broadcast(1.0).fetch(payload) for name, tensor in bucket.items()}


def expect_all(found: Mapping[str, Tensor]) -> None:
    for bucket in BUCKETS:
        for name, tensor in bucket.items():
            assert torch.equal(found[name], tensor)


def publish(sender: Broadcast) -> BroadcastPayload:
    return sender.publish(lambda: iter(BUCKETS))


def store_of(payload: BroadcastPayload) -> Any:
    return dist.TCPStore(payload.address, payload.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))


def announce(payload: BroadcastPayload, name: str) -> Any:
    """Ask for a round under a name, and do nothing more. Keeps its connection while it is referred to."""
    store = store_of(payload)
    store.set(Keys.who(store.add(Keys.tickets, 1)), name)
    return store


def test_publishing_waits_for_nobody_and_later_changes_are_not_sent(sender: Broadcast) -> None:
    weight = torch.ones(3)
    payload = sender.publish(lambda: iter([{"w": weight}]))
    weight.zero_()
    assert collect(payload)["w"].tolist() == [1.0] * 3


def test_replicas_that_ask_together_share_a_round(sender: Broadcast) -> None:
    payload = publish(sender)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(collect, [payload] * 3):
            expect_all(found)
    expect_all(collect(payload))  # one that asks later, e.g. a replaced generator
    assert not sender.failures


def test_a_receiver_that_never_comes_is_named_and_the_others_get_their_weights(hasty: Broadcast) -> None:
    payload = publish(hasty)
    absent = announce(payload, "process 7 on a far node")
    expect_all(collect(payload))
    (error,) = hasty.failures
    assert "waited up to 1 s for process 7 on a far node to join the broadcast" in str(error)
    assert isinstance(error, DeadlineError)
    del absent


def test_a_receiver_lost_before_it_said_who_it_is_holds_nobody_up(hasty: Broadcast) -> None:
    payload = publish(hasty)
    store_of(payload).add(Keys.tickets, 1)
    expect_all(collect(payload))
    assert "receiver 1 to say who it is" in str(hasty.failures[0])


def test_a_receiver_gives_up_on_a_trainer_that_does_not_answer(raises: Raises) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = BroadcastPayload("127.0.0.1", server.port, "process 7 on a far node", "cpu", ((64, {}),), deadline_s=0.2)
    with raises(DeadlineError, "0.6", 1, 7):
        collect(payload)


def test_a_trainer_that_has_ended_is_reported_at_once(sender: Broadcast, raises: Raises) -> None:
    payload = publish(sender)
    sender.close()
    with raises(WeightsLostError):
        collect(payload)


def test_the_last_two_versions_can_be_had(sender: Broadcast, raises: Raises) -> None:
    payloads = [sender.publish(partial(iter, [{"w": torch.tensor(number)}])) for number in range(3)]
    assert [int(collect(payload)["w"]) for payload in payloads[1:]] == [1, 2]
    for thread in threading.enumerate():
        if thread.name == "nemorl-broadcast-1":  # of the version that was dropped
            thread.join(PATIENCE_S)
    with raises(WeightsLostError):
        collect(payloads[0])


def test_a_receiver_that_stops_half_way_spoils_nothing(sender: Broadcast) -> None:
    payload = publish(sender)
    half = Broadcast(1.0).fetch(payload)
    next(half)
    half.close()  # type: ignore[attr-defined]
    expect_all(collect(payload))


def test_no_weights_at_all_can_be_sent(sender: Broadcast) -> None:
    assert collect(sender.publish(lambda: iter([{}]))) == {}


def test_no_default_process_group_is_made(sender: Broadcast) -> None:
    before = dist.is_initialized()  # an engine of vLLM in this process leaves one behind
    expect_all(collect(publish(sender)))
    assert dist.is_initialized() == before


@pytest.fixture
def _default_group() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_default_group")
def test_the_default_process_group_is_left_alone(sender: Broadcast) -> None:
    default = dist.group.WORLD
    expect_all(collect(publish(sender)))
    assert dist.group.WORLD is default
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1.0


# Between processes

SIZE = 4 * 2**20
"""Elements of a bucket: 16 MiB, more than sockets hold, so that a receiver that stops holds the sender up."""


def receive_in(payload: BroadcastPayload, pipe: Any, kill_after: int | None) -> None:
    """A receiver; it dies after some buckets, or reports the sum of each."""
    sums = []
    for bucket in Broadcast(1.0).fetch(payload):
        sums.append(float(bucket["w"].double().sum()))
        if len(sums) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(sums)


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", only(1, of=(None, 1)))
def test_two_replicas_in_other_processes_receive_though_one_may_die(kill_after: int | None, sender: Broadcast) -> None:
    payload = sender.publish(lambda: ({"w": torch.full((SIZE,), float(index))} for index in range(4)))
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    replicas = [
        spawn.Process(target=receive_in, args=(payload, pipe[1], kill_after if rank == 0 else None), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for replica in replicas:
        replica.start()
    try:
        for rank in range(1 if kill_after else 0, 2):
            assert pipes[rank][0].poll(PATIENCE_S)
            assert pipes[rank][0].recv() == [float(index) * SIZE for index in range(4)]
        replicas[0].join(PATIENCE_S)
        if kill_after:
            assert replicas[0].exitcode == -signal.SIGKILL
            deadline = time.monotonic() + PATIENCE_S
            while not sender.failures and time.monotonic() < deadline:
                time.sleep(0.05)
            assert f"process {replicas[0].pid} on" in str(sender.failures[0])
        else:
            assert not sender.failures
    finally:
        for replica in replicas:
            replica.kill()


# CUDA IPC


def test_cuda_ipc_refuses_weights_on_the_cpu(raises: Raises) -> None:
    with raises(BackendError):
        CudaIpc().publish(lambda: iter(BUCKETS))


def ipc_receiver(payload: Any, pipe: Any) -> None:
    torch.cuda.init()
    pipe.send({name: tensor.cpu().tolist() for bucket in CudaIpc().fetch(payload) for name, tensor in bucket.items()})


def nccl_receiver(payload: Any, pipe: Any, device: int) -> None:
    torch.cuda.set_device(device)
    found = {name: tensor for bucket in Broadcast(1.0).fetch(payload) for name, tensor in bucket.items()}
    pipe.send({name: (str(tensor.device), tensor.cpu().tolist()) for name, tensor in found.items()})


def on_gpu() -> Iterator[dict[str, Tensor]]:
    return ({name: tensor.cuda(0) for name, tensor in bucket.items()} for bucket in BUCKETS)


def ask(target: Any, *arguments: Any) -> Any:
    """What a function sends from a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=target, args=(arguments[0], theirs, *arguments[1:]), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE_S)
        return ours.recv()
    finally:
        process.kill()


def needs_gpus(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA device{'s' if count > 1 else ''}, this machine has {found}")


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_ipc_hands_over_the_gpus_memory() -> None:
    needs_gpus(1)
    sender = CudaIpc()
    found = ask(ipc_receiver, sender.publish(on_gpu))
    assert found == {name: tensor.tolist() for bucket in BUCKETS for name, tensor in bucket.items()}
    sender.close()


@pytest.mark.gpu
@pytest.mark.slow
def test_nccl_broadcasts_to_another_gpu(sender: Broadcast) -> None:
    needs_gpus(2)
    found = ask(nccl_receiver, sender.publish(on_gpu), 1)
    assert found == {name: ("cuda:1", tensor.tolist()) for bucket in BUCKETS for name, tensor in bucket.items()}
