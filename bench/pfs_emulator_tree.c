#include "pfs_emulator_tree.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct node {
	struct node *next; /* in its bucket */
	struct node *parent; /* a reference */
	char *name;
	uint64_t ino;
	dev_t dev;
	uint64_t lookups;
	uint64_t references; /* the kernel's (while there are lookups), and its children's */
	pid_t thread; /* that looked it up last */
};

#define BUCKETS (1 << 20)

static pthread_mutex_t tree = PTHREAD_MUTEX_INITIALIZER; /* guards all nodes */
static struct node **buckets;
static struct node root = {.lookups = 1, .references = 1};

int tree_begin(void)
{
	buckets = calloc(BUCKETS, sizeof *buckets);
	return buckets ? 0 : -1;
}

static struct node **bucket_of(uint64_t ino)
{
	return &buckets[(ino * 0x9e3779b97f4a7c15) >> 44];
}

static struct node *node_of(uint64_t number)
{
	return number == TREE_ROOT ? &root : (struct node *)(uintptr_t)number;
}

static void drop(struct node *node)
{
	while (node && --node->references == 0) {
		struct node **link = bucket_of(node->ino);
		while (*link != node)
			link = &(*link)->next;
		*link = node->next;
		struct node *parent = node->parent;
		free(node->name);
		free(node);
		node = parent;
	}
}

/* Puts a component before `start`; NULL where there is no room left. */
static char *put_before(char *start, const char *path, const char *name)
{
	size_t length = strlen(name);
	if (length + 1 > (size_t)(start - path))
		return NULL;
	if (*start)
		*--start = '/';
	return memcpy(start - length, name, length);
}

int tree_path(uint64_t number, const char *name, char path[static PATH_MAX])
{
	char *start = path + PATH_MAX - 1;
	*start = 0;
	if (name)
		start = put_before(start, path, name);
	pthread_mutex_lock(&tree);
	for (struct node *node = node_of(number); start && node->parent; node = node->parent)
		start = put_before(start, path, node->name);
	pthread_mutex_unlock(&tree);
	if (!start)
		return ENAMETOOLONG;
	if (!*start)
		*--start = '.';
	memmove(path, start, (size_t)(path + PATH_MAX - start));
	return 0;
}

uint64_t tree_look_up(uint64_t parent, const char *name, const struct stat *found)
{
	char *copy = strdup(name);
	if (!copy)
		return 0;
	pthread_mutex_lock(&tree);
	struct node **bucket = bucket_of(found->st_ino);
	struct node *node = *bucket;
	while (node && (node->ino != found->st_ino || node->dev != found->st_dev))
		node = node->next;
	struct node *old = NULL;
	if (!node) {
		node = calloc(1, sizeof *node);
		if (!node) {
			pthread_mutex_unlock(&tree);
			free(copy);
			return 0;
		}
		node->ino = found->st_ino;
		node->dev = found->st_dev;
		node->next = *bucket;
		*bucket = node;
	} else {
		/* It may have been renamed, or have several names: the last one is there. */
		old = node->parent;
		free(node->name);
	}
	node->name = copy;
	node->parent = node_of(parent);
	node->parent->references++;
	if (node->lookups++ == 0)
		node->references++;
	drop(old);
	pthread_mutex_unlock(&tree);
	return (uintptr_t)node;
}

void tree_forget(uint64_t number, uint64_t lookups)
{
	struct node *node = node_of(number);
	pthread_mutex_lock(&tree);
	node->lookups -= lookups;
	if (node->lookups == 0)
		drop(node);
	pthread_mutex_unlock(&tree);
}

void tree_looked_up(uint64_t number, pid_t thread)
{
	pthread_mutex_lock(&tree);
	node_of(number)->thread = thread;
	pthread_mutex_unlock(&tree);
}

pid_t tree_take_thread(uint64_t number)
{
	pthread_mutex_lock(&tree);
	struct node *node = node_of(number);
	pid_t thread = node->thread;
	node->thread = 0;
	pthread_mutex_unlock(&tree);
	return thread;
}
