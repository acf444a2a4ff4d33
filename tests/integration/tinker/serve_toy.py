"""A Tinker server of the toy models, in a process of its own that can be killed: ``FOLDER PORT [NAME=VALUE …]``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nemorl_agents.tinker.keys import Keys
from nemorl_agents.tinker.server import TinkerServer
from nemorl_agents.tinker.service import Times
from nemorl_trust.listening import Place
from tinker_toy import ToyModels, toy_loss

KEYS = {"ada": "tml-ada-0123456789", "bob": "tml-bob-0123456789"}


def main(folder: str, port: str, *settings: str) -> None:
    given = {name: float(value) for name, _, value in (each.partition("=") for each in settings)}
    models = ToyModels(slow_s=given.pop("slow_s", 0.0))
    with TinkerServer(
        models, Path(folder), Keys(KEYS), toy_loss, place=Place(port=int(port)), times=Times(**given)
    ) as server:
        print(server.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
