"""The ways in which new weights get to servers, and which of them a run takes. It is one for all of its servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from nemorl.errors import BackendError
from nemorl_trust.encryption import names_loopback

if TYPE_CHECKING:
    from nemorl_agents.servers.config import ServerConfig
    from nemorl_agents.servers.dialects.base import Dialect, Facts

Way = Literal["folder", "distributed", "tensor"]
"""``folder``: files that both sides see. ``distributed``: a broadcast of tensors to the server's processes. ``tensor``:
handles of device memory, which the server's processes copy."""
WITHOUT_FILES: tuple[Way, ...] = ("distributed", "tensor", "folder")
FILES_FIRST: tuple[Way, ...] = ("folder", "distributed", "tensor")
FASTER_AS_FILES = "the run and its servers share one machine and no GPU, where files are read faster than a broadcast"


def order(urls: Iterable[str], device: str) -> tuple[Way, ...]:
    """The ways, those first that a run prefers: without files, except on one machine without a GPU. Files stay in the
    page cache there, and an update takes half as long as a broadcast over gloo (docs/backends/server.md).

    Args:
        urls: Of all servers.
        device: Of this process.
    """
    is_one_machine = all(names_loopback(url) for url in urls)
    return FILES_FIRST if is_one_machine and device == "cpu" else WITHOUT_FILES


def way_problem(
    way: Way, spoken: Dialect, options: ServerConfig, urls: Iterable[str], device: str
) -> tuple[str, str] | None:
    """Why this run cannot give weights to these servers in that way, whatever they offer: message and fix."""
    far = [url for url in urls if not names_loopback(url)]
    others = [other for other in spoken.ways if other != way]
    instead = f"set generation.backend.weights: {' or '.join(others)}"
    fix = instead if others else f"sample with vllm or sglang: {spoken.name} knows no other way"
    if way == "distributed" and far and not options.plaintext:
        message = f"distributed sends the weights to {far[0]} unencrypted"
        return message, f"set plaintext: true if the network can be trusted, or {fix}"
    if way == "tensor" and far:
        return f"tensor hands over memory of this machine's GPU, and {far[0]} is another machine", fix
    if way == "tensor" and not device.startswith("cuda"):
        return f"tensor hands over memory of a GPU, and the run is on {device}", fix
    return None


def chosen_way(options: ServerConfig, spoken: Dialect, offers: Mapping[str, Facts], device: str) -> tuple[Way, str]:
    """The way that a run takes, and why.

    Args:
        options: Its ``weights`` says which way, or ``auto``: a folder where ``weights_folder`` names one, else the
            first in :func:`order` that this run and all of its servers can.
        spoken: The engine behind the servers.
        offers: What the servers said that answer, by address.
        device: Of this process.

    Raises:
        BackendError: There is none.
    """
    if options.weights != "auto":
        return options.weights, f"generation.backend.weights is {options.weights}"
    if options.weights_folder is not None and "folder" in spoken.ways:
        return "folder", "generation.backend.weights_folder is set"
    urls = dict.fromkeys((*options.urls, *offers))  # `nemorl engines add` may have been there
    ways = order(urls, device)
    reasons: list[str] = []
    for way in (way for way in ways if way in spoken.ways):
        problem = way_problem(way, spoken, options, urls, device)
        without = [url for url, facts in offers.items() if way not in facts.ways]
        if problem is None and not without:
            preferred = FASTER_AS_FILES if ways is FILES_FIRST and way == "folder" else f"{spoken.name} offers it"
            return way, "; ".join(reasons) or preferred
        reasons.append(problem[0] if problem is not None else f"{without[0]} does not offer weights: {way}")
    raise BackendError(
        f"no way to give weights to {spoken.name}: {'; '.join(reasons)}",
        fix=f"start it so that it offers one: {'; '.join(f'{way}: {what}' for way, what in spoken.ways.items())}",
    )


def require_way(way: Way, spoken: Dialect, facts: Facts, url: str, command: str) -> None:
    """
    Raises:
        BackendError: The server cannot be given weights in the way that the run takes.
    """
    if way in facts.ways:
        return
    if way not in spoken.ways:
        ways = " or ".join(spoken.ways)
        raise BackendError(f"{spoken.name} takes no weights by {way}", fix=f"set generation.backend.weights: {ways}")
    raise BackendError(
        f"{url} cannot be given weights by {way}, as this run gives them",
        fix=f"start it {spoken.ways[way]}, or set generation.backend.weights to another way; the rest as in: {command}",
    )
