"""The system calls that a program may make: name, number on x86_64, number on aarch64 (``-``: does not exist there).

What an interpreter, numpy, threads and child processes need, and no more. Left out on purpose, among others: what holds
memory outside the address space (``shmget``, ``msgget``, ``memfd_create``, ``mq_open``), ``socket``, ``ptrace`` and its
relatives, ``io_uring_setup``, ``bpf``, ``perf_event_open``, keys, ``userfaultfd``, namespaces, mounts and modules. The
kernel's tables: ``arch/x86/entry/syscalls/syscall_64.tbl``, ``include/uapi/asm-generic/unistd.h``.
"""

from __future__ import annotations

_TABLE = """
# files
access 21 -; chdir 80 49; chmod 90 -; chown 92 -; close 3 57; close_range 436 436; copy_file_range 326 285;
creat 85 -; dup 32 23; dup2 33 -; dup3 292 24; faccessat 269 48; faccessat2 439 439; fadvise64 221 223;
fallocate 285 47; fchdir 81 50; fchmod 91 52; fchmodat 268 53; fchown 93 55; fchownat 260 54; fdatasync 75 83;
fgetxattr 193 10; flistxattr 196 13; flock 73 32; fstat 5 80; fstatfs 138 44; fsync 74 82; ftruncate 77 46;
futimesat 261 -; getcwd 79 17; getdents 78 -; getdents64 217 61; getxattr 191 8; lchown 94 -; lgetxattr 192 9;
link 86 -; linkat 265 37; listxattr 194 11; llistxattr 195 12; lseek 8 62; lstat 6 -; mkdir 83 -; mkdirat 258 34;
newfstatat 262 79; open 2 -; openat 257 56; pipe 22 -; pipe2 293 59; pread64 17 67; preadv 295 69; preadv2 327 286;
pwrite64 18 68; pwritev 296 70; pwritev2 328 287; read 0 63; readlink 89 -; readlinkat 267 78; readv 19 65;
rename 82 -; renameat 264 38; renameat2 316 276; rmdir 84 -; sendfile 40 71; stat 4 -; statfs 137 43; statx 332 291;
symlink 88 -; symlinkat 266 36; sync_file_range 277 84; truncate 76 45; umask 95 166; unlink 87 -; unlinkat 263 35;
utime 132 -; utimensat 280 88; utimes 235 -; write 1 64; writev 20 66
# waiting
epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_pwait 281 22; epoll_pwait2 441 441;
epoll_wait 232 -; eventfd 284 -; eventfd2 290 19; poll 7 -; ppoll 271 73; pselect6 270 72; select 23 -;
timerfd_create 283 85; timerfd_gettime 287 87; timerfd_settime 286 86
# memory
brk 12 214; madvise 28 233; membarrier 324 283; mincore 27 232; mmap 9 222; mprotect 10 226; mremap 25 216;
msync 26 227; munmap 11 215
# processes
arch_prctl 158 -; capget 125 90; execve 59 221; exit 60 93; exit_group 231 94; fork 57 -; futex 202 98;
get_robust_list 274 100; getcpu 309 168; getegid 108 177; geteuid 107 175; getgid 104 176; getgroups 115 158;
getpgid 121 155; getpgrp 111 -; getpid 39 172; getppid 110 173; getpriority 140 141; getresgid 120 150;
getresuid 118 148; getrlimit 97 163; getrusage 98 165; getsid 124 156; gettid 186 178; getuid 102 174;
pidfd_open 434 434; prlimit64 302 261; restart_syscall 219 128; rseq 334 293; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
sched_setaffinity 203 122; sched_yield 24 124; set_robust_list 273 99; set_tid_address 218 96; setpgid 109 154;
setpriority 141 140; setrlimit 160 164; setsid 112 157; sysinfo 99 179; uname 63 160; vfork 58 -; wait4 61 260;
waitid 247 95
# signals
alarm 37 -; pause 34 -; rt_sigaction 13 134; rt_sigpending 127 136; rt_sigprocmask 14 135; rt_sigreturn 15 139;
rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sigaltstack 131 132
# time
clock_getres 229 114; clock_gettime 228 113; clock_nanosleep 230 115; getitimer 36 102; getrandom 318 278;
gettimeofday 96 169; nanosleep 35 101; setitimer 38 103; time 201 -; times 100 153
# pairs of sockets
getpeername 52 205; getsockname 51 204; getsockopt 55 209; recvfrom 45 207; recvmsg 47 212; sendmsg 46 211;
sendto 44 206; shutdown 48 210
# judged by argument
clone 56 220; fcntl 72 25; ioctl 16 29; kill 62 129; prctl 157 167; socketpair 53 199; tgkill 234 131; tkill 200 130
"""
_CONNECTING = "socket 41 198; connect 42 203; setsockopt 54 208"


def numbers(column: int, *, connects: bool = False) -> dict[str, int]:
    """Name -> number. ``column``: 1 for x86_64, 2 for aarch64. ``connects``: with what reaches a server."""
    table = f"{_TABLE}{_CONNECTING}" if connects else _TABLE
    lines = [line for line in table.splitlines() if not line.startswith("#")]
    entries = [entry.split() for line in lines for entry in line.split(";") if entry.strip()]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
