"""One module per API: its fields, its JSON to chat messages and back, its errors and its events.

``base``: what an API is, and what several share; ``tools``: definitions and choices of tools; ``chat``, ``responses``
(with ``response_items`` and ``response_events``), ``anthropic`` (with ``anthropic_blocks``) and ``completions``.
"""
