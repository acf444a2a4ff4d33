"""Whether a plugin works, as far as importing its config module tells."""

from __future__ import annotations

from nemorl.errors import PluginError
from nemorl.plugins import Diagnostic, PluginEntry, Registry
from nemorl_trust.source import read_source


def diagnose(entry: PluginEntry, plugins: Registry) -> Diagnostic | None:
    """The reason why an entry of ``plugins`` cannot be used; ``None`` where it can."""
    if entry.diagnostics:
        return entry.diagnostics[0]
    if entry.kind == "templates":  # files, which nobody imports
        return read_source(entry).problem
    try:
        loaded = Registry(plugins.index).load(entry.kind, entry.id)  # anew: what failed may work by now
    except PluginError as error:
        return Diagnostic("broken", "NRL106", entry.id, error.message, error.fix or "", repr(error.__cause__))
    from nemorl.plugins.kinds import PluginConfig  # pydantic takes 0.1 s, which `plugins list` need not wait for

    missing = loaded.missing_modules() if isinstance(loaded, type) and issubclass(loaded, PluginConfig) else []
    if not missing:
        return None
    fix = loaded.install_hint or f"pip install {' '.join(missing)}"
    return Diagnostic("missing", "NRL105", entry.id, f"needs {', '.join(missing)}, which cannot be found", fix)
