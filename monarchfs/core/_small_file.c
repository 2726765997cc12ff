/* A small file in the source. See _small_file.h. */
#define _GNU_SOURCE
#include "_small_file.h"

#include "_layout.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LAYOUT "lustre.lov"
#define FEW_BYTES 4096 /* of a layout of some 170 stripes; the kernel clears as much as it is given room */

static int64_t ns_of(struct timespec time)
{
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int small_compare(int fd, dev_t device, const struct miss_version *version)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return errno;
	bool same = S_ISREG(st.st_mode) && st.st_dev == device &&
		    st.st_ino == version->ino && (uint64_t)st.st_size == version->size &&
		    ns_of(st.st_mtim) == version->mtime_ns &&
		    ns_of(st.st_ctim) == version->ctime_ns;
	return same ? 0 : MISS_CHANGED;
}

int small_open(int directory_fd, const char *name, dev_t device, const struct miss_version *version, int *fd)
{
	do
		*fd = openat(directory_fd, name, SMALL_OPEN_FLAGS);
	while (*fd < 0 && errno == EINTR);
	if (*fd < 0) /* some errors mean that something else lies there, or nothing */
		return errno == ENOENT || errno == ELOOP || errno == ENXIO ? MISS_CHANGED : errno;
	return small_compare(*fd, device, version);
}

int small_archived(int fd)
{
	unsigned char few[FEW_BYTES], *many = NULL, *layout = few;
	ssize_t size = fgetxattr(fd, LAYOUT, few, sizeof(few));
	int error = size < 0 ? errno : 0;
	if (error == ERANGE) {
		if (!(layout = many = malloc(XATTR_SIZE_MAX)))
			return ENOMEM;
		size = fgetxattr(fd, LAYOUT, many, XATTR_SIZE_MAX);
		error = size < 0 ? errno : 0;
	}
	if (!error && layout_released(layout, (size_t)size))
		error = MISS_ARCHIVED;
	else if (error == ENODATA || error == EOPNOTSUPP)
		error = 0;
	free(many);
	return error;
}

int small_read(int fd, dev_t device, const struct miss_version *version, char *to)
{
	/* Lustre's reads honour O_NONBLOCK. */
	if (fcntl(fd, F_SETFL, SMALL_OPEN_FLAGS & ~O_NONBLOCK) < 0)
		return errno;
	for (size_t done = 0; done < version->size;) {
		ssize_t got = pread(fd, to + done, version->size - done, (off_t)done);
		if (got > 0)
			done += (size_t)got;
		else if (got == 0)
			return MISS_CHANGED;
		else if (errno != EINTR)
			return errno;
	}
	return small_compare(fd, device, version);
}
