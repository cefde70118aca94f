/* A file system that refuses, for one process: with LD_PRELOAD, whatever would change something below FAILING_FOLDER
 * fails with the error whose number stands in the file FAILING_FLAG, for as long as that file exists.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FDS 65536
static char below[FDS];

static int fault(void) {
    const char *flag = getenv("FAILING_FLAG");
    char text[16] = {0};
    int fd = flag ? syscall(SYS_openat, AT_FDCWD, flag, O_RDONLY) : -1;
    if (fd < 0) return 0;
    if (syscall(SYS_read, fd, text, sizeof text - 1) < 0) text[0] = 0;
    syscall(SYS_close, fd);
    return atoi(text);
}

static int is_below(const char *path) {
    const char *folder = getenv("FAILING_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int refused(int concerned) {
    int number = concerned ? fault() : 0;
    if (number) errno = number;
    return number;
}

#define ON_FD(fd) ((fd) >= 0 && (fd) < FDS && below[fd])
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; va_list rest; va_start(rest, flags); \
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest); if (refused((flags & O_CREAT) && is_below(path))) return -1

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < FDS) below[fd] = is_below(path);
    return fd;
}

int open(const char *path, int flags, ...) { MODE; REAL(open); return opened(real(path, flags, mode), path); }
int open64(const char *path, int flags, ...) { MODE; REAL(open64); return opened(real(path, flags, mode), path); }
int close(int fd) { REAL(close); if (fd >= 0 && fd < FDS) below[fd] = 0; return real(fd); }

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write); struct stat found;
    int file = ON_FD(fd) && fstat(fd, &found) == 0 && S_ISREG(found.st_mode); /* not a pipe */
    return refused(file) ? -1 : real(fd, data, count);
}
int fsync(int fd) { REAL(fsync); return refused(ON_FD(fd)) ? -1 : real(fd); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return refused(ON_FD(fd)) ? -1 : real(fd, size); }
int rename(const char *from, const char *to) { REAL(rename); return refused(is_below(to)) ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return refused(is_below(path)) ? -1 : real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return refused(is_below(path)) ? -1 : real(path, mode); }
