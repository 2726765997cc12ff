"""The bugs. They were chosen by what is promised (docs/SEMANTICS.md), before it was known which of
them are found. None is a matter of taste: each breaks what a user would notice."""

from __future__ import annotations

from typing import NamedTuple

SANITIZED = "tests/c/test_sanitized.py"
RELAY = "tests/unit/test_relay.py::test_the_threads"


class Mutant(NamedTuple):
    """``old``, which ``file`` has once, becomes ``new``. ``breaks`` says what goes wrong then;
    ``tests``, arguments for pytest, are those that should find it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


MUTANTS = (
    # -- Python: how a copy comes to be and goes
    Mutant(
        "two-versions-in-one-read",
        "monarchfs/prefetch/fill.py",
        "if self._changes != changes:",
        "if self._changes < changes:",
        "a read that meets a change returns bytes of both versions",
        ("tests/layers/test_fresh.py::test_a_read_under_way_is_answered_from_one_version",),
    ),
    Mutant(
        "digests-of-units-are-lost",
        "monarchfs/prefetch/fetching.py",
        "                self.reservation.put_digests(start, unit.digests(start, end))\n",
        "",
        "large replicas have a wrong checksum: the first check throws them away",
        (
            "tests/layers/test_partial.py::test_a_copy_that_the_end_of_the_mount_interrupts_is_resumed",
        ),
    ),
    Mutant(
        "scan-goes-before-readers",
        "monarchfs/prefetch/queue.py",
        "if known is not None and known <= priority:",
        "if known is not None:",
        "a file that was scanned and is opened now keeps its place at the end of the queue",
        ("tests/unit/test_chunks.py", "tests/layers/test_copier.py"),
    ),
    Mutant(
        "corrupt-replica-moves",
        "monarchfs/cache/moves.py",
        "if combine(digests) != record.checksum:",
        "if not digests:",
        "a corrupt large replica gets a new place instead of being dropped",
        ("tests/layers/test_eviction.py::test_a_corrupt_replica_does_not_move",),
    ),
    Mutant(
        "pages-of-a-corrupt-replica-stay",
        "monarchfs/cache/moves.py",
        "        self._forget_pages(ino)\n",
        "",
        "the kernel goes on serving pages of a replica that is known to be corrupt",
        (
            "tests/layers/test_eviction.py::test_a_replica_that_was_found_corrupt_is_read_from_the_source",
            "tests/layers/test_eviction.py::test_a_corrupt_replica_does_not_move",
        ),
    ),
    Mutant(
        "move-without-journal",
        "monarchfs/cache/moves.py",
        "self.index.begin_copy(ino, to.id, record.name)",
        "pass",
        "a crash during a move leaves a file that nobody counts",
        ("tests/layers/test_eviction.py::test_a_move_waits_until_the_replica_is_closed",),
    ),
    Mutant(
        "durable-without-sync",
        "monarchfs/cache/durable.py",
        "                await run_sync(tier.sync, abandon_on_cancel=True)\n",
        "                pass\n",
        "after a power cut replicas count whose data never reached the disk",
        ("tests/layers/test_partial.py", "tests/layers/test_reconciliation.py"),
    ),
    Mutant(
        "stored-during-a-sync-is-durable",
        "monarchfs/cache/durable.py",
        "[ino for ino in inos if changed is None or not changed.get(ino)]",
        "list(inos)",
        "a replica that was replaced while the disk was synced counts after a power cut",
        ("tests/layers/test_partial.py::test_a_replica_made_during_a_sync_is_not_part_of_it",),
    ),
    Mutant(
        "punched-before-the-index-is-synced",
        "monarchfs/cache/segments.py",
        "if any(replica.durable for replica, _ in waiting):",
        "if all(replica.durable for replica, _ in waiting):",
        "a power cut brings back the record of a replica whose bytes are zeros by then",
        (
            "tests/layers/test_segments.py::test_what_a_power_cut_could_bring_back_is_not_punched_before",
            "tests/layers/test_segments.py::test_one_that_a_power_cut_could_bring_back_is_enough",
        ),
    ),
    Mutant(
        "punched-under-a-reader",
        "monarchfs/cache/segments.py",
        "            while self._readers.reading(ino):  # noqa: ASYNC110",
        "            if self._readers.reading(ino):",
        "a thread that reads a replica gets zeros, because its range is punched meanwhile",
        (
            "tests/layers/test_segments.py::test_what_threads_are_reading_stays_until_they_have_read_it",
        ),
    ),
    Mutant(
        "room-of-an-open-file-is-given-away",
        "monarchfs/cache/removals.py",
        "                elif opened.uses:\n"
        "                    opened.then.append(partial(self._files_removed, ino, record))\n",
        "",
        "a tier holds more than its capacity while a replica that was removed is open",
        (
            "tests/layers/test_eviction.py::test_a_removed_file_counts_until_who_has_it_open_closes_it",
        ),
    ),
    # -- Python: room
    Mutant(
        "file-systems-last-part-is-eaten",
        "monarchfs/placement/ledger.py",
        "return min(in_capacity, in_file_system) - self.reserved_bytes",
        "return min(in_capacity - self.reserved_bytes, in_file_system)",
        "copies under way eat what the tier's file system keeps for others",
        ("tests/placement/test_placing.py",),
    ),
    Mutant(
        "open-and-pinned-replicas-go",
        "monarchfs/placement/victims.py",
        "if self._busy(ino, tier) or not self._lookup.evictable(ino):",
        "if self._busy(ino, tier):",
        "replicas that are open or pinned are evicted",
        (
            "tests/placement/test_evicting.py",
            "tests/layers/test_eviction.py::test_open_and_pinned_replicas_stay",
        ),
    ),
    # -- Python: the index
    Mutant(
        "pin-is-lost-with-a-new-version",
        "monarchfs/index/tree.py",
        "                self._move_pin(txn, changed, number)\n",
        "                pass\n",
        "a pinned file that changes in the source is not pinned any more",
        ("tests/index/test_outdated.py",),
    ),
    Mutant(
        "inode-number-is-given-out-again",
        "monarchfs/index/outdated.py",
        "            if txn.get(source_key, None, self._db.by_source) == key:\n"
        "                txn.delete(source_key, db=self._db.by_source)\n"
        "            txn.delete(key, db=self._db.stale)\n",
        "            txn.delete(key, db=self._db.stale)\n",
        "a number that the kernel may know stands for another file",
        ("tests/index/test_outdated.py",),
    ),
    Mutant(
        "mark-of-the-index-is-not-synced",
        "monarchfs/index/recovery.py",
        "        os.fsync(file.fileno())\n",
        "",
        "after a power cut a torn index may pass for one that was closed cleanly",
        ("tests/index/test_opening.py",),
    ),
    Mutant(
        "what-a-reboot-took-counts",
        "monarchfs/index/records.py",
        "return value[0] == 1 or value[1:_BOOT_END] == boot",
        "return value[0] == 1 or bool(boot)",
        "after a reboot replicas count that were never synced",
        ("tests/index/test_replicas.py", "tests/layers/test_reconciliation.py"),
    ),
    # -- Python: freshness
    Mutant(
        "change-within-a-tick-is-missed",
        "monarchfs/fs/freshness.py",
        "return self.past_racy_window(ctime_ns, seen_ns) or not",
        "return self.past_racy_window(ctime_ns, now_ns) or not",
        "a file or directory that changes twice within a tick shows its first change for ever",
        ("tests/layers/test_fresh.py",),
    ),
    Mutant(
        "kernel-keeps-names-for-twice-the-ttl",
        "monarchfs/fs/freshness.py",
        "left_ns = min(checked_ns + self.ttl_ns - now_ns, self.ttl_ns) - KERNEL_LATE_NS",
        "left_ns = self.ttl_ns - KERNEL_LATE_NS",
        "a name that is nearly too old is kept by the kernel for another ttl",
        (
            "tests/layers/test_tree.py",
            "tests/unit/test_names.py",
        ),
    ),
    Mutant(
        "open-of-a-changed-file-fails",
        "monarchfs/fs/files.py",
        'raise OSError(errno.ESTALE, "the source has another version") from exc',
        'raise OSError(errno.EIO, "the source has another version") from exc',
        "open(2) of a file that has just changed fails, because the kernel does not ask again",
        (
            "tests/layers/test_changes.py",
            "tests/layers/test_opening.py::test_a_file_that_was_replaced_is_stale",
        ),
    ),
    Mutant(
        "pages-of-an-old-version-stay",
        "monarchfs/fs/invalidation.py",
        "attributes_only=resident)",
        "attributes_only=True)",
        "readers of an open file that has changed get a mixture of old pages and new bytes",
        (
            "tests/layers/test_invalidation.py",
            "tests/layers/test_fresh.py::test_what_is_open_and_partly_local_shows_the_source_as_it_is",
        ),
    ),
    Mutant(
        "threads-open-an-outdated-file",
        "monarchfs/fs/invalidation.py",
        "        self._cache.readers.expire(ino)\n",
        "",
        "the C part goes on opening a version that the source is known not to have any more",
        ("tests/layers/test_invalidation.py",),
    ),
    Mutant(
        "open-shares-an-earlier-answer",
        "monarchfs/fs/stale_on_timeout.py",
        "if self._freshness.mode is FreshnessMode.OPEN and key in self._under_way:",
        "if self._freshness.mode is FreshnessMode.TTL and key in self._under_way:",
        "with freshness open a look-up shows what the source had before a change",
        ("tests/layers/test_fresh.py::test_an_open_is_not_answered_by_what_was_asked_before",),
    ),
    # -- Python: calls into the source
    Mutant(
        "cancelled-open-keeps-its-descriptor",
        "monarchfs/source/lanes.py",
        "        if abandoned and self.dispose is not None:\n            self.dispose(result)\n",
        "",
        "each reader that is killed while it opens a file costs a descriptor",
        ("tests/source/test_lanes.py",),
    ),
    Mutant(
        "hanging-calls-lend-no-slot",
        "monarchfs/source/lanes.py",
        "            lane.limiter.total_tokens = lane.slots + lent\n",
        "            lane.limiter.total_tokens = lane.slots\n",
        "some files that hang stop all reads of the source",
        (
            "tests/source/test_lanes.py",
            "tests/layers/test_copier.py::test_a_call_that_hangs_lends_its_slot",
        ),
    ),
    # -- Python: processes
    Mutant(
        "kills-lead-to-safe-mode",
        "monarchfs/supervisor/restart_policy.py",
        "        if life.killed:\n",
        "        if life.killed and not useless:\n",
        "a user who kills workers, or a lack of memory, ends all caching",
        ("tests/unit/test_restart_policy.py",),
    ),
    Mutant(
        "anybodys-file-is-passed-through",
        "monarchfs/supervisor/backing.py",
        "if st.st_uid != uid:",
        "if st.st_uid < 0:",
        "a compromised worker has the kernel read files of others",
        ("tests/mount/test_backing.py::test_nothing_else_is",),
    ),
    Mutant(
        "lock-on-a-removed-file",
        "monarchfs/supervisor/lock.py",
        "            if _still_named(lock, state_dir):\n                return lock\n",
        "            return lock\n",
        "two mounts have one state directory, where one gave up as the other began",
        ("tests/unit/test_lock.py",),
    ),
    Mutant(
        "nothing-is-synced-at-the-end",
        "monarchfs/worker/worker.py",
        "                await self.cache.sync()\n",
        "                pass\n",
        "what was copied in the last seconds of a mount does not survive a reboot",
        ("tests/mount/test_scenarios.py::test_it_is_as_recorded[remount]",),
    ),
    Mutant(
        "interrupted-copies-are-left",
        "monarchfs/worker/worker.py",
        "        self._interrupted = self.index.under_way()\n",
        "",
        "what was being copied when a worker died stays remote",
        ("tests/mount/test_restart.py::test_case",),
    ),
    # -- C: bytes of the source
    Mutant(
        "unit-of-a-changed-file",
        "monarchfs/engine/_unit.c",
        "same_time(&st.st_mtim, &version->mtime) &&\n"
        "\t\t    same_time(&st.st_ctim, &version->ctime);",
        "same_time(&st.st_mtim, &version->mtime);",
        "a copy has bytes of two versions, if a program sets the mtime back",
        (
            "tests/layers/test_source_faults.py::test_a_file_that_changes_while_it_is_copied",
            f"{SANITIZED}::test_units_while_their_files_change",
        ),
    ),
    Mutant(
        "part-with-a-failed-write",
        "monarchfs/engine/_unit.c",
        "\t\tif (put <= 0)\n\t\t\treturn put < 0 ? errno : EIO;\n",
        "\t\tif (put <= 0)\n\t\t\treturn 0;\n",
        "a full disk leaves zeros in a replica that is served",
        (
            "tests/store/test_room.py::test_a_unit_that_finds_no_room_says_so",
            f"{SANITIZED}::test_units_while_their_files_change",
        ),
    ),
    Mutant(
        "small-file-that-changed-meanwhile",
        "monarchfs/engine/_small_file.c",
        "return compare(fd, device, version);",
        "return 0;",
        "a small file that changes while it is read is returned with bytes of two versions",
        (f"{SANITIZED}::test_a_small_file_that_changes_while_it_is_read",),
    ),
    Mutant(
        "forgotten-while-it-is-answered",
        "monarchfs/engine/_miss_entries.c",
        "while (*(place = miss_place_of(inos[n])) && (*place)->answering)\n"
        "\t\t\tpthread_cond_wait(&no_answers, &source_lock);\n",
        "place = miss_place_of(inos[n]);\n",
        "after a refresh has ended, an open is still answered with the old version",
        (f"{SANITIZED}::test_misses_while_files_change",),
    ),
    Mutant(
        "opens-from-memory-for-ever",
        "monarchfs/engine/_misses.c",
        "is_open_for_reading(in + 1) && resident_fresh(entry->fresh_until_ns);",
        "is_open_for_reading(in + 1);",
        "a small file in memory is opened without asking the source, though the ttl is over",
        (f"{SANITIZED}::test_misses_while_files_change", "tests/mount/test_misses.py"),
    ),
    Mutant(
        "read-of-another-version",
        "monarchfs/fuse/_nonresident.c",
        "(!version_of(job->file->source_fd, &now) || !same(&now, &job->file->version)))",
        "!version_of(job->file->source_fd, &now))",
        "a read of a file that is not resident returns bytes of another version",
        (f"{RELAY}[from_source]", f"{SANITIZED}::test_all_threads_at_once"),
    ),
    Mutant(
        "read-that-waits-for-nobody",
        "monarchfs/fuse/_nonresident.c",
        "return !some_are(job, CHUNK_MISSING) &&\n"
        "\t       (some_are(job, CHUNK_CLAIMED) || some_are(job, CHUNK_ARRIVED));",
        "return some_are(job, CHUNK_CLAIMED) || some_are(job, CHUNK_ARRIVED);",
        "a read of chunks of which one is not being fetched hangs",
        (
            f"{RELAY}[filling]",
            "tests/mount/test_readthrough.py::test_case",
        ),
    ),
    Mutant(
        "part-file-stays-open",
        "monarchfs/fuse/_nonresident.c",
        "\tif (file->part_fd >= 0)\n\t\tclose(file->part_fd);\n\tfree(file->states);",
        "\tfree(file->states);",
        "a copy that was read while it went keeps its blocks and a descriptor",
        (f"{RELAY}[filling]", f"{SANITIZED}::test_all_threads_at_once"),
    ),
    Mutant(
        "archived-files-are-recalled",
        "monarchfs/engine/_layout.c",
        "(number(value) == V1 || number(value) == V3)",
        "number(value) == V1",
        "copying brings files back from tape that nobody opened",
        ("tests/source/test_layout.py",),
    ),
    # -- C: names
    Mutant(
        "name-is-forgotten-under-a-shared-lock",
        "monarchfs/engine/_names.c",
        "void names_forget_ino(uint64_t ino)\n{\n\tpthread_rwlock_wrlock(&lock);",
        "void names_forget_ino(uint64_t ino)\n{\n\tpthread_rwlock_rdlock(&lock);",
        "a look-up shows a name that had been forgotten before, or crashes",
        (f"{SANITIZED}::test_names_while_they_change",),
    ),
    Mutant(
        "name-after-its-time",
        "monarchfs/engine/_names.c",
        "if (left_ns - 1 >= NAMES_FOREVER_NS) {",
        "if (!until_ns) {",
        "names are shown for longer than the freshness promise",
        (f"{RELAY}[names]", "tests/unit/test_names.py"),
    ),
    # -- C: resident files
    Mutant(
        "replica-goes-under-a-reading-thread",
        "monarchfs/fuse/_resident.c",
        "bool busy = use && (use->item.count || use->readers || use->former);",
        "bool busy = use && (use->item.count || use->former);",
        "a replica is evicted while a thread reads it",
        (f"{SANITIZED}::test_the_table_of_resident_files", RELAY),
    ),
    Mutant(
        "old-place-in-a-segment",
        "monarchfs/fuse/_resident.c",
        "return one->segment ? one->offset == other->offset :",
        "return one->segment ? one->segment == other->segment :",
        "a replica that was written anew into the same segment is read at its old place",
        (f"{SANITIZED}::test_the_table_of_resident_files", RELAY),
    ),
    Mutant(
        "another-users-file-in-a-tier",
        "monarchfs/fuse/_tier_files.c",
        "S_ISREG(st.st_mode) && st.st_uid == owner;",
        "S_ISREG(st.st_mode);",
        "somebody who can write to a tier's directory decides what readers get",
        (f"{RELAY}[trouble]",),
    ),
    Mutant(
        "closed-under-a-reader",
        "monarchfs/fuse/_tier_files.c",
        "\tif (!files[place].reads)\n\t\treturn release_place(place);",
        "\tif (files[place].reads <= 1)\n\t\treturn release_place(place);",
        "a read fails, or returns bytes of another file that got the descriptor's number",
        (f"{SANITIZED}::test_all_threads_at_once", RELAY),
    ),
    # -- C: what outlives a worker
    Mutant(
        "handle-number-is-given-out-twice",
        "monarchfs/fuse/_table.c",
        "slot->generation == UINT32_MAX ? 1 : slot->generation + 1;",
        "slot->generation ? slot->generation : 1;",
        "a late release ends the handle of another open",
        ("tests/unit/test_handle_table.py", f"{SANITIZED}::test_a_kill_at_any_instruction"),
    ),
    Mutant(
        "half-a-request-in-the-journal",
        "monarchfs/fuse/_journal.c",
        "\t\tmemcpy(place->request, request, length);\n"
        "\t\t__atomic_store_n(&place->length, length, __ATOMIC_RELEASE);\n",
        "\t\t__atomic_store_n(&place->length, length, __ATOMIC_RELEASE);\n"
        "\t\tmemcpy(place->request, request, length);\n",
        "the next worker carries out half a request",
        (f"{SANITIZED}::test_a_kill_at_any_instruction",),
    ),
    Mutant(
        "request-is-not-kept",
        "monarchfs/fuse/_relay.c",
        "\tif (((const struct fuse_in_header *)bytes)->opcode != FUSE_INTERRUPT)\n"
        "\t\tjournal_keep(bytes, length);\n",
        "",
        "on Linux before 6.9 a reader hangs for ever if the worker dies",
        (f"{SANITIZED}::test_all_threads_at_once", "tests/mount/test_older_kernels.py"),
    ),
    Mutant(
        "hanging-threads-stop-the-others",
        "monarchfs/fuse/_pool.c",
        "if (!pool->first || pool->busy - pool->stuck >= pool->most)",
        "if (!pool->first || pool->busy >= pool->most)",
        "some reads that hang in the source stop all others",
        (f"{SANITIZED}::test_threads_of_a_pool_while_some_hang",),
    ),
    Mutant(
        "first-error-of-a-punch-is-lost",
        "monarchfs/store/_records.c",
        "error = error ? error : failed;",
        "error = failed;",
        "room that could not be given back counts as free",
        ("tests/store/test_segments.py",),
    ),
)
