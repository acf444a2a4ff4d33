"""The policy over HTTP, in the APIs that agents speak already.

``gateway``: one server for all episodes, each with an address and a key of its own; ``server``: what it does with a
request; ``calls``: one call of the policy, which several requests may wait for; ``apis``: one module per API, from its
JSON to chat messages and back; ``fields``: which fields of a body are honoured; ``command``: ``nemorl serve``.
"""
