"""A device that is not there: PyTorch tensors in the host's memory under the rules of a GPU.

Most of what fails first on a GPU is not arithmetic: a tensor left on the CPU, a host that waits in an inner loop,
memory that is not given back, a buffer read before its copy is done. All of it can be seen without a GPU:

- operations take tensors of one device, single numbers and indices excepted;
- each wait of the host is counted, with the line that waits (:mod:`.waits`);
- memory is accounted as CUDA's caching allocator does (:mod:`.memory`);
- streams run side by side: what one reads of another without waiting is an error (:mod:`.streams`).

It makes PyTorch's spare device key (``PrivateUse1``) a device called ``sim``, for the whole process and for good:
use it in processes of their own. Kernels, speed and NCCL are CUDA's affair and are not simulated.

>>> from nemorl_testing import simulated_device
>>> device = simulated_device.install()
>>> with simulated_device.waits.counted() as lines:
...     torch.ones(3, device=device).sum().item()
"""

from nemorl_testing.simulated_device import memory, streams, waits
from nemorl_testing.simulated_device.installation import DEVICE, install

__all__ = ["DEVICE", "install", "memory", "streams", "waits"]
