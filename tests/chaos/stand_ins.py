"""Servers that runs of the harness talk to, each behind a wire that can be cut."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import CheckpointError
from ray_nodes import Nodes
from wires import Wire

UNIT = Path(__file__).parents[1] / "unit"


def _nothing() -> None: ...


def _no_problems(place: Path) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class StandIn:
    """A server, or a cluster, as the settings of a subject and the harness see it."""

    address: str
    control: str
    """Where blows are told, by datagrams."""
    mend: Callable[[], None]
    """Before each life: it is reachable and whole."""
    fresh: Callable[[], None] = _nothing
    """Before each run: nothing is there of an earlier one."""
    problems: Callable[[Path], Iterator[str]] = _no_problems
    """What is wrong here after a run that has ended well."""

    @classmethod
    def behind(cls, wire: Wire, **more: Any) -> StandIn:
        return cls(f"127.0.0.1:{wire.port}", wire.control, wire.mend, **more)


@contextmanager
def judge(model: Path) -> Iterator[StandIn]:
    """A judge of chat completions whose verdict is a hash of what it is shown."""
    sys.path.insert(0, str(UNIT / "environments"))
    from judge_server import asked, serving

    def answer(request: dict[str, Any]) -> str:
        _, shown, mark = asked(request)
        return f"So it is.\nVERDICT-{mark}: {hashlib.sha256(shown.encode()).digest()[0] % 11}"

    with serving(answer) as server, Wire(int(server.url.rpartition(":")[2].partition("/")[0])) as wire:
        yield StandIn.behind(wire)


@contextmanager
def engine(model: Path) -> Iterator[StandIn]:
    """Speaks vLLM's dialect; its tokens follow from the weights that it was given, the prompt and the seed."""
    sys.path.insert(0, str(UNIT / "server_engine"))
    from fake_vllm import FakeVLLM

    class Engine(FakeVLLM):
        def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path != "/collective_rpc":
                return super().reply(path, body)
            folder = Path(body["kwargs"]["weights_path"])
            parts = sorted(folder.glob("*.safetensors"))
            self.weights = float(int.from_bytes(_tensors(parts)[:4], "little"))
            return 200, {"results": [None]}

    server = Engine(model)
    with Wire(server.port) as wire:
        yield StandIn.behind(wire)
    server.kill()


def _tensors(parts: list[Path]) -> bytes:
    """A hash of tensors; not of files: the order of their metadata is drawn at random."""
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for part in parts:
        for name, tensor in sorted(load_file(part).items()):
            found.update(name.encode() + tensor.float().numpy().tobytes())
    return found.digest()


@contextmanager
def store(model: Path) -> Iterator[StandIn]:
    """moto's S3 with the bucket ``chaos``."""
    from moto.server import ThreadedMotoServer
    from nemorl_ops.replicate.place import Place
    from nemorl_ops.replicate.transfer import CHECKPOINTS, Copied, checkpoints_in, copy_checkpoint

    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="us-east-1")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]

    def fresh() -> None:
        for method, path in (("POST", "moto-api/reset"), ("PUT", "chaos")):
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method=method), timeout=60)

    def problems(run: Path) -> Iterator[str]:
        place = Place(f"s3://chaos/runs/{run.name}", {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}})
        replicas = checkpoints_in(place)
        for name in replicas:
            with TemporaryDirectory() as folder:
                try:
                    copy_checkpoint(place.sub(f"{CHECKPOINTS}/{name}"), Place(f"{folder}/{name}"), Copied())
                    Checkpoint.read(Path(folder) / name).verify()
                except CheckpointError as error:
                    yield f"a half replica has the name of a whole one: {error}"
        newest = max((manifest["step"] for manifest in replicas.values()), default=0)
        last = max(Checkpoint.read(path).step for path in (run / "checkpoints").glob("step_*"))
        said = [str(event.get("message")) for event in read_jsonl(run / "events.jsonl")]
        if newest != last and not any("copied" in line or "has no copy" in line for line in said):
            yield f"the newest replica is of step {newest}, the newest checkpoint of step {last}, and nothing says so"

    with Wire(port) as wire:
        yield StandIn.behind(wire, fresh=fresh, problems=problems)
    server.stop()


@contextmanager
def nodes(model: Path) -> Iterator[StandIn]:
    """A Ray cluster of two nodes besides that of the driver."""
    with Nodes(2) as cluster:
        yield StandIn(cluster.address, cluster.control, cluster.mend)


STAND_INS: dict[str, Callable[[Path], Any]] = {"judge": judge, "engine": engine, "store": store, "nodes": nodes}
