"""What the commands' --help shows below their options."""

MOUNT_EXAMPLES = """\
examples:
  monarchfs mount /lustre/imagenet /mnt/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs mount /lustre/imagenet /lustre/imagenet --freshness immutable --prefetch all
  monarchfs mount /lustre/shards ~/shards --prefetch ~/order.txt --log-file ~/monarchfs.log
  monarchfs mount /lustre/corpus /mnt/corpus --tier /scratch=2T --evict sieve --scrub 20M
  monarchfs mount /lustre/imagenet /mnt/imagenet --touch-source 1d
  sudo monarchfs mount /lustre/imagenet /mnt/imagenet --user alice -o allow_other
  monarchfs mount /lustre/imagenet /mnt/imagenet --metrics-port 9464

Sizes are powers of 1024 (500M, 16G, 1.5T) or a share of the file system (80%). Without --tier,
half of the file system of /var/cache/monarchfs (root) or of your cache directory is used.
Every option can also be given as -o OPTION=VALUE, as MONARCHFS_OPTION=VALUE in the environment, or
as OPTION = VALUE in a TOML file: ~/.config/monarchfs.toml, /etc/monarchfs.toml, or --config FILE.
The command line wins over the environment, and that over files."""
UMOUNT_EXAMPLES = """\
examples:
  monarchfs umount /mnt/imagenet
  monarchfs umount /mnt/imagenet --timeout 5

Waits while the mount is in use, then detaches it, then cuts off who still uses it; never takes
longer than the timeout. Nothing mounted there is no error."""
RESTART_EXAMPLES = """\
examples:
  monarchfs restart /mnt/imagenet
  monarchfs restart /mnt/imagenet --timeout 10 --json

Has the program that is installed now serve the mount, under whatever uses it: nobody sees more
than a pause. Also leaves safe mode. Where the new program cannot take over, the old one goes on.
Exit code: 0 once the new one serves."""
STATUS_EXAMPLES = """\
examples:
  monarchfs status
  monarchfs status /mnt/imagenet
  monarchfs status /mnt/imagenet --json
  monarchfs status --watch
  monarchfs status /mnt/imagenet --watch 10 >> imagenet.log

--watch follows the mount (without MOUNTPOINT the only one, or the list of all) on the terminal
until q or Ctrl-C is pressed, also while it is unmounted and mounted again. Where the output is not
a terminal it prints a line each time, and with --json an object. Exit code: 1 if MOUNTPOINT is not
mounted, or nothing answers for it."""
REFRESH_EXAMPLES = """\
examples:
  monarchfs refresh /mnt/imagenet
  monarchfs refresh /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --json

Asks the source again, whatever --freshness says, for all names and attributes below each PATH that
the mount knows; without PATH, for all of them. Takes as long as the source needs."""
PIN_EXAMPLES = """\
examples:
  monarchfs pin /mnt/imagenet val
  monarchfs pin /mnt/imagenet /mnt/imagenet/labels.txt --json

What is pinned, a file or all below a directory, is not evicted. It is copied when it is opened, as
anything else."""
UNPIN_EXAMPLES = """\
examples:
  monarchfs unpin /mnt/imagenet val"""
WARM_EXAMPLES = """\
examples:
  monarchfs warm /mnt/imagenet
  monarchfs warm /mnt/imagenet train/n01440764 /mnt/imagenet/labels.txt --wait
  monarchfs warm /mnt/imagenet --metadata --wait
  monarchfs warm /mnt/imagenet val --check --json

Copies what lies at or below each PATH (without PATH: all of it), after what is opened and before
what --prefetch all finds; with --prefetch none, too. Names and attributes are known afterwards as
well. Returns at once, and the mount goes on with it; with --wait when every file is resident or
will not be. An interrupted --wait ends the waiting, not the copying. Exit code: 1 if something
failed, 0 also where there was no room for all; of --check 0 only if all is resident."""
WHY_EXAMPLES = """\
examples:
  monarchfs why /mnt/imagenet/train/n01440764/n01440764_10026.JPEG
  monarchfs why /mnt/imagenet/train
  monarchfs why ~/data/labels.txt --json

Tells where a file's bytes are and since when, or why they are not on this node: not opened yet, no
room and by how much, a copy that failed and with which error. Of a directory it counts what is
known below. Does not wait for a source that hangs. Exit code: 0 if each PATH is known, 1 if not."""
EVICT_EXAMPLES = """\
examples:
  monarchfs evict /mnt/imagenet
  monarchfs evict /mnt/imagenet train/n01440764

Removes the local copies of what lies at or below each PATH; without PATH, all of them. What is open
or pinned stays."""
FSCK_EXAMPLES = """\
examples:
  monarchfs fsck /var/cache/monarchfs/state/0123456789abcdef
  monarchfs fsck ~/.cache/monarchfs/state/0123456789abcdef --repair
  monarchfs fsck STATE_DIR --checksum --json

Compares the index of a mount that is not mounted with what lies in its tiers. Exit code: 0 if all
is well or was repaired, 1 if not. The source is not needed, and nothing of it is at stake: what is
not there is read from it again."""
COMPLETION_EXAMPLES = """\
examples:
  monarchfs completion bash > /etc/bash_completion.d/monarchfs
  monarchfs completion zsh > /usr/local/share/zsh/site-functions/_monarchfs
  monarchfs completion fish > ~/.config/fish/completions/monarchfs.fish

Prints what makes the shell complete commands, options, paths and mount points. For one shell only:
eval "$(monarchfs completion bash)" in ~/.bashrc."""
DOCTOR_EXAMPLES = """\
examples:
  monarchfs doctor
  monarchfs doctor /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs doctor /lustre/imagenet --config cluster.toml --json
  sudo monarchfs doctor /lustre/imagenet --user alice

Takes the options of mount. Exit code: 0 if it can be mounted (also with warnings), 1 if not. Rates
are measured by reading some of the source's files, and by writing a file without a name."""
PLAN_EXAMPLES = """\
examples:
  monarchfs plan /lustre/imagenet --tier /dev/shm=16G --tier /scratch=80%
  monarchfs plan /lustre/imagenet --config cluster.toml --epochs 90 --json
  monarchfs plan /lustre/huge --tier /scratch=2T --quick --timeout 60

Takes the options of mount, mounts nothing and copies nothing. Says which files fit where, what the
source has to serve in the first epoch and in later ones, and, at rates measured now, how long that
takes. Exit code: 0, or 1 where the source does not answer."""
INDEX_EXAMPLES = """\
examples:
  monarchfs index export /lustre/imagenet imagenet.index
  sbcast imagenet.index /tmp/imagenet.index
  monarchfs mount /lustre/imagenet /mnt/imagenet --freshness immutable --index /tmp/imagenet.index

Looks at all names and attributes below SOURCE and writes them to FILE, whole or not at all. A mount
with --index FILE knows them without asking the source. FILE is believed by mounts that are
immutable: write it anew when the dataset has changed. The bytes of files are never in it."""
EXPORTER_EXAMPLES = """\
examples:
  monarchfs exporter
  sudo monarchfs exporter --listen 10.1.0.7:9465 --user monarchfs-exporter
  sudo monarchfs exporter --listen '[::]:9465'
  monarchfs exporter --once | grep monarchfs_mount_up

Serves the metrics of all mounts on this node, for Prometheus, with labels that say whose mount it
is, of what and where; as an ordinary user those of your own. A mount that hangs does not hold up
the others. Stays in the foreground until it is ended."""
HELP_EXAMPLES = """\
examples:
  monarchfs help
  monarchfs help mount"""
VERSION_EXAMPLES = """\
examples:
  monarchfs version"""
