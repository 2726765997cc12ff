"""What may be found of a job that reads, in words: for recordings, and for logs of Darshan."""

from __future__ import annotations

INPUT_BOUND = 0.5
COMPUTE_BOUND = 0.2
WORTH_SAYING = 0.25
"""Shares: of the time that readers wait; of anything."""
SHORTEST_SECONDS = 1.0
FEWEST_REQUESTS = 50
"""What is shorter, or has fewer, gets no verdict."""

SENTENCES = {
    "input-bound": "Input-bound: {waited}.",
    "mixed": "Partly input-bound: {waited}{computing}.",
    "compute-bound": "Not input-bound: {waited}{computing}. Without any waiting {gain}"
    " shorter{of}.",
    # Causes of waiting, and what would help against them.
    "first epoch": "{share} of the waiting was for the source: the first epoch read {files} from"
    " it.",
    "not copied": "{share} of the waiting was for the source: {files} were read from it again,"
    " though more would fit: they were not copied yet, or not at all (`monarchfs why` says the"
    " reason).",
    "nothing copied": "{share} of the waiting was for the source: {files} were read from it again,"
    " as the mount copies nothing by itself (--prefetch none).",
    "no room": "{share} of the waiting was for the source: {files} that do not fit into the tiers"
    " were read from it again.",
    "new names": "{share} of the waiting was for the source, asked for names and attributes that"
    " were not known yet.",
    "checks": "{share} of the waiting was for the source, asked whether names and files have"
    " changed (--freshness {freshness}): more room would not help.",
    "daemon": "{share} of the waiting was for the daemon: the data were there ({where}) and came at"
    " {local_rate}/s while they were waited for. More room would not help; larger reads, more"
    " readers at once or a faster tier may.",
    "other": "{share} of the waiting was for {words}.",
    "names": "{share} of the waiting was for opens and look-ups of {files}: a mount answers these"
    " from what it knows (--freshness immutable: all of them).",
    "small reads": "{small} of reads were below 100 KB{order}: they wait for the latency of the"
    " file system, which local copies do not have.",
    # What limits the source.
    "slow target": "{slow_reads} of its answers took ten times the median or more, and made"
    " {slow_time} of its time; these were the same {slow_files}, as {example}: one storage target"
    " of the source may be slow.",
    "pauses": "{slow_reads} of its answers took ten times the median or more, and made {slow_time}"
    " of its time; these were other files each time: the source paused, or was busy with others.",
    "latency or bandwidth": "It gave {rate}/s; half of its answers took {median} or more. About as"
    " much was asked at all times, so whether latency or bandwidth was the limit cannot be told.",
    "bandwidth": "Its bandwidth was the limit: it gave {rate}/s, the slower the more was asked at"
    " once.",
    "latency": "Its latency was the limit, not its bandwidth: half of its answers took {median} or"
    " more, however much was asked. It gave {rate}/s; more readers at once would get more.",
    # What a mount would bring to a job without one.
    "read again": "Files were read again: {again} of {bytes} would have come from local copies, and"
    " all of it in the next such job, with {room} in the tiers of the node.",
    "read once": "Nearly all of {bytes} was read once, so within one such job copies help only"
    " where they are made before they are read. The next such job on the node would find all of it"
    " local, with {room} in its tiers.",
    "little waiting": "The default, --prefetch auto, is enough: it spares the file system these"
    " reads.",
    "known order": "--prefetch {list} copies the job's files in the order in which it read them; if"
    " they are most of the dataset, --prefetch all does, without a list.",
    "sparse reads": "Of {sparse} the job read less than half: whole copies would read {whole}"
    " instead of {read}, which pays only if they are read again and again. They are not in the"
    " list.",
}
"""By cause: the sentence that says what is so, and the remedy."""


def kind_of(waited_share: float) -> str:
    """What a job is by the share of time that its readers waited."""
    if waited_share >= INPUT_BOUND:
        return "input-bound"
    return "mixed" if waited_share >= COMPUTE_BOUND else "compute-bound"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
