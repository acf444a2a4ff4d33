"""The loop of a Tinker client, as a plugin. What it computes is held to the client's own: ``test_tinker_flight.py``."""

from __future__ import annotations

from nemorl_testing import conformance
from nemorl_testing.kit import checks_for

OF_CONFIG = [check.name for check in checks_for("loggers") if check.function.__module__.endswith("every_config")]

test_client_loop = conformance(
    "algorithms",
    {"name": "client_loop", "policy": {"lora": {"rank": 32}}},
    only=[*OF_CONFIG, "trainer_belongs_to_the_config"],
)
test_client_requests = conformance("datasets", {"name": "client_requests", "path": "requests"}, only=OF_CONFIG)
