"""A server of ours in a process that may open few files: ``python besieged.py NAME FOLDER``.

It prints how it is reached as one JSON line, and then answers lines of standard input: ``files``: how many descriptors
it has, having opened a file; ``exhaust``: opens files until no more are to be had; ``release``: closes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

FILES = 1024
TESTS = Path(__file__).parents[2]


def gateway(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(TESTS))
    from nemorl_agents.gateway.gateway import Gateway
    from scripted_policy import ScriptedPolicy, saying

    access = Gateway().open_at_root(ScriptedPolicy(lambda asked: saying("4")), key="the key")
    return {"address": access.base_url, "path": "/healthz", "key": access.api_key}


def prometheus(folder: Path) -> dict[str, Any]:
    from nemorl_ops.prometheus.config import PrometheusConfig
    from nemorl_ops.prometheus.logger import PrometheusLogger

    os.environ["SCRAPE"] = "a token"
    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: org/model\n")
    logger = PrometheusLogger(PrometheusConfig(port=0, token_env="SCRAPE"), folder)
    headers = {"Authorization": "Bearer a token"}
    return {"address": f"http://127.0.0.1:{logger.port}", "path": "/metrics", "headers": headers}


def view(folder: Path) -> dict[str, Any]:
    from nemorl_insight.view.serving import Viewer

    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: tiny\nmax_steps: 4\n")
    (folder / "events.jsonl").write_text('{"time": 100.0, "event": "started"}\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 101.0, "train/reward": 0.25}\n')
    address, _, path = Viewer([folder], folder / "cache").url.removeprefix("http://").partition("/")
    return {"address": f"http://{address}", "path": f"/{path}"}


def relay(folder: Path) -> dict[str, Any]:
    from nemorl_agents.interop.workers.relay import Relay
    from nemorl_trust.front_door import FrontDoor, Limits

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    served = Relay("policy", FrontDoor("the relay", Limits()))
    asyncio.run_coroutine_threadsafe(served.start(), loop).result(30)
    return {"address": f"http://127.0.0.1:{served.port}", "path": "/v1/models"}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    servers = {"gateway": gateway, "prometheus": prometheus, "view": view, "relay": relay}
    print(json.dumps(servers[name](folder)), flush=True)
    held = []
    for line in sys.stdin:
        said: Any = "done"
        if line == "files\n":
            try:
                said = len(os.listdir("/proc/self/fd"))
            except OSError as error:
                said = str(error)
        elif line == "exhaust\n":
            try:
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
        else:
            while held:
                os.close(held.pop())
        print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
