"""Ways for weights to get from the trainer's process to the generator's, one module each.

All hand over the same thing, buckets of tensors under their Hugging Face names:

- ``shared_memory``: memory that both processes map, on one node;
- ``object_store``: Ray's object store, between any nodes;
- ``cuda_ipc``: GPU memory that other processes map, on one node;
- ``nccl``: a broadcast between GPUs, on any nodes;
- ``delta_socket``, ``delta_folder``: what has changed, over TCP or as files, between any nodes.

Which one a run uses is chosen in :mod:`nemorl.weights` by what their configs say (``config``); the bytes of all are
laid out by ``layout``. Within one process the kernel's own ``in_process`` is used.
"""

from nemorl_rl.transports.config import (
    CudaIpcConfig,
    DeltaFolderConfig,
    DeltaSocketConfig,
    NcclConfig,
    ObjectStoreConfig,
    SharedMemoryConfig,
)

__all__ = [
    "CudaIpcConfig",
    "DeltaFolderConfig",
    "DeltaSocketConfig",
    "NcclConfig",
    "ObjectStoreConfig",
    "SharedMemoryConfig",
]
