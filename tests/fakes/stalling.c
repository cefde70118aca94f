/* A disk that stalls, for one process: with LD_PRELOAD, every call on a path below STALLING_FOLDER, and on what was
 * opened there, waits for as long as the file STALLING_FLAG exists. The first call that waits makes STALLING_FLAG.met.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FDS 65536
static char below[FDS];

static int exists(const char *path) { return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0; }

static void wait_while_stalled(void) {
    const char *flag = getenv("STALLING_FLAG");
    struct timespec step = {0, 5000000};
    char met[4096];
    if (!flag || !exists(flag)) return;
    if (strlen(flag) < sizeof met - 5) {
        strcat(strcpy(met, flag), ".met");
        int fd = syscall(SYS_openat, AT_FDCWD, met, O_WRONLY | O_CREAT, 0600);
        if (fd >= 0) syscall(SYS_close, fd);
    }
    while (exists(flag)) nanosleep(&step, 0);
}

static int is_below(const char *path) {
    const char *folder = getenv("STALLING_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static void on_path(const char *path) { if (is_below(path)) wait_while_stalled(); }
static void on_fd(int fd) { if (fd >= 0 && fd < FDS && below[fd]) wait_while_stalled(); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < FDS) below[fd] = is_below(path);
    return fd;
}

#define MODE mode_t mode = 0; va_list rest; va_start(rest, flags); \
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest); on_path(path)

int open(const char *path, int flags, ...) { MODE; REAL(open); return opened(real(path, flags, mode), path); }
int open64(const char *path, int flags, ...) { MODE; REAL(open64); return opened(real(path, flags, mode), path); }
int openat(int at, const char *path, int flags, ...) {
    MODE; REAL(openat); return opened(real(at, path, flags, mode), path);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE; REAL(openat64); return opened(real(at, path, flags, mode), path);
}
int close(int fd) { REAL(close); if (fd >= 0 && fd < FDS) below[fd] = 0; return real(fd); }

#define ON_PATH(name, kind) int name(const char *path, kind x) { on_path(path); REAL(name); return real(path, x); }
ON_PATH(stat, struct stat *)
ON_PATH(lstat, struct stat *)
ON_PATH(stat64, struct stat64 *)
ON_PATH(lstat64, struct stat64 *)
ON_PATH(access, int)
DIR *opendir(const char *path) { on_path(path); REAL(opendir); return real(path); }
int fstatat(int at, const char *path, struct stat *found, int flags) {
    on_path(path); REAL(fstatat); return real(at, path, found, flags);
}
int fstatat64(int at, const char *path, struct stat64 *found, int flags) {
    on_path(path); REAL(fstatat64); return real(at, path, found, flags);
}

#define ON_FD(name, ...) on_fd(fd); REAL(name); return real(fd, ##__VA_ARGS__)
ssize_t read(int fd, void *data, size_t count) { ON_FD(read, data, count); }
ssize_t write(int fd, const void *data, size_t count) { ON_FD(write, data, count); }
ssize_t pread(int fd, void *data, size_t count, off_t at) { ON_FD(pread, data, count, at); }
ssize_t pread64(int fd, void *data, size_t count, off64_t at) { ON_FD(pread64, data, count, at); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { ON_FD(pwrite, data, count, at); }
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) { ON_FD(pwrite64, data, count, at); }
int fsync(int fd) { ON_FD(fsync); }
int fdatasync(int fd) { ON_FD(fdatasync); }
