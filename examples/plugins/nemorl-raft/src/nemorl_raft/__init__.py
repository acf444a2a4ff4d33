"""RAFT for nemorl: imitate the best of your own responses."""

from nemorl_raft.config import RaftConfig

__all__ = ["RaftConfig"]
