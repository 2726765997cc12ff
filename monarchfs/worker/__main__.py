"""The worker's process: one trio run with the FUSE session, the copier and the control connections.

Started by the supervisor as ``python -I -m monarchfs.worker --bootstrap-fd N``, as the mount's
user. N holds a JSON object: the configuration, and the numbers of the descriptors it inherits. See
docs/ARCHITECTURE.md for the conversation on the channel.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
from dataclasses import replace

import trio

from monarchfs.system.escaping import OneLine
from monarchfs.system.limits import explained, passing
from monarchfs.system.logs import BoundedLog, FewOfEach
from monarchfs.system.privileges import close_to_others, drop_capabilities
from monarchfs.types import MonarchError, OperationError
from monarchfs.worker.bootstrap import Bootstrap, SupervisorChannel, wait_to_begin
from monarchfs.worker.worker import Worker

log = logging.getLogger(__name__)

WORKER_LOG = "worker.log"
"""The file of a daemon's standard error; the supervisor uses the same name."""
STACKS_SIGNAL = signal.SIGUSR1
"""Have the main thread's stack written to standard error; then all, unless it hangs in C."""


async def run(bootstrap: Bootstrap, log_filter: FewOfEach) -> int:
    """Serve until the file system is unmounted (0), something failed (1), or is short now
    (EX_TEMPFAIL)."""
    channel = SupervisorChannel(bootstrap.channel_fd)
    worker: Worker | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                worker = Worker(bootstrap, channel, nursery, log_filter)
                await nursery.start(worker.parts.source.watch)
                nursery.start_soon(worker.parts.interrupts.watch)
                await worker.start()
            except (OSError, MonarchError) as exc:
                state_dir = f"/proc/self/fd/{bootstrap.fds.state}"
                error = explained(exc) if isinstance(exc, OSError) else str(exc)
                error = error.replace(state_dir, bootstrap.config.state_dir)
                await channel.send({"event": "failed", "error": error})
                nursery.cancel_scope.cancel()
                return 1 if passing(exc) is None else os.EX_TEMPFAIL
            nursery.start_soon(worker.listen)
            await worker.serve()
            log.info("unmounted")
            nursery.cancel_scope.cancel()
    except Exception as exc:
        if (why := passing(exc)) is None:
            raise
        log.exception("%s", why)
        channel.send_now({"event": "failed", "error": why})
        return os.EX_TEMPFAIL
    finally:
        if worker is not None:
            await worker.close()
    return 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="monarchfs.worker")
    parser.add_argument("--bootstrap-fd", type=int, required=True)
    parser.add_argument("mountpoint", nargs="?", help="for who looks at processes")
    try:
        bootstrap = Bootstrap.read(parser.parse_args(arguments).bootstrap_fd)
    except OperationError as exc:
        sys.exit(str(exc))
    # The supervisor decides where standard error goes.
    log_filter = FewOfEach()
    handler = BoundedLog(bootstrap.fds.state, WORKER_LOG)
    handler.addFilter(log_filter)
    handler.setFormatter(OneLine("%(asctime)s worker %(levelname)s %(message)s"))
    logging.basicConfig(level=bootstrap.config.log_level.upper(), handlers=[handler])
    faulthandler.enable()
    # Other threads' stacks change where they run: without the GIL, to read them may be fatal.
    signal.signal(STACKS_SIGNAL, lambda *_: faulthandler.dump_traceback(all_threads=True))
    faulthandler.register(STACKS_SIGNAL, all_threads=False, chain=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the foreground is the supervisor's
    drop_capabilities()
    if bootstrap.supervisor_uid != os.geteuid():
        close_to_others()
    if bootstrap.waits:
        if (told := wait_to_begin(bootstrap.channel_fd)) is None:
            return
        bootstrap = replace(bootstrap, restarts=told["restarts"])
    code = trio.run(run, bootstrap, log_filter)
    log_filter.report(all_of_them=True)
    logging.shutdown()
    sys.stderr.flush()
    # A thread that hangs in the source would prevent the interpreter's end.
    os._exit(code)


if __name__ == "__main__":
    main()
