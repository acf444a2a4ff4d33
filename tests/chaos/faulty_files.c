/* A disk that fails once, at a chosen operation: an LD_PRELOAD library between a program and the C library.
 *
 * Every operation on a path below one folder has a key: its kind and the path relative to the folder, with each run of
 * digits written as '#' and of names drawn at random only their beginning, such as "write metrics.jsonl" or "rename checkpoints/.writing_step_#". The n-th operation of a
 * key is refused with an errno, cut short, or is the last thing that its process does. Python, Rust and C++ all come
 * through here, as long as they call the C library; what strace sees of a run, and this does not, is compared in
 * test_file_faults.py.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum mode { REFUSE = 1, SHORT = 2, KILL = 3, TORN = 4, FULL = 5 };

/* Beginnings of names that are drawn at random: of the safetensors library, and of nemorl.base.files.atomic. */
static const char *RANDOM[] = {".tmp", ".nemorl-"};
static char folder[PATH_MAX], wanted[PATH_MAX + 32];
static size_t folder_length;
static int trace_fd = -1, mode, error_number;
static atomic_int left;      /* operations of the wanted key until the fault; 0: it has happened */
static atomic_int is_full;   /* FULL: from the fault on, nothing more fits */
static atomic_int next_fails; /* SHORT: the write after the short one is refused */

/* Called once, by ctypes, in the process that is to meet the fault. occurrence counts from 1; 0: only trace. */
void faulty_files_arm(const char *path, const char *key, int occurrence, int how, int number, int trace) {
    snprintf(folder, sizeof folder, "%s/", path);
    folder_length = strlen(folder);
    snprintf(wanted, sizeof wanted, "%s", key);
    mode = how, error_number = number, trace_fd = trace;
    is_full = 0;
    next_fails = 0;
    left = occurrence;
}

/* From now on whatever takes space on the disk takes that much longer. */
static atomic_int slowness_us;
void faulty_files_slow(int us) { slowness_us = us; }

/* The clock of the day jumps; the monotonic one, by which waits are measured, does not. */
static atomic_long jump_s;
void faulty_clock_jump(long s) { jump_s += s; }

static void say(const char *what, const char *key) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s%s\n", what, key);
    if (trace_fd >= 0) syscall(SYS_write, trace_fd, line, (size_t)length);
}

/* The path of a descriptor. */
static int path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return 1;
}

/* The key of an operation, if it is one on the folder. */
static int key_of(const char *kind, int dirfd, const char *path, char *key) {
    char full[2 * PATH_MAX] = "";
    if (!folder_length) return 0;
    if (path && path[0] == '/') snprintf(full, sizeof full, "%s", path);
    else if (dirfd == AT_FDCWD) return 0; /* runs are given absolute paths */
    else {
        if (!path_of(dirfd, full)) return 0;
        if (path && path[0]) strcat(strcat(full, "/"), path);
    }
    if (strncmp(full, folder, folder_length)) return 0;
    int length = sprintf(key, "%s ", kind);
    for (const char *from = full + folder_length; *from && length < PATH_MAX; from++) {
        for (int i = 0; i < 2 && from[-1] == '/'; i++) {
            size_t size = strlen(RANDOM[i]);
            if (strncmp(from, RANDOM[i], size)) continue;
            length += sprintf(key + length, "%s*", RANDOM[i]);
            from += strcspn(from, "/");
        }
        if (!*from) break;
        int is_digit = *from >= '0' && *from <= '9';
        if (is_digit && key[length - 1] == '#') continue;
        key[length++] = is_digit ? '#' : *from;
    }
    key[length] = 0;
    return 1;
}

/* What to do with this operation: 0 go on, else a mode. Sets errno where it is to be refused. */
static int fault(const char *kind, int dirfd, const char *path, int takes_space) {
    char key[2 * PATH_MAX + 32];
    int saved = errno;
    if (!folder_length || !key_of(kind, dirfd, path, key)) { errno = saved; return 0; }
    say("", key);
    if (takes_space && slowness_us) usleep(slowness_us);
    if (is_full && takes_space) { errno = ENOSPC; return REFUSE; }
    int is_it = !strcmp(key, wanted) && left > 0 && atomic_fetch_sub(&left, 1) == 1;
    if (!is_it && next_fails && !strcmp(key, wanted)) {
        next_fails = 0;
        errno = error_number;
        return REFUSE;
    }
    if (!is_it) { errno = saved; return 0; }
    say("! ", key);
    if (mode == KILL) syscall(SYS_exit_group, 137);
    if (mode == FULL) {
        is_full = 1;
        if (!takes_space) { errno = saved; return 0; }
    }
    if (mode == SHORT) next_fails = 1;
    errno = error_number;
    return mode == FULL ? REFUSE : mode;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAILED(kind, dirfd, path, space) (fault(kind, dirfd, path, space) != 0)
#define FD_OP(type, name, kind, space, declared, ...) \
    type name declared { \
        REAL(name); \
        if (FAILED(kind, fd, NULL, space)) return -1; \
        return real(__VA_ARGS__); \
    }
#define PATH_OP(name, kind, dirfd, path, space, declared, ...) \
    int name declared { \
        REAL(name); \
        if (FAILED(kind, dirfd, path, space)) return -1; \
        return real(__VA_ARGS__); \
    }

static const char *kind_of_open(int flags) {
    return (flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT) ? "open-read" : "open-write";
}
#define OPEN(name, dirfd, declared, ...) \
    int name declared { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t permissions = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (FAILED(kind_of_open(flags), dirfd, path, flags & O_CREAT)) return -1; \
        return real(__VA_ARGS__, permissions); \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path, flags)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path, flags)
OPEN(openat, dirfd, (int dirfd, const char *path, int flags, ...), dirfd, path, flags)
OPEN(openat64, dirfd, (int dirfd, const char *path, int flags, ...), dirfd, path, flags)
PATH_OP(creat, "open-write", AT_FDCWD, path, 1, (const char *path, mode_t m), path, m)
PATH_OP(creat64, "open-write", AT_FDCWD, path, 1, (const char *path, mode_t m), path, m)
#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(name); \
        if (FAILED(how[0] == 'r' && !strchr(how, '+') ? "open-read" : "open-write", AT_FDCWD, path, how[0] != 'r')) \
            return NULL; \
        return real(path, how); \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* Writes may also be cut: a half of them happens, and then the disk is full, or the process gone. */
#define WRITE(name, declared, half, whole) \
    ssize_t name declared { \
        REAL(name); \
        switch (fault("write", fd, NULL, 1)) { \
            case 0: return real whole; \
            case SHORT: return size > 1 ? real half : -1; \
            case TORN: \
                if (real half < 0) say("! half a write failed: ", wanted); \
                syscall(SYS_exit_group, 137); \
        } \
        return -1; \
    }
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size / 2), (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size / 2, at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
WRITE(writev, (int fd, const struct iovec *data, int size), (fd, data, size / 2), (fd, data, size))
WRITE(pwritev, (int fd, const struct iovec *data, int size, off_t at), (fd, data, size / 2, at), (fd, data, size, at))
WRITE(pwritev64, (int fd, const struct iovec *data, int size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
WRITE(sendfile, (int fd, int in, off_t *at, size_t size), (fd, in, at, size / 2), (fd, in, at, size))
WRITE(sendfile64, (int fd, int in, off64_t *at, size_t size), (fd, in, at, size / 2), (fd, in, at, size))
ssize_t copy_file_range(int in, off64_t *at_in, int fd, off64_t *at, size_t size, unsigned flags) {
    REAL(copy_file_range);
    if (FAILED("write", fd, NULL, 1)) return -1;
    return real(in, at_in, fd, at, size, flags);
}

FD_OP(ssize_t, read, "read", 0, (int fd, void *data, size_t size), fd, data, size)
FD_OP(ssize_t, pread, "read", 0, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
FD_OP(ssize_t, pread64, "read", 0, (int fd, void *data, size_t size, off64_t at), fd, data, size, at)
FD_OP(ssize_t, readv, "read", 0, (int fd, const struct iovec *data, int size), fd, data, size)
FD_OP(int, fsync, "sync", 1, (int fd), fd)
FD_OP(int, fdatasync, "sync", 1, (int fd), fd)
FD_OP(int, ftruncate, "truncate", 0, (int fd, off_t size), fd, size)
FD_OP(int, ftruncate64, "truncate", 0, (int fd, off64_t size), fd, size)
FD_OP(int, fallocate, "allocate", 1, (int fd, int how, off_t at, off_t size), fd, how, at, size)
FD_OP(int, fallocate64, "allocate", 1, (int fd, int how, off64_t at, off64_t size), fd, how, at, size)
FD_OP(int, flock, "flock", 0, (int fd, int how), fd, how)
FD_OP(int, fchmod, "chmod", 0, (int fd, mode_t m), fd, m)
PATH_OP(chmod, "chmod", AT_FDCWD, path, 0, (const char *path, mode_t m), path, m)
PATH_OP(fchmodat, "chmod", dir, path, 0, (int dir, const char *path, mode_t m, int flags), dir, path, m, flags)
PATH_OP(utimensat, "utime", dir, path, 0, (int dir, const char *path, const struct timespec t[2], int flags), dir, path, t, flags)
PATH_OP(rename, "rename", AT_FDCWD, path, 0, (const char *path, const char *to), path, to)
PATH_OP(renameat, "rename", dir, path, 0, (int dir, const char *path, int todir, const char *to), dir, path, todir, to)
PATH_OP(renameat2, "rename", dir, path, 0, (int dir, const char *path, int todir, const char *to, unsigned f), dir, path, todir, to, f)
PATH_OP(unlink, "unlink", AT_FDCWD, path, 0, (const char *path), path)
PATH_OP(unlinkat, "unlink", dir, path, 0, (int dir, const char *path, int flags), dir, path, flags)
PATH_OP(rmdir, "rmdir", AT_FDCWD, path, 0, (const char *path), path)
PATH_OP(mkdir, "mkdir", AT_FDCWD, path, 1, (const char *path, mode_t m), path, m)
PATH_OP(mkdirat, "mkdir", dir, path, 1, (int dir, const char *path, mode_t m), dir, path, m)
PATH_OP(link, "link", AT_FDCWD, path, 1, (const char *from, const char *path), from, path)
PATH_OP(linkat, "link", todir, path, 1, (int dir, const char *from, int todir, const char *path, int flags), dir, from, todir, path, flags)
PATH_OP(symlink, "link", AT_FDCWD, path, 1, (const char *to, const char *path), to, path)
PATH_OP(symlinkat, "link", dir, path, 1, (const char *to, int dir, const char *path), to, dir, path)

DIR *opendir(const char *path) {
    REAL(opendir);
    return FAILED("list", AT_FDCWD, path, 0) ? NULL : real(path);
}
DIR *fdopendir(int fd) {
    REAL(fdopendir);
    return FAILED("list", fd, NULL, 0) ? NULL : real(fd);
}

/* A file that cannot be closed is closed all the same. */
int close(int fd) {
    REAL(close);
    int failed = fault("close", fd, NULL, 0), number = errno, result = real(fd);
    if (!failed) return result;
    errno = number;
    return -1;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME && !result) now->tv_sec += jump_s;
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (!result) now->tv_sec += jump_s;
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
