"""One module per API: its fields, its JSON to chat messages and back, its errors and its events.

``base``: what an API is, and what several share; ``contents``: texts, images and sounds of messages; ``tools``:
definitions and choices of tools; ``formats``: JSON that an answer is held to; ``chat``, ``responses``
(with ``response_items`` and ``response_events``), ``anthropic`` (with ``anthropic_blocks``) and ``completions``.
"""
