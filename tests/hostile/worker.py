"""A worker that was taken over: it tries what the supervisor must not do for it.

    python -I worker.py cli ARGUMENTS...       monarchfs with it in the worker's place
    python -I worker.py worker --bootstrap-fd K

What came of it is its report. Opens of any file are answered with the backing file that it was
given for one of its own. Only the standard library, so that any user's interpreter can run it.
"""

import errno
import functools
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import fake_worker
from tests.support.fake_worker import ATTR, GETATTR, IN_HEADER, LOOKUP, OPEN, OUT_HEADER

OWN = b"the worker's own file"
Message = dict[str, Any]
Reply = Callable[[bytes], "bytes | None"]

FOPEN_PASSTHROUGH = 1 << 7


class Supervisor:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.number = 0
        self.later: list[Message] = []

    def tell(self, content: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self.channel, [content], list(descriptors))

    def ask(self, event: str, **rest: object) -> Message:
        self.number += 1
        self.tell(json.dumps({"event": event, "number": self.number, **rest}).encode())
        while True:
            answer: Message = json.loads(self.channel.recv(1 << 18))
            if answer["do"] == "backed" and answer["number"] == self.number:
                return answer
            self.later.append(answer)


def offer(supervisor: Supervisor, files: Sequence[object]) -> Message:
    answer = supervisor.ask("back", files=files)
    return {
        "ids": [bool(one) for one in answer["ids"]],
        "error": errno.errorcode.get(answer.get("error", 0), ""),
    }


def attack(supervisor: Supervisor, tier: int, things: str) -> tuple[int, Message]:
    """The id of a file of its own, and what came of offering others."""
    at = functools.partial(os.path.join, things)
    make = os.open("own", os.O_CREAT | os.O_RDWR, 0o600, dir_fd=tier)
    os.write(make, OWN)
    os.close(make)

    def called(name: str) -> tuple[int, str, int]:
        return 0, name, os.stat(name, dir_fd=tier, follow_symlinks=False).st_ino

    own = called("own")
    os.mkfifo("fifo", dir_fd=tier)
    os.mkdir("inside", dir_fd=tier)
    os.symlink(at("secret"), "link", dir_fd=tier)
    os.symlink(things, "way", dir_fd=tier)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{tier}/socket")
    found: Message = {}
    for name, file in {
        "a link to a secret": (0, "link", os.stat(at("secret")).st_ino),
        "what lies behind a link": (0, "way/public", os.stat(at("public")).st_ino),
        "somebody else's": called("theirs"),
        "another file by its name": (0, "own", own[2] + 1),
        "a directory": called("inside"),
        "a FIFO": called("fifo"),
        "a socket": called("socket"),
        "what is not there": (0, "nothing", 1),
        "no tier": (7, "own", own[2]),
    }.items():
        found[name] = offer(supervisor, [file])
    found["nothing"] = offer(supervisor, [])
    found["some of each"] = offer(supervisor, [own, called("fifo"), own])
    found["more than a message may hold"] = unanswered(supervisor, [own] * 33)
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        supervisor.tell(b'{"event": "back", "number": 0, "files": []}', [null])
        found["descriptors"] = unanswered(supervisor)
    except PermissionError:
        found["descriptors"] = "EPERM"

    supervisor.ask("unback", ids=[-1, 0, 1 << 70, 4_000_000_000, "1", None, [], {}, 1.5, True])
    made: list[int] = []
    while True:
        ids = supervisor.ask("back", files=[own] * 32)["ids"]
        made += filter(None, ids)
        if 0 in ids:
            break
    found["as many as it likes"] = len(made)
    for start in range(0, len(made), 10_000):
        supervisor.ask("unback", ids=made[start : start + 10_000])
    (number,) = supervisor.ask("back", files=[own])["ids"]
    return number, found


def unanswered(supervisor: Supervisor, files: Sequence[object] | None = None) -> str:
    """What comes of a message that is to be dropped: the next one is answered, it is not."""
    if files is not None:
        supervisor.tell(json.dumps({"event": "back", "number": 0, "files": files}).encode())
    supervisor.ask("unback", ids=[])
    numbers = [one["number"] for one in supervisor.later if one["do"] == "backed"]
    return "an answer" if 0 in numbers else "no answer"


def reply_to(request: bytes, number: int, report: Message, others: Reply) -> bytes | None:
    """All names are those of one file, whose opens have the backing file ``number``."""
    _, opcode, unique, ino, *_ = IN_HEADER.unpack_from(request)
    mode, uid, gid = stat.S_IFREG | 0o666, os.getuid(), os.getgid()
    file = ATTR.pack(2, len(OWN), 1, 0, 0, 0, 0, 0, 0, mode, 1, uid, gid, 0, 4096, 0)
    if opcode == GETATTR and ino != 1:
        body = struct.pack("=QII", 0, 0, 0) + file
    elif opcode == LOOKUP:
        body = struct.pack("=QQQQII", 2, 0, 0, 0, 0, 0) + file
    elif opcode == OPEN:
        report["opens"].append(struct.unpack_from("=I", request, IN_HEADER.size)[0])
        body = struct.pack("=QIi", 1, FOPEN_PASSTHROUGH, number)
    else:
        return others(request)
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def worker() -> int:
    with open(int(sys.argv[sys.argv.index("--bootstrap-fd") + 1]), "rb") as file:
        bootstrap = json.load(file)
    fds, config = bootstrap["fds"], json.loads(bootstrap["config"])
    init = socket.socket(fileno=fds["init"])
    channel = socket.socket(fileno=fds["channel"])
    init.send(fake_worker.init_reply(init.recv(1 << 18)))
    told = json.loads(channel.recv(1 << 18))
    channel.send(b'{"event": "ready"}')
    supervisor = Supervisor(channel)
    number, found = attack(supervisor, fds["tiers"][0], config["source"])
    report: Message = {"opens": [], "most": told["backing_ids"], "found": found}
    for message in supervisor.later:
        if message["do"] == "status":
            answer = {"event": "status", "number": message["number"], "status": report}
            channel.send(json.dumps(answer).encode())
    serving: Any = fake_worker
    serving.report = lambda _bootstrap: report
    serving.reply_to = functools.partial(
        reply_to, number=number, report=report, others=fake_worker.reply_to
    )
    return fake_worker.serve("serve", channel, bootstrap)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.exit(worker())
    from monarchfs.cli import main, mount

    command = (sys.executable, "-I", __file__, "worker")
    mount.mount_command = functools.partial(mount.mount_command, worker_command=command)
    sys.exit(main.main(sys.argv[2:]))
