"""The verdict in plain words: whether input was the limit, what it waited for, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monarchfs.insight.facts import Facts
from monarchfs.insight.findings import (
    COMPUTE_BOUND,
    FEWEST_REQUESTS,
    INPUT_BOUND,
    SENTENCES,
    SHORTEST_SECONDS,
    WORTH_SAYING,
    kind_of,
    percent,
)
from monarchfs.insight.results import (
    CAUSES,
    CHECKS,
    COPY,
    MEMORY,
    NAMES,
    PEER,
    SOURCE,
    TIER,
    Conclusion,
    Epoch,
    Outcome,
    SourceLimits,
)
from monarchfs.system.sizes import counted, format_bytes, format_seconds

_GAIN = 0.95
AS_IT_WAS = "as it was"
PEERS = "--peers"
IMMUTABLE = "--freshness immutable"

_WORDS = {
    SOURCE: "the source",
    CHECKS: "the source, asked about names and changes",
    MEMORY: "the daemon's memory",
    TIER: "the tiers",
    PEER: "other nodes",
    COPY: "copies under way",
    NAMES: "look-ups and opens that the node answered",
}


def words_of(cause: int) -> str:
    return _WORDS.get(cause, "unknown")


def steady_epoch(epochs: Sequence[Epoch]) -> Epoch | None:
    """The last whole one: it shows what an epoch takes once copies are made."""
    most = max((epoch.bytes for epoch in epochs), default=0)
    whole = [epoch for epoch in epochs if epoch.bytes >= most / 2]
    return whole[-1] if whole else None


def give_verdict(
    facts: Facts, epochs: Sequence[Epoch], source: SourceLimits | None, outcomes: Sequence[Outcome]
) -> Conclusion:
    requests = sum(epoch.span.requests for epoch in epochs)
    reservations = list(_reservations(facts, epochs))
    epoch = steady_epoch(epochs)
    if epoch is None or requests < FEWEST_REQUESTS or epoch.seconds < SHORTEST_SECONDS:
        found = "no epoch" if epoch is None else f"an epoch of {format_seconds(epoch.seconds)}"
        line = (
            f"No verdict: the recording is too short ({found}, {counted(requests, 'request')})."
            f" Record an epoch of {SHORTEST_SECONDS:g} s or more; two are better."
        )
        return Conclusion("unknown", epoch.number if epoch else 0, [line], reservations)
    kind, line = _kind(facts, epoch)
    lines = [line]
    if kind == "unknown" or epoch.waited_share >= COMPUTE_BOUND:
        lines += _causes(facts, epoch, source, outcomes)
    if facts.sampled == 1:
        lines += _remedies(kind, epoch, outcomes)
    return Conclusion(kind, epoch.number, lines, reservations)


def _reservations(facts: Facts, epochs: Sequence[Epoch]) -> Iterator[str]:
    if facts.sampled > 1:
        yield (
            f"Only the requests of one of {facts.sampled} files were recorded: times of waiting are"
            " too low, and there is no verdict. Record without sampling for one."
        )
    if "reads" in facts.hidden:
        how = "passthrough" if facts.passthrough else "its page cache"
        yield (
            f"The kernel served some reads by itself ({how}); they are not in the recording, so"
            " readers may have read while they seem idle."
            + " A file that an open handed to the kernel counts as read whole, from a tier."
            * facts.passthrough
        )
    if "opens" in facts.hidden:
        yield "The kernel opened files by itself: what opens took is not in the recording."
    if facts.hidden & {"reads", "opens"}:
        yield "A mount with `--data-path direct` has every open and read recorded."
    if facts.dropped:
        yield f"{counted(facts.dropped, 'event')} came too fast and were not recorded."
    if facts.gaps:
        gaps = counted(facts.gaps, "interval")
        yield f"Nothing was recorded in {gaps} (the worker was replaced)."
    if len(epochs) < 2:
        yield (
            "One epoch was recorded: nothing was read again, so later epochs, which read from the"
            " tiers, cannot be judged. Record two."
        )
    lacks = facts.dropped or facts.gaps or facts.sampled > 1 or facts.hidden & {"reads", "opens"}
    if not lacks:
        yield "The recording is complete: it has every open and read."


def _kind(facts: Facts, epoch: Epoch) -> tuple[str, str]:
    share, seconds = epoch.waited_share, epoch.span.with_readers or 1
    who = "the reader" if epoch.readers < 1.5 else f"the {epoch.readers:.0f} readers"
    waited = f"in epoch {epoch.number} {who} waited {percent(share)} of the time"
    if epoch.readers >= 1.5:
        waited += f", all at once {percent(epoch.span.all_waiting / seconds)}"
    idle = percent(epoch.span.idle / seconds)
    if facts.sampled > 1:
        return "unknown", f"No verdict (sampled): {waited}, or more."
    if share < INPUT_BOUND and facts.passthrough and "reads" in facts.hidden:
        return "unknown", (
            f"No verdict, because the kernel read by itself: {waited} for what the mount answered."
        )
    kind = kind_of(share)
    mixed = kind == "mixed"
    computing = f"; {idle} nobody waited (computing)" if mixed else f", and {idle} nobody did"
    gain = f"an epoch of {format_seconds(epoch.seconds)} would be at most"
    gain = f"{gain} {format_seconds(epoch.span.waited)}"
    words = {"waited": waited, "computing": computing, "gain": gain, "of": ""}
    return kind, SENTENCES[kind].format_map(words)


def _causes(
    facts: Facts, epoch: Epoch, source: SourceLimits | None, outcomes: Sequence[Outcome]
) -> Iterator[str]:
    shares = [seconds / (epoch.span.waiting or 1) for seconds in epoch.span.shared]
    ranked = sorted(range(len(CAUSES)), key=lambda cause: -shares[cause])
    files = f"{counted(epoch.files.source, 'file')} ({format_bytes(epoch.files.source_bytes)})"
    words = {"files": files, "freshness": facts.freshness}
    for cause in ranked[:2]:
        if shares[cause] < WORTH_SAYING:
            return
        words |= {"share": percent(shares[cause]), "words": words_of(cause)}
        if cause == SOURCE:
            yield SENTENCES[_why_from_source(facts, epoch, outcomes)].format_map(words)
            if source is not None:
                yield _limit(source)
        elif cause == CHECKS:
            known = epoch.number > 1 and not facts.setup.immutable
            yield SENTENCES["checks" if known else "new names"].format_map(words)
        elif cause in (MEMORY, TIER):
            rate = epoch.span.bytes[cause] / (epoch.span.merged[cause] or 1)
            where = "in a tier" if cause == TIER else "in memory"
            words |= {"where": where, "local_rate": format_bytes(rate)}
            yield SENTENCES["daemon"].format_map(words)
        else:
            yield SENTENCES["other"].format_map(words)


def _why_from_source(facts: Facts, epoch: Epoch, outcomes: Sequence[Outcome]) -> str:
    if epoch.number == 1:
        return "first epoch"
    if not facts.setup.copies:
        return "nothing copied"
    fits = next((o.hit_ratio for o in outcomes if o.change == AS_IT_WAS), 0.0)
    return "not copied" if fits > epoch.hit_ratio + 0.1 else "no room"


def _limit(source: SourceLimits) -> str:
    if source.slow_share_of_time >= 0.3 and source.slow_share_of_reads <= 0.2:
        limit = "slow target" if source.same_files else "pauses"
    elif source.load_share is None:
        limit = "latency or bandwidth"
    else:
        limit = "bandwidth" if source.load_share >= 0.5 else "latency"
    return SENTENCES[limit].format(
        slow_reads=percent(source.slow_share_of_reads),
        slow_time=percent(source.slow_share_of_time),
        slow_files=counted(source.slow_files, "file"),
        example=source.example,
        rate=format_bytes(source.bytes_per_second),
        median=format_seconds(source.median),
    )


def _remedies(kind: str, epoch: Epoch, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The change that brings most; of two that bring about the same, the one named first."""
    now = epoch.seconds
    others = [one for one in outcomes if one.change != AS_IT_WAS]
    best = min((one.epoch_seconds for one in others), default=now)
    as_it_was = min((one.epoch_seconds for one in outcomes if one not in others), default=now)
    if kind in ("compute-bound", "unknown") or best > min(now, as_it_was) * _GAIN:
        return
    for one in others:
        if now - one.epoch_seconds >= 0.8 * (now - best):
            local = f"{percent(one.hit_ratio)} of the bytes local"
            if one.change == IMMUTABLE:
                local += "; only if no file changes while it is mounted"
            elif one.change.startswith(PEERS):
                local += ", or of other nodes"
            yield (
                f"{one.change} would bring that to an estimated {format_seconds(one.epoch_seconds)}"
                f" an epoch instead of {format_seconds(now)} ({local})."
            )
            return
