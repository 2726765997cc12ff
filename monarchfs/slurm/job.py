"""The job of a prolog or epilog, as slurmd describes it in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from monarchfs.slurm.request import MOST_CHARACTERS, Request, parse_comment, parse_request
from monarchfs.types import UsageError

_NUMBER = re.compile(r"[0-9]{1,10}")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")


@dataclass(frozen=True, slots=True)
class Job:
    """``requests`` are the job's own; ``mistake`` says why its request is refused. ``nodes`` is how
    many it runs on, ``node_list`` which ones, in Slurm's notation."""

    id: int
    uid: int
    user: str
    account: str
    partition: str
    node: str
    requests: tuple[Request, ...] = ()
    mistake: str | None = None
    nodes: int = 1
    node_list: str = ""


def parse_job_id(text: str) -> int:
    """Raises UsageError for what is no job's number."""
    if _NUMBER.fullmatch(text) is None or not 0 < int(text) < 1 << 32:
        raise UsageError(f"'{text[:40]}' is no job: give its number, as squeue shows it")
    return int(text)


def job_from(environ: Mapping[str, str]) -> Job:
    """What slurmd says (prolog and epilog guide of Slurm). A wrong request is a ``mistake``, not an
    error: the job runs without. Raises UsageError outside of Slurm."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError("there is no SLURM_JOB_ID: this is for Slurm's prolog and epilog")
    job = parse_job_id(environ["SLURM_JOB_ID"])
    uid = environ.get("SLURM_JOB_UID", "")
    if _NUMBER.fullmatch(uid) is None or int(uid) >= (1 << 32) - 1:
        raise UsageError("SLURM_JOB_UID is no number: this is for Slurm's prolog and epilog")
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    requests: list[Request] = []
    mistake = None
    try:
        requests = _requested(environ)
    except UsageError as error:
        mistake = str(error)
    return Job(
        id=job,
        uid=int(uid),
        user=environ.get("SLURM_JOB_USER", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        node=node_name(environ),
        requests=tuple(requests),
        mistake=mistake,
        nodes=int(nodes) if _NUMBER.fullmatch(nodes) else 1,
        # The first one in later releases of Slurm.
        node_list=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),
    )


def node_name(environ: Mapping[str, str]) -> str:
    """This node's name in Slurm, else in the network; safe as part of a file name."""
    name = environ.get("SLURMD_NODENAME", "")
    if NODE.fullmatch(name) is None:
        import socket

        name = socket.gethostname().partition(".")[0]
    return name if NODE.fullmatch(name) else "node"


def _requested(environ: Mapping[str, str]) -> list[Request]:
    # The plugin's environment reaches a prolog with this prefix (spank_job_control_setenv).
    plugin, comment = environ.get("SPANK_MONARCHFS", ""), environ.get("SLURM_JOB_COMMENT", "")
    if len(plugin) + len(comment) > MOST_CHARACTERS:
        raise UsageError(f"a comment of more than {MOST_CHARACTERS} characters: make it shorter")
    return (parse_request(plugin) if plugin else []) + parse_comment(comment)
