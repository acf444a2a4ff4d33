"""Plugins: the index (metadata only), drivers (stevedore, by name), hooks (pluggy)."""

from nemorl.base.packages.plugin_policy import PluginPolicy
from nemorl.plugins.index import KINDS, Diagnostic, Index, PluginEntry
from nemorl.plugins.registry import Registry, register, registry

__all__ = [
    "KINDS",
    "Diagnostic",
    "Index",
    "PluginEntry",
    "PluginPolicy",
    "Registry",
    "register",
    "registry",
]
