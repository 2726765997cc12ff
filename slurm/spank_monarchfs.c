/* sbatch, srun and salloc --monarchfs=PATH[:OPTION=VALUE]...[,PATH...]: asks for datasets.
 *
 * The prolog gets the request as SPANK_MONARCHFS from the job control environment (spank(7)), and
 * `monarchfs job prolog` parses it strictly. This plugin, which runs as the user, only refuses what
 * cannot be passed on. Nothing runs in slurmd or slurmstepd.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(monarchfs, 1);

enum { MOST_BYTES = 16 << 10 };

static char request[MOST_BYTES + 1];

static int on_option(int value, const char *argument, int remote)
{
	(void)value;
	if (remote)
		return 0;
	if (argument == NULL || (argument[0] != '/' && argument[0] != '"' && argument[0] != '\\')) {
		slurm_error("monarchfs: --monarchfs=%s: name a directory by its whole path",
			    argument == NULL ? "" : argument);
		return -1;
	}
	size_t size = strlen(argument);
	if (size > MOST_BYTES) {
		slurm_error("monarchfs: --monarchfs is longer than %d bytes: name fewer datasets",
			    MOST_BYTES);
		return -1;
	}
	for (size_t at = 0; at < size; at++)
		if ((unsigned char)argument[at] < ' ' || argument[at] == 0x7f) {
			slurm_error("monarchfs: --monarchfs holds a character that cannot be printed");
			return -1;
		}
	memcpy(request, argument, size + 1);
	return 0;
}

static struct spank_option option = {
	.name = "monarchfs",
	.arginfo = "PATH[:OPTION=VALUE]...[,PATH...]",
	.usage = "serve datasets from node-local storage; see $MONARCHFS_ROOT in the job",
	.has_arg = 1,
	.val = 0,
	.cb = on_option,
};

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
	(void)argc;
	(void)argv;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
	case S_CTX_REMOTE:
		break;
	default:
		return ESPANK_SUCCESS;
	}
	return spank_option_register(spank, &option);
}

/* After all options: the last one counts, and one that was withdrawn leaves nothing. */
int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
	(void)argc;
	(void)argv;
	if (spank_context() == S_CTX_REMOTE || request[0] == '\0')
		return ESPANK_SUCCESS;
	spank_err_t code = spank_job_control_setenv(spank, "MONARCHFS", request, 1);
	if (code != ESPANK_SUCCESS)
		slurm_error("monarchfs: the request cannot be handed on: %s", spank_strerror(code));
	return code;
}
