"""A worker without a file system: it speaks the bootstrap, the channel and raw FUSE.

    python -I fake_worker.py MODE --bootstrap-fd K

MODE is ``serve``; ``fail`` (says so); ``crash`` (ends with a line on stderr); ``silent`` (never
ready); ``silent-later`` (its successors); ``other`` (cannot take over); ``late`` (takes 2 s to end,
and then leaves a file ``synced``); ``segv before``, ``segv after`` (the first worker dies of
SIGSEGV before, or after, it answers INIT; with ``always`` behind it all do); ``starved`` (eight
successors find a limit reached); ``checking`` (beats for 12 s before it answers INIT);
``mad`` (says what a control client has it say, see ``go_mad``).

Who looks up ``die``, ``die-always`` (also in safe mode) or ``freeze`` has it do so.

Only the standard library, so that any user's interpreter can run it.
"""

import base64
import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any

OUT_HEADER = struct.Struct("=IiQ")
IN_HEADER = struct.Struct("=IIQQIIIHH")
ATTR = struct.Struct("=6Q10I")
Bootstrap = dict[str, Any]
LOOKUP, FORGET, GETATTR, OPEN, STATFS, RELEASE, OPENDIR, INTERRUPT, BATCH_FORGET, RELEASEDIR = (
    *(1, 2, 3, 14, 17, 18, 27, 36, 42, 29),
)
READDIR, READDIRPLUS = 28, 44


def init_reply(request: bytes) -> bytes:
    """What libfuse 3.14 answers, more or less: little is asked for."""
    unique = IN_HEADER.unpack_from(request)[2]
    body = struct.pack(
        "=IIIIHHIIHHII6I", 7, 38, 131072, 1 << 0 | 7 << 12, 12, 9, 131072, 1, 32,
        0, 0, 0, *(0,) * 6,
    )  # fmt: skip
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def reply_to(request: bytes) -> bytes | None:
    _, opcode, unique, ino, *_ = IN_HEADER.unpack_from(request)
    if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
        return None
    body, error = b"", 0
    if opcode == GETATTR and ino == 1:
        attr = ATTR.pack(1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
        body = struct.pack("=QII", 0, 0, 0) + attr
    elif opcode == LOOKUP and request[IN_HEADER.size :] == b"own\0":
        attr = ATTR.pack(2, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o444, 1, 0, 0, 0, 4096, 0)
        body = struct.pack("=QQQQII", 2, 0, 0, 0, 0, 0) + attr
    elif opcode in (OPEN, OPENDIR):
        body = struct.pack("=QII", 1, 0, 0)
    elif opcode == STATFS:
        body = struct.pack("=5Q4I6I", 1, 1, 1, 1, 1, 4096, 255, 4096, *(0,) * 7)
    elif opcode not in (READDIR, READDIRPLUS, RELEASE, RELEASEDIR):
        error = -errno.ENOENT if opcode == LOOKUP else -errno.ENOSYS
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body


def answer_client(connection: int, message: Bootstrap) -> None:
    with socket.socket(fileno=connection) as client:
        client.settimeout(5)
        result = {"request": message["request"]}
        client.sendall(json.dumps({"ok": True, "result": result}).encode() + b"\n")


def go_mad(channel: socket.socket, bootstrap: Bootstrap, request: Bootstrap) -> None:
    """``say``: sends what is in ``content`` (base64), ``times`` times, with so many
    ``descriptors`` if they are taken. ``report``: has it be the next statuses. ``print``: writes it
    to standard error. ``lend``: a child sends the supervisor a descriptor of a file of this mount,
    and stops this process."""
    content = base64.b64decode(request.get("content", ""))
    descriptors = [0] * int(request.get("descriptors", 0))
    match request["command"]:
        case "say":
            for _ in range(int(request.get("times", 1))):
                try:
                    socket.send_fds(channel, [content], descriptors)
                except PermissionError:
                    socket.send_fds(channel, [content], [])
        case "report":
            bootstrap["report"] = content
        case "print":
            for _ in range(int(request.get("times", 1))):
                os.write(2, content)
        case "lend" if os.fork() == 0:
            own = os.open(os.path.join(json.loads(bootstrap["config"])["mountpoint"], "own"), 0)
            with contextlib.suppress(PermissionError):
                socket.send_fds(channel, [content], [own])
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)


def report(bootstrap: Bootstrap) -> Bootstrap:
    return {
        "state": "serving",
        "worker": {"pid": os.getpid(), "restarts": bootstrap["restarts"]},
        "environment": sorted(os.environ),
    }


def obey(name: bytes, bootstrap: Bootstrap) -> None:
    """Of what is looked up."""
    if name == b"die-always" or (name == b"die" and not bootstrap["safe"]):
        os._exit(7)
    if name == b"freeze" and not bootstrap["restarts"]:
        time.sleep(1000)


def serve(mode: str, channel: socket.socket, bootstrap: Bootstrap) -> int:
    fuse, handles = (bootstrap["fds"][name] for name in ("fuse", "handles"))
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(fuse, select.POLLIN)
    beats = 0
    while True:
        beats += 1
        os.pwrite(handles, struct.pack("=Q", beats), 16)  # monarchfs.fuse.handle_table.BEATS
        for ready, _ in poll.poll(250):
            if ready == channel.fileno():
                content, descriptors, _, _ = socket.recv_fds(channel, 1 << 18, 4)
                if not content:
                    return 4
                message = json.loads(content)
                if message["do"] in ("stop", "leave"):
                    return 0
                if message["do"] == "status" and "report" in bootstrap:
                    number = b"%d" % message["number"]
                    channel.send(bootstrap["report"].replace(b"NUMBER", number))
                elif message["do"] == "status":
                    answer = {"event": "status", "number": message["number"]}
                    channel.send(json.dumps({**answer, "status": report(bootstrap)}).encode())
                if message["do"] == "client":
                    if mode == "mad":
                        go_mad(channel, bootstrap, message["request"])
                    answer_client(descriptors[0], message)
                continue
            try:
                request = os.read(fuse, 1 << 21)
            except BlockingIOError:
                continue
            except OSError as error:
                return 0 if error.errno == errno.ENODEV else 5
            if IN_HEADER.unpack_from(request)[1] == LOOKUP:
                obey(request[IN_HEADER.size :].rstrip(b"\0"), bootstrap)
            reply = reply_to(request)
            if reply is not None:
                os.write(fuse, reply)
                os.pwrite(handles, struct.pack("=Q", beats), 24)  # ANSWERED


def main() -> int:
    mode = sys.argv[1]
    with open(int(sys.argv[sys.argv.index("--bootstrap-fd") + 1]), "rb") as file:
        bootstrap = json.load(file)
    fds = bootstrap["fds"]
    init = socket.socket(fileno=fds["init"])
    channel = socket.socket(fileno=fds["channel"])
    if bootstrap["waits"] and mode == "other":
        channel.send(b'{"event": "failed", "error": "it is another program"}')
        return 1
    if bootstrap["waits"]:
        channel.send(b'{"event": "loaded"}')
        told = json.loads(channel.recv(1 << 16) or b"{}")
        if told.get("do") != "begin":
            return 0
        bootstrap["restarts"] = told["restarts"]
    if mode.startswith("segv") and (not bootstrap["restarts"] or "always" in mode):
        if "after" in mode:
            init.send(init_reply(init.recv(1 << 18)))
            channel.recv(1 << 16)
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "starved" and 1 <= bootstrap["restarts"] < 9:
        return os.EX_TEMPFAIL
    if mode == "crash":
        print("this worker is broken", file=sys.stderr)
        return 3
    if mode == "fail":
        channel.send(b'{"event": "failed", "error": "the index is on fire"}')
        return 1
    with open(os.open("index", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fds["state"]), "wb") as file:
        file.write(b"made by the worker")
    for descriptor in (fds["source"], fds["state"], *fds["tiers"]):
        os.listdir(descriptor)
    for beats in range(48 if mode == "checking" else 0):
        os.pwrite(fds["handles"], struct.pack("=Q", beats), 16)
        time.sleep(0.25)
    init.send(init_reply(init.recv(1 << 18)))
    told = json.loads(channel.recv(1 << 16))
    assert told["do"] == "serve", told
    if mode == "silent" or (mode == "silent-later" and bootstrap["restarts"]):
        channel.recv(1)
        return 0
    channel.send(b'{"event": "ready"}')
    code = serve(mode, channel, bootstrap)
    if mode == "late":
        time.sleep(2)
        os.close(os.open("synced", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fds["state"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
