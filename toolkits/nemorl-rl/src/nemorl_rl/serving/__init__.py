"""Engines as a run sees them: requests, routes, snapshots and precision."""
