"""Conversations as messages and as tokens, so that what was sampled comes back as the tokens that were sampled.

``conversation``: what one episode has said; ``messages``: one form for what clients send. ``codec``: one model's way of
writing messages and of reading answers, by its chat template (``template``, ``template_text``) or by the package
renderers (``renderer``); ``answers`` and ``calls`` read what it says. ``learnt``: the tokens of a finished conversation
that the assistant wrote (``rows``, ``provenance``); ``media``: images and sounds; ``text``: what servers ask.
"""
