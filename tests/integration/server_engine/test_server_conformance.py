"""The backend against every clause of its contract, with a real vLLM server whose workers run nemorl-vllm's extension.

The model has tied embeddings, whose output head vLLM on the CPU keeps stale where it loads weights by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nemorl_testing import conformance
from nemorl_testing.models import tiny_model
from vllm_server import EXTENDED, VLLMServer, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PORT = free_port()


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    server = VLLMServer(tiny_model(), tmp_path_factory.mktemp("server") / "log", port=PORT, options=EXTENDED)
    try:
        server.wait()
        yield
    finally:
        server.kill()


test_server = conformance(
    "generation_backends",
    {"name": "server", "urls": [f"http://127.0.0.1:{PORT}"]},
    skip={"weights_in_process_are_shared": "the engine is another process: it has a copy by nature"},
)
