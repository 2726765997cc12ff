"""``monarchfs analyze``: what a recording, or Darshan, says about a job and its input."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict

from monarchfs.cli.output import show_result
from monarchfs.config.values import parse_count
from monarchfs.insight.analysis import analyze
from monarchfs.insight.darshan import read_logs
from monarchfs.insight.darshan_verdict import analyze_darshan, paths_of, text_lines
from monarchfs.insight.page import page_of
from monarchfs.insight.recording import open_recording
from monarchfs.insight.tables import text_of
from monarchfs.insight.trace import write_trace
from monarchfs.system.escaping import printable
from monarchfs.types import OperationError, UsageError


def analyze_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if arguments.darshan:
        return _analyze_darshan(arguments)
    if len(arguments.file) > 1:
        raise UsageError("one recording at a time: of logs of Darshan there may be several")
    if arguments.list is not None or arguments.source is not None:
        raise UsageError("--list and --source are for --darshan")
    (file,) = arguments.file
    nodes = parse_count(arguments.nodes) if arguments.nodes else 1
    try:
        recording = open_recording(file)
        found = analyze(recording, nodes)
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError(f"{file}: the recording makes no sense: {error!r}") from None
    if arguments.html is not None:
        with open(arguments.html, "w", encoding="utf-8") as stream:
            stream.write(page_of(found))
    if arguments.trace is not None:
        with open(arguments.trace, "w", encoding="utf-8") as stream:
            write_trace(recording, found.epochs, stream)
    result = {**asdict(found), "epochs": [epoch.to_json() for epoch in found.epochs]}
    show_result(arguments, result, () if arguments.json else text_of(found))
    return 0


def _analyze_darshan(arguments: argparse.Namespace) -> int:
    if arguments.html is not None or arguments.trace is not None:
        raise UsageError("--html and --trace are for recordings: Darshan has no events")
    if arguments.nodes is not None:
        raise UsageError("--nodes is for recordings: for others see monarchfs plan --nodes")
    if arguments.source is not None and not arguments.source.startswith("/"):
        raise UsageError(f"--source {arguments.source}: give the absolute path, as the job saw it")
    job = read_logs(arguments.file)
    listed = None if arguments.list is None else os.path.abspath(arguments.list)
    found = analyze_darshan(job, arguments.source, listed)
    if listed is not None:
        with open(listed, "w", encoding="utf-8") as stream:
            stream.writelines(f"{path}\n" for path in paths_of(found))
    show_result(arguments, asdict(found), map(printable, text_lines(found)))
    return 0
