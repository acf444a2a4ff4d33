"""Plugins: the index (metadata only), drivers (stevedore, by name), hooks (pluggy)."""

from nemorl.base.packages.diagnosis import Diagnostic
from nemorl.base.packages.plugin_policy import PluginPolicy
from nemorl.plugins.index import KINDS, Index, PluginEntry
from nemorl.plugins.registry import Registry, foreign_words, offered, register, registry

__all__ = [
    "KINDS",
    "Diagnostic",
    "Index",
    "PluginEntry",
    "PluginPolicy",
    "Registry",
    "foreign_words",
    "offered",
    "register",
    "registry",
]
