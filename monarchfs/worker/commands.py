"""The commands that a worker answers over the control socket, beside ``status``.

``control`` documents the messages. Each command works through the paths of its request and reports
its progress. It ends if its client goes away.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import trio

from monarchfs.control import messages
from monarchfs.fs.why import Why
from monarchfs.metadata.refresh import Refresh, RefreshResult
from monarchfs.prefetch.named_files import NamedFiles
from monarchfs.prefetch.warm import Warm, What
from monarchfs.types import ROOT_INO, EvictionPolicy, MonarchError, Node, OperationError
from monarchfs.worker.announcing import Announcing
from monarchfs.worker.composition import Composition
from monarchfs.worker.recording import Recordings

log = logging.getLogger(__name__)

COMMANDS = (
    *("refresh", "pin", "unpin", "evict", "warm", "weigh", "why", "metrics", "peers", "record"),
    "order",
)
"""All commands that the worker answers; see docs/CONTROL.md."""

BATCH = 128
"""Names examined without a checkpoint: about a millisecond."""

USUAL_TELL_SECONDS = messages.PROGRESS_SECONDS / 2
_TELL_SECONDS = {"warm": 0.5}
"""How often a client gets a report of the progress."""

FOLLOW_SECONDS = 0.25

STILL_SECONDS = 120.0
"""A client that waits for copies is sent away if none ended for this long. It is longer than a
failed copy waits before it is tried again (``prefetch.jobs.RETRY_SECONDS``)."""

_DONE = ("files", "bytes", "kept", "not_listed", "not_looked_at")
"""``files`` and ``bytes`` of the source that were processed; ``kept`` files that were not;
``not_listed`` directories and names that were ``not_looked_at`` may stand for more files."""

_WHAT = {"copy": What.COPY, "metadata": What.METADATA, "check": What.CHECK}


Talk = Callable[[dict[str, Any], trio.SocketStream], Awaitable[dict[str, Any]]]
"""Carries out a request; the result."""


class Commands:
    """Constant: its parts."""

    def __init__(self, parts: Composition, recordings: Recordings, announcing: Announcing) -> None:
        self._parts = parts
        self._tree = parts.tree
        self._cache = parts.cache
        self._why = Why(
            parts.tree,
            parts.cache,
            parts.files.residency,
            parts.finder,
            parts.source,
            parts.metrics,
        )
        self._announcing = announcing
        self._talks: dict[str, Talk] = {"record": recordings.answer, "order": announcing.answer}
        """The commands that tell of themselves, and may hear more than the request."""
        self._files = NamedFiles(parts.tree, parts.finder)

    async def answer(self, request: dict[str, Any], stream: trio.SocketStream) -> None:
        """Carry out a request of `COMMANDS`, and send the progress and the reply."""
        so_far: dict[str, Any] = {}
        seconds = _TELL_SECONDS.get(request["command"], USUAL_TELL_SECONDS)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with trio.open_nursery() as nursery:
                try:
                    if talk := self._talks.get(request["command"]):
                        result = await talk(request, stream)
                    else:
                        command = nursery.cancel_scope
                        nursery.start_soon(_keep_telling, so_far, seconds, stream, command)
                        result = await self._carry_out(request, so_far)
                    reply = messages.encode_result(result)
                except (OSError, MonarchError) as exc:
                    reply = messages.encode_error(str(exc))
                nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True), trio.move_on_after(messages.PROGRESS_SECONDS):
                await stream.send_all(reply)

    async def _carry_out(self, request: dict[str, Any], so_far: dict[str, Any]) -> dict[str, Any]:
        """The result; ``so_far`` is kept up to date meanwhile. Raises OSError, MonarchError."""
        match request["command"]:
            case "metrics":
                return self._metrics()
            case "peers":
                return self._peers()
        paths = _paths(request)
        match request["command"]:
            case "refresh":
                return await self._refresh_all([_components(path) for path in paths], so_far)
            case "why":
                return await self._explain(paths, so_far)
            case "weigh":
                return await self._weigh(paths, request)
        # All of them first: if a name does not exist, nothing is done.
        nodes = [await self._parts.finder.find(path) for path in paths]
        if request["command"] == "warm":
            return await self._warm(nodes, request, so_far)
        return await self._change_all(nodes, request["command"], so_far)

    async def _change_all(
        self, nodes: Sequence[Node], command: str, so_far: dict[str, Any]
    ) -> dict[str, int]:
        """Pin, unpin or evict what lies at or below the nodes."""
        counts, index = dict.fromkeys(_DONE, 0), self._cache.index
        for node in nodes:
            held = node.ino != ROOT_INO and index.pins.pinned(node.parent)
            if command == "pin":
                index.pins.pin(node.ino)
            async for file in self._files_below(node, counts):
                done: bool | None = True
                if command == "evict":
                    done = self._evict(file)
                elif command == "unpin":
                    done = not held if index.pins.pinned(file.ino) else None
                if done:
                    counts["files"] += 1
                    counts["bytes"] += file.stat.size
                elif done is not None:
                    counts["kept"] += 1
                so_far.update(counts)
            if command == "unpin":
                index.pins.unpin(node.ino)
        return counts

    async def _refresh_all(
        self, paths: Sequence[tuple[bytes, ...]], so_far: dict[str, Any]
    ) -> dict[str, Any]:
        total: dict[str, Any] = asdict(RefreshResult())
        for path in paths:
            done = dict(total)

            def progress(now: RefreshResult, done: dict[str, Any] = done) -> None:
                so_far.update(_sum(done, now))

            total = _sum(done, await Refresh(self._tree, self._parts.kernel, progress).run(path))
        return total

    async def _explain(self, paths: Sequence[str], so_far: dict[str, Any]) -> dict[str, Any]:
        """What is known of each path. An error with one path does not affect the others."""
        reports = []
        for path in paths:
            try:
                reports.append({"path": path, **await self._why.report(path, so_far)})
            except OperationError as exc:
                reports.append({"path": path, "error": str(exc)})
        return {"paths": reports}

    async def _weigh(self, paths: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
        if self._cache.accounts.eviction is not EvictionPolicy.WEIGHTED:
            evict = self._cache.accounts.eviction.value
            raise OperationError(f"the mount has --evict {evict}: weights need --evict weighted")
        try:
            weights = messages.weights_of(request)
        except ValueError as exc:
            raise OperationError(str(exc)) from None
        nodes = await self._files.nodes([os.fsencode(path) for path in paths])
        pairs = zip(nodes, weights, strict=True)
        found = [(node.ino, weight) for node, weight in pairs if node is not None]
        unknown = [path for path, node in zip(paths, nodes, strict=True) if node is None]
        # At once, so that a job is never weighed by half of a request.
        await self._announcing.weigh(found, replace=request.get("replace") is True)
        first = unknown[0] if unknown else ""
        return {"files": len(found), "unknown": len(unknown), "first_unknown": first}

    async def _warm(
        self, nodes: Sequence[Node], request: dict[str, Any], so_far: dict[str, Any]
    ) -> dict[str, Any]:
        for node in nodes:
            if not (node.stat.is_directory or node.stat.is_regular):
                raise OperationError(f"{os.fsdecode(node.name)} is no file or directory")
        what = _WHAT.get(request.get("what", "copy"))
        if what is None:
            raise OperationError(f"unknown way to warm: {request.get('what')!r}")
        if what is What.CHECK:
            warm = self._parts.warming.request(what)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(warm.run, nodes)
                moving = await _follow(warm, so_far)
                nursery.cancel_scope.cancel()
        else:
            warm = self._parts.warming.start(what, nodes)
            # If the client goes away, the request goes on.
            moving = request.get("wait") is not True or await _follow(warm, so_far)
        if not moving:
            raise OperationError(
                f"nothing has moved for {STILL_SECONDS:g} s: monarchfs status tells of the source"
                " and the tiers; what was asked for goes on when they do"
            )
        return {"ended": warm.done.is_set(), **asdict(warm.counts)}

    async def _files_below(self, node: Node, counts: dict[str, int]) -> AsyncIterator[Node]:
        """The regular files at or below a node whose attributes are known. Counts what may hide
        others."""
        if node.stat.is_regular:
            yield node
        directories = [node.ino] if node.stat.is_directory else []
        while directories:
            ino, cookie = directories.pop(), 0
            counts["not_listed"] += self._tree.index.listings.listing(ino) is None
            while entries := self._tree.index.listings.entries(ino, cookie, BATCH):
                cookie = entries[-1][0].cookie
                for _dirent, child in entries:
                    if child is None:
                        counts["not_looked_at"] += 1
                    elif child.outdated:
                        continue
                    elif child.stat.is_directory:
                        directories.append(child.ino)
                    elif child.stat.is_regular:
                        yield child
                await trio.lowlevel.checkpoint()

    def _metrics(self) -> dict[str, Any]:
        """The answer to the node's exporter."""
        # Mounts that nobody asks do not import this.
        from monarchfs.exporter.wire import encode
        from monarchfs.worker.metric_values import values_now

        return encode(values_now(self._parts))

    def _peers(self) -> dict[str, Any]:
        if self._parts.peering is None:
            raise OperationError("this mount has no peers: mount with --peers")
        return self._parts.peering.report()

    def _evict(self, node: Node) -> bool | None:
        """None: there is nothing to evict."""
        return None if self._cache.accounts.state(node.ino) is None else self._cache.evict(node.ino)


async def _keep_telling(
    so_far: dict[str, Any], seconds: float, stream: trio.SocketStream, command: trio.CancelScope
) -> None:
    """Tells the client how far its command is, and ends the command if the client is gone."""
    try:
        while True:
            await trio.sleep(seconds)
            await stream.send_all(messages.encode_progress(so_far))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        command.cancel()


async def _follow(warm: Warm, so_far: dict[str, Any]) -> bool:
    """Report the progress until it has ended; False if there is none for STILL_SECONDS."""
    last, moved = "", trio.current_time()
    while not warm.done.is_set():
        with trio.move_on_after(FOLLOW_SECONDS):
            await warm.done.wait()
        so_far.update(asdict(warm.counts), moving_bytes=warm.moving_bytes)
        if str(so_far) != last:
            last, moved = str(so_far), trio.current_time()
        elif trio.current_time() - moved > STILL_SECONDS:
            return False
    return True


def _paths(request: dict[str, Any]) -> list[str]:
    """Raises OperationError if they are not as ``control`` documents them."""
    paths = request.get("paths")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise OperationError("the request has no list of paths")
    if any("\0" in path for path in paths):
        raise OperationError("a path holds a NUL byte")
    return paths


def _components(path: str) -> tuple[bytes, ...]:
    return tuple(name for name in os.fsencode(path).split(b"/") if name not in (b"", b"."))


def _sum(total: dict[str, Any], more: RefreshResult) -> dict[str, Any]:
    both = dict(total)
    for key, value in asdict(more).items():
        both[key] = both[key] or value if isinstance(value, str) else both[key] + value
    return both


async def answer_client(commands: Commands, request: dict[str, Any], fd: int) -> None:
    """Answer one control connection. The supervisor has checked who it is."""
    with trio.socket.from_stdlib_socket(socket.socket(fileno=fd)) as connection:
        stream, command = trio.SocketStream(connection), request["command"]
        error = f"unknown command {command!a}"
        if command in COMMANDS:
            try:
                await commands.answer(request, stream)
                return
            except Exception:  # a client's question must not cost the job its mount
                log.exception("the command %r failed", command)
                error = "it failed unexpectedly: the worker's log says more"
        with suppress(OSError, trio.BrokenResourceError):  # the client may be gone
            await stream.send_all(messages.encode_error(error))
