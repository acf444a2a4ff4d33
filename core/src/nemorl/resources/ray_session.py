"""A connection to Ray: an existing cluster by address, or a private one on this machine that ends with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from nemorl.base.files import process_guard
from nemorl.base.files.owned_folders import owned_folder
from nemorl.base.packages.site import site
from nemorl.config.cluster import ClusterConfig
from nemorl.errors import ResourceError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would hide the GPU of an actor that reserves none, and warns that a later version will not.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Environment of Ray's own processes."""
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}
"""Environment of a private cluster: it and its workers talk over this machine's loopback only. Ray has one switch for
that, which is on by default where it supports one node only, and named after those systems."""
SLOW_START = "timed out during startup"
"""In Ray's words on processes of its own that did not come up in time"""
NAMESPACE = "nemorl"
LONGEST_PARENT = 18
"""Characters of the path that a private cluster's folder is made in: Ray's sockets, 89 further down, may have 107."""


class RaySession:
    """Ray, connected. ``close`` ends what this session began, and only that."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """
        Raises:
            ResourceError: there is no cluster at the address, it refuses us, or Ray is connected to another one.
            UsageError: The cluster is beyond this machine, and a certificate or a token is missing.
        """
        import ray

        self._stack = ExitStack()
        if ray.is_initialized():
            _require_same_cluster(cluster.address)
            return
        address = None if cluster.address is None else site().ray_address(cluster.address)
        security = site().ray_variables(cluster.security, address)
        with ExitStack() as undo:
            undo.callback(self.close)
            quiet = {key: value for key, value in QUIET.items() if key not in os.environ}
            # Ray's settings last as long as this session: the next one may have another token, or none.
            self._stack.callback(_reread_environment)
            self._stack.enter_context(environment(security | quiet))
            _reread_environment()
            try:
                self._connect_private() if address is None else self._connect(address)
            except Exception as error:  # Ray raises plain ones too, e.g. of a node that starts too slowly
                is_private = address is None
                where = "a private Ray cluster" if is_private else f"the Ray cluster at {address!r}"
                first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ResourceError(
                    f"cannot connect to {where}: {first_line}",
                    fix="check `ray status` there, and that its token and certificates are those of cluster.security"
                    if not is_private
                    else "run it again when the machine is less busy; else end left-over Ray processes (`ray stop`) "
                    "and check free memory and disk space in /tmp",
                ) from error
            undo.pop_all()

    def close(self) -> None:
        self._stack.close()

    def _connect(self, address: str) -> None:
        import ray

        ray.init(address=address, namespace=NAMESPACE, configure_logging=False, log_to_driver=False)
        self._stack.callback(ray.shutdown)

    def _connect_private(self) -> None:
        """A cluster of this user on this machine, which nobody else can reach and which ends with this process.

        Ray gives its processes 30 s, no more and no less: on a busy machine a second start finds them in memory.
        """
        with ExitStack() as start:
            try:
                self._start_private(start)
            except Exception as error:
                if SLOW_START not in str(error):
                    raise
                start.close()
                self._start_private(start)
            self._stack.push(start.pop_all())

    def _start_private(self, start: ExitStack) -> None:
        import ray
        from ray._private import ray_constants

        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_PARENT else "/tmp"
        folder = owned_folder("nemorl-ray-", parent)  # mode 0700; Ray opens up what is below
        start.callback(process_guard.end, folder)
        command = [sys.executable, "-I", "-S", process_guard.__file__, str(os.getpid()), str(folder)]
        guard = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        start.callback(guard.wait)
        start.callback(guard.terminate)
        variables = {key: value for key, value in LOOPBACK.items() if key not in os.environ}
        with ExitStack() as meanwhile:
            meanwhile.enter_context(environment({**variables, process_guard.MARK: str(folder)}))
            # This process has read the variable already, when it imported Ray.
            meanwhile.callback(setattr, ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
            ray_constants.ENABLE_RAY_CLUSTER = False
            start.callback(ray.shutdown)
            ray.init(
                address="local",
                # Only Linux tells which cores this process may use.
                num_cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
                namespace=NAMESPACE,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=str(folder / "ray"),
            )


def _require_same_cluster(address: str | None) -> None:
    """A process has one connection to Ray; the caller's own is used unless the config names another cluster."""
    import ray

    connected = ray.get_runtime_context().gcs_address
    if address in (None, "auto") or _is_same(site().ray_address(address), connected):
        return
    raise ResourceError(
        f"Ray is already connected to {connected}, and cluster.address asks for {address}",
        fix="call ray.shutdown() first, or leave out cluster.address to use the connection there is",
    )


def _is_same(address: str, connected: str) -> bool:
    """Two ``host:port`` are one place, possibly under different names."""
    (host, _, port), (connected_host, _, connected_port) = address.rpartition(":"), connected.rpartition(":")
    return port == connected_port and bool(_addresses(host) & _addresses(connected_host))


def _addresses(host: str) -> set[str]:
    """The IP addresses of a host; this machine's own and its loopback are one."""
    import ray

    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
    own = {"127.0.0.1", "::1", ray.util.get_node_ip_address()}  # type: ignore[no-untyped-call]
    return found | own if found & own else found


def _reread_environment() -> None:
    """Make Ray see the settings above: it reads them when first imported and has no public way to do it again."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables for the length of the block; afterwards each is as it was."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
