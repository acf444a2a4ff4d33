"""Starting a run somewhere else: on Slurm, on Kubernetes, on machines over SSH, or detached on this one."""

from nemorl_ops.launch.base import Job, Launch, LauncherConfig, Status

__all__ = ["Job", "Launch", "LauncherConfig", "Status"]
