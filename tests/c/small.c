/* A small file of the source that changes between the parts in which it is read. Argument: a directory. */
#include "../../monarchfs/core/_small_file.h"

#include "check.h"

#define SIZE 5000

static const char *change;
static int written;
static struct stat before;

static void carry_out(void)
{
	const struct timespec times[2] = {before.st_atim, before.st_mtim};
	const char *what = change;
	change = "nothing";
	if (!strcmp(what, "nothing"))
		return;
	if (!strcmp(what, "longer") || !strcmp(what, "shorter"))
		CHECK(ftruncate(written, !strcmp(what, "longer") ? SIZE + 1 : SIZE / 4) == 0);
	else
		CHECK(pwrite(written, "other", 5, SIZE - 5) == 5);
	if (!strcmp(what, "bytes, and the time set back"))
		CHECK(futimens(written, times) == 0);
}

ssize_t __real_pread(int fd, void *to, size_t size, off_t offset);
ssize_t __wrap_pread(int fd, void *to, size_t size, off_t offset)
{
	ssize_t got = __real_pread(fd, to, offset ? size : size / 2, offset);
	carry_out();
	return got;
}

static int read_while(int directory, const char *what)
{
	char data[SIZE], got[SIZE];
	int fd;
	memset(data, 'a', sizeof(data));
	written = openat(directory, "file", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(written >= 0 && pwrite(written, data, SIZE, 0) == SIZE);
	CHECK(futimens(written, (struct timespec[2]){{.tv_sec = 1000}, {.tv_sec = 1000}}) == 0);
	CHECK(fstat(written, &before) == 0);
	const struct miss_version version = {before.st_ino, SIZE, ns_of(before.st_mtim), ns_of(before.st_ctim)};
	usleep(20000); /* so that a change shows in the times */
	change = what;
	CHECK(small_open(directory, "file", before.st_dev, &version, &fd) == 0);
	int result = small_read(fd, before.st_dev, &version, got);
	CHECK(result || !memcmp(data, got, SIZE));
	close(fd);
	close(written);
	return result;
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	int directory = open(arguments[1], O_RDONLY | O_DIRECTORY);
	CHECK(directory >= 0);
	CHECK(read_while(directory, "nothing") == 0);
	CHECK(read_while(directory, "bytes") == MISS_CHANGED);
	CHECK(read_while(directory, "bytes, and the time set back") == MISS_CHANGED);
	CHECK(read_while(directory, "longer") == MISS_CHANGED);
	CHECK(read_while(directory, "shorter") == MISS_CHANGED);
	puts("done");
	return 0;
}
