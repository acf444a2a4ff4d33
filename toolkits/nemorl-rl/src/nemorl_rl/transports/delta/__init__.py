"""Transports that carry only the bits of the weights that have changed.

At RL's learning rates most elements of a bfloat16 model do not move in a step: the update is smaller than half of the
distance to the next number. The sender keeps the bits that it published last, and an engine those that it fetched last;
between them travels the exclusive or of both, which leads from either to the other.

- ``changes``: the difference of two tensors as bytes, and its application;
- ``versions``: the sender's bits, and messages that lead from one version to the next, or hold a whole one;
- ``bases``: the engine's bits, brought up to date by messages and proven by the digests that these carry;
- ``socket``: messages over TCP, for the transport ``delta_socket``;
- ``folder``: messages as files of a shared folder, for ``delta_folder``.

An engine names the version that it has. Whoever has another one than the newest but one, whose digests differ, or that
comes later, is sent the whole weights; the sender counts these and says why (``counts``).
"""
