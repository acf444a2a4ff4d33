"""Agents and servers: the gateway, agent programs, other projects' environments, and engines that others serve."""
