/* A file system that grants every lock, as some network file systems do: with LD_PRELOAD. */
int flock(int fd, int operation) {
    (void)fd;
    (void)operation;
    return 0;
}
