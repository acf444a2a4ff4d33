"""Bytes of the Tinker API and the plain data that they stand for.

``messages``: the protobuf messages of the client's wheel, and tensors in them; ``data``: bodies of
``forward_backward``; ``outputs``: the two answers that are protobuf; ``bodies``: JSON bodies; ``sampling``: bodies of
``asample``.
"""
