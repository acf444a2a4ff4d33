"""Generation backend ``server``: an engine that somebody else started, over HTTP."""

from nemorl_agents.servers.config import ServerConfig

__all__ = ["ServerConfig"]
