"""Runs on a local page, live.

``watched``: a run as it grows, and its index; ``stream``: what is added, as server-sent events; ``guard``: who may ask;
``server``: the answers; ``serving``: the server of a process; ``command``: ``nemorl view``.
"""
