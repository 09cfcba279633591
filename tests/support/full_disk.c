/* A disk that is full from the n-th write on, for processes that load this before libc (LD_PRELOAD).

   FULL_DISK names a file of this layout, which all of them share; files below `below` are on the disk. Counted are
   what makes a file, a folder or a name, what writes into one, and what waits for the disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct disk {
    long writes;      /* so many there were */
    long full_at;     /* from this one on they fail; 0: none does */
    long error;       /* the errno */
    char below[1000]; /* with a slash at its end */
};

static struct disk *mapped;
static char mapped_from[PATH_MAX];

static struct disk *disk(void) {
    const char *from = getenv("FULL_DISK");
    if (from == NULL || *from == 0) return NULL;
    if (mapped != NULL && strcmp(from, mapped_from) == 0) return mapped;
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = real_open(from, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    void *found = mmap(NULL, sizeof(struct disk), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return NULL;
    snprintf(mapped_from, sizeof mapped_from, "%s", from);
    return mapped = found;
}

static int fails(struct disk *on) {
    long number = __atomic_add_fetch(&on->writes, 1, __ATOMIC_SEQ_CST);
    if (on->full_at == 0 || number < on->full_at) return 0;
    errno = on->error;
    return 1;
}

static int fails_at(int folder, const char *path) {
    int before = errno;
    char whole[2 * PATH_MAX], link[64];
    struct disk *on = disk();
    if (on == NULL || path == NULL) return 0;
    if (*path == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(folder == AT_FDCWD ? "/proc/self/cwd" : link, whole, PATH_MAX);
        if (length < 0) length = 0;
        snprintf(whole + length, sizeof whole - length, "/%s", path);
    }
    errno = before;
    return strncmp(whole, on->below, strlen(on->below)) == 0 && fails(on);
}

static int fails_in(int file) {
    static char last[PATH_MAX]; /* what is written in a row into one file counts once */
    int before = errno;
    char link[64], whole[PATH_MAX];
    struct disk *on = disk();
    if (on == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, whole, sizeof whole - 1);
    errno = before;
    if (length < 0) return 0;
    whole[length] = 0;
    if (strncmp(whole, on->below, strlen(on->below)) != 0) return 0;
    if (strcmp(whole, last) == 0 && (on->full_at == 0 || on->writes < on->full_at)) return 0;
    snprintf(last, sizeof last, "%s", whole);
    return fails(on);
}

static int makes(int folder, const char *path, int flags) {
    int before = errno;
    int found = (flags & O_CREAT) && faccessat(folder, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    errno = before;
    return found;
}

static int refused(int folder, const char *path, int flags) {
    struct disk *on = disk();
    int writing = (flags & O_ACCMODE) != O_RDONLY;
    if (on == NULL || !(makes(folder, path, flags) || (writing && on->error == EROFS))) return 0;
    return fails_at(folder, path);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = dlsym(RTLD_NEXT, #name)
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, int); \
        va_end(more); \
        REAL(name); \
        return refused(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, int); \
        va_end(more); \
        REAL(name); \
        return refused(folder, path, flags) ? -1 : real(folder, path, flags, mode); \
    }
#define WRAP(type, name, declared, given, failing) \
    type name declared { \
        REAL(name); \
        return (failing) ? -1 : real given; \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
WRAP(ssize_t, write, (int file, const void *bytes, size_t size), (file, bytes, size), fails_in(file))
WRAP(ssize_t, pwrite, (int file, const void *bytes, size_t size, off_t at), (file, bytes, size, at), fails_in(file))
WRAP(ssize_t, pwrite64, (int file, const void *bytes, size_t size, off64_t at), (file, bytes, size, at), fails_in(file))
WRAP(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count), fails_in(file))
WRAP(ssize_t, sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), fails_in(file))
WRAP(ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), fails_in(file))
WRAP(ssize_t, copy_file_range, (int from, off64_t *begin, int file, off64_t *at, size_t size, unsigned flags),
     (from, begin, file, at, size, flags), fails_in(file))
WRAP(int, fsync, (int file), (file), fails_in(file))
WRAP(int, fdatasync, (int file), (file), fails_in(file))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), fails_at(AT_FDCWD, path))
WRAP(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), fails_at(folder, path))
WRAP(int, symlink, (const char *target, const char *path), (target, path), fails_at(AT_FDCWD, path))
WRAP(int, link, (const char *old, const char *path), (old, path), fails_at(AT_FDCWD, path))
WRAP(int, linkat, (int of, const char *old, int in, const char *path, int flags), (of, old, in, path, flags),
     fails_at(in, path))
WRAP(int, rename, (const char *old, const char *path), (old, path), fails_at(AT_FDCWD, path))
WRAP(int, renameat, (int of, const char *old, int in, const char *path), (of, old, in, path), fails_at(in, path))
