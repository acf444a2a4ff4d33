"""Programs, Python coroutines and tool loops that drive the policy, as environments of nemorl."""

from nemorl_agents.programs.config import AgentConfig, MCPServerConfig, ToolsConfig

__all__ = ["AgentConfig", "MCPServerConfig", "ToolsConfig"]
