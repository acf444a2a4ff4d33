"""Conversations as messages and as tokens, so that what was sampled comes back as the tokens that were sampled.

``codec``: one model's way of writing messages and of reading answers; ``conversation``: what one episode has said.
"""
