"""A pod's own certificate, before Ray starts in it: ``python -m nemorl_ops.launch.pod_certificate AUTHORITY FOLDER``.

AUTHORITY is a mounted Secret with ``ca.pem`` and ``ca.key``. The key stays out of FOLDER, which the run sees.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from nemorl_ops.launch.ray_access import DAYS

NAME = "pod"
POD_IP, HEAD = "POD_IP", "FQ_RAY_IP"
"""The pod's address, from its manifest, and the name of the head's service, which KubeRay gives each init container."""


def main(authority: Path, folder: Path) -> None:
    """Write ``ca.pem``, ``pod.pem`` and ``pod.key`` into a folder.

    Args:
        authority: With ``ca.pem`` and ``ca.key``.
        folder: For the pod's.
    """
    from nemorl_trust.authority import make

    names = [os.environ[name] for name in (POD_IP, HEAD) if os.environ.get(name)]
    with tempfile.TemporaryDirectory() as work:
        for file in ("ca.pem", "ca.key"):
            shutil.copyfile(authority / file, Path(work, file))
        make(Path(work), [",".join([NAME, *names])], days=DAYS)
        for file in ("ca.pem", f"{NAME}.pem", f"{NAME}.key"):
            shutil.copy(Path(work, file), folder / file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
