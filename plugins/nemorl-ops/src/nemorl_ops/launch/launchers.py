"""The launchers that are installed: entry points of the group ``nemorl.launchers``, each a ``LauncherConfig``."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from nemorl.base.packages.owner import owner_of
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import DEFERRED
from nemorl.config.load import validate
from nemorl.errors import PluginError, PluginNotFoundError, boundary
from nemorl.plugins import registry

from nemorl_ops.launch.base import LauncherConfig

GROUP = "nemorl.launchers"
"""Entry-point group; the kernel knows that it is none of its kinds."""


def installed() -> dict[str, EntryPoint]:
    """Launchers by name, the first of each, where the policy of the site and the user admits their distributions."""
    index = registry().index
    found: dict[str, EntryPoint] = {}
    for point in index.points:
        if point.group == GROUP and index.policy.admits(owner_of(point)[0]):
            found.setdefault(point.name, point)
    return found


def load(name: str) -> type[LauncherConfig]:
    """The launcher of a name.

    Raises:
        PluginNotFoundError: there is none; says which there are.
        PluginError: it cannot be imported, or is no launcher.
    """
    points = installed()
    if name not in points:
        raise PluginNotFoundError(
            f"no launcher named {name!r} is installed (installed: {', '.join(sorted(points))})",
            fix=did_you_mean(name, points) or "choose one of them, or pip install the plugin that provides it",
        )
    with boundary(f"launcher {name!r} from {owner_of(points[name])[0]}"):
        loaded: Any = points[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, LauncherConfig)):
        raise PluginError(
            f"launcher {name!r} is {loaded!r}, not a subclass of nemorl_ops.launch.LauncherConfig",
            fix="point its entry point at the launcher's config class",
        )
    return loaded


def configured(name: str, options: dict[str, Any], source: str) -> LauncherConfig:
    """A launcher with its options, read strictly.

    Raises:
        ConfigError: with every mistake.
    """
    return validate(load(name), options, source)


def recorded(name: str, options: dict[str, Any]) -> LauncherConfig:
    """A launcher as it was when a job was submitted; what has changed on this machine since is no mistake."""
    return load(name).model_validate(options, context={DEFERRED: True})
