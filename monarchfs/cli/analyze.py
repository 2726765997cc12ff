"""``monarchfs analyze``: what a recording says about a job and its input."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monarchfs.insight.analysis import analyze
from monarchfs.insight.page import page_of
from monarchfs.insight.recording import RecordingError, open_recording
from monarchfs.insight.results import Analysis
from monarchfs.insight.text import text_of
from monarchfs.insight.trace import write_trace
from monarchfs.types import OperationError


def analyze_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the analysis. Raises OperationError for what is no recording."""
    try:
        recording = open_recording(arguments.file)
        found = analyze(recording)
    except RecordingError as error:
        raise OperationError(str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError(f"{arguments.file}: the recording makes no sense: {error!r}") from None
    if arguments.html is not None:
        with open(arguments.html, "w", encoding="utf-8") as stream:
            stream.write(page_of(found))
    if arguments.trace is not None:
        with open(arguments.trace, "w", encoding="utf-8") as stream:
            write_trace(recording, found.epochs, stream)
    print(json.dumps(to_json(found)) if arguments.json else text_of(found))
    return 0


def to_json(found: Analysis) -> dict[str, Any]:
    return {**asdict(found), "epochs": [epoch.to_json() for epoch in found.epochs]}
