"""Generation backend ``server``: an engine that somebody else started, over HTTP."""

from nemorl_server_engine.config import ServerConfig

__all__ = ["ServerConfig"]
