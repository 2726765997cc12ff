"""From a recording to its analysis: three passes over the events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from monarchfs.insight.epochs import Overview, in_order, survey
from monarchfs.insight.facts import Facts, read_facts
from monarchfs.insight.latencies import SIZES, Latencies
from monarchfs.insight.pattern import PatternFinder
from monarchfs.insight.recording import HANDED, Event, Kind, Recording
from monarchfs.insight.replay import Replay
from monarchfs.insight.results import (
    CHECKS,
    ELSEWHERE,
    MEMORY,
    SOURCE,
    TIER,
    Analysis,
    Epoch,
    Outcome,
    SourceLimits,
    Span,
    cause_of,
    moved_bytes,
)
from monarchfs.insight.verdict import AS_IT_WAS, IMMUTABLE, PEERS, give_verdict, steady_epoch
from monarchfs.insight.visits import Visits
from monarchfs.insight.waiting import Sweep
from monarchfs.system.sizes import format_bytes
from monarchfs.types import EvictionPolicy

_BINS = 160


def analyze(recording: Recording, nodes: int = 1) -> Analysis:
    """``nodes``: how many could share their tiers. Raises KeyError, TypeError, ValueError for facts
    that no recorder writes."""
    facts = read_facts(recording.facts)
    found = survey(in_order(recording.events))
    end = max(found.end, recording.seconds, 1e-6)
    edges = sorted({0.0, *found.begins, found.end, *(end * n / _BINS for n in range(_BINS + 1))})
    sweep = Sweep(edges, found.readers)
    latencies, pattern = Latencies(), PatternFinder(recording.files)
    for number, cause, origin, event, moved in _waited_for(recording, found):
        while len(pattern.epochs) < number:
            pattern.end_epoch()
        sweep.add(cause, origin, event, moved)
        latencies.add(cause, event, moved)
        if event.kind is Kind.READ:
            pattern.add_read(event)
        if event.size or event.kind is Kind.READ:
            pattern.add_file(origin, event)
    if found.begins:
        pattern.end_epoch()
    spans = sweep.finish()
    epochs = [
        Epoch(number, _sum(part), files)
        for number, (files, part) in enumerate(
            zip(pattern.epochs, _divided(spans, found), strict=True), start=1
        )
    ]
    visits = _visits(recording, found, latencies)
    handed = any(visit.unseen for visit in visits.all)
    facts = replace(facts, passthrough=facts.passthrough and handed)
    source = _source_limits(epochs, latencies, sweep, visits)
    outcomes = _outcomes(recording, facts, epochs, visits, nodes)
    verdict = give_verdict(facts, epochs, source, outcomes)
    if not recording.complete:
        verdict.reservations.append("The recorder was killed: the recording ends before its end.")
    return Analysis(
        recording.facts,
        recording.begun,
        recording.seconds,
        found.events,
        epochs,
        [
            _sum(list(part))
            for _, part in groupby(spans, lambda s: int(s.begin * _BINS / end + 1e-6))
        ],
        latencies.rows(),
        sweep.gaps.rows(),
        pattern.result(order_known="reads" not in facts.hidden or facts.passthrough),
        source,
        outcomes,
        verdict,
    )


def _waited_for(
    recording: Recording, found: Overview
) -> Iterator[tuple[int, int, int, Event, int]]:
    """All that somebody waits for: (number of the epoch, from 0 on, what it waits for, where the
    bytes come from, event, how many bytes the answer brought). What the open brought into memory
    came from who answered it. An open that hands the file to the kernel has the file's size: it is
    taken to be read whole, from a tier."""
    begins = [*found.begins[1:], float("inf")]
    number, brought = 0, dict[int, int]()
    for event in in_order(recording.events):
        if event.kind is not Kind.RELEASE:
            while event.begin >= begins[number]:
                number += 1
            cause = origin = cause_of(event)
            if event.kind is Kind.OPEN:
                brought.pop(event.ino, None)
                if origin in ELSEWHERE:
                    brought[event.ino] = origin
                if event.source_of in HANDED:
                    file = recording.files.get(event.ino)
                    origin, event = TIER, event._replace(size=file.size if file else 0)
            elif origin == MEMORY:
                origin = brought.get(event.ino, MEMORY)
            yield number, cause, origin, event, moved_bytes(event, recording.files)


def _divided(spans: Sequence[Span], found: Overview) -> Iterator[list[Span]]:
    """By epochs; the last one ends with the last request."""
    for begin, end in pairwise([*found.begins, found.end]):
        yield [span for span in spans if begin <= span.begin < end]


def _sum(spans: Sequence[Span]) -> Span:
    total = Span(spans[0].begin, spans[0].begin) if spans else Span(0.0, 0.0)
    for span in spans:
        total.add(span)
    return total


def _visits(recording: Recording, found: Overview, latencies: Latencies) -> Visits:
    visits = Visits(recording.files, latencies)
    for number, _cause, origin, event, moved in _waited_for(recording, found):
        visits.add(number + 1, origin, event, moved)
    visits.finish()
    return visits


def _source_limits(
    epochs: Sequence[Epoch], latencies: Latencies, sweep: Sweep, visits: Visits
) -> SourceLimits | None:
    answers = list(filter(None, map(latencies.source, range(len(SIZES)))))
    if not answers:
        return None
    amount = sum(epoch.span.bytes[SOURCE] for epoch in epochs)
    merged = sum(epoch.span.merged[SOURCE] for epoch in epochs)
    median = max(answers, key=lambda one: one.total).percentile(50)
    return visits.source_limits(sweep.load.share(), amount / (merged or 1), median)


def _outcomes(
    recording: Recording, facts: Facts, epochs: Sequence[Epoch], visits: Visits, nodes: int
) -> list[Outcome]:
    """What the steady epoch would take with other settings; one epoch says nothing of that."""
    epoch = steady_epoch(epochs)
    if epoch is None or epoch.number == 1 or not facts.tier_paths:
        return []
    read = epochs[0].span
    rate = read.bytes[SOURCE] / (read.merged[SOURCE] or 1)
    setup = facts.setup
    replay = Replay(visits, facts.sampled, recording.files, rate, setup)
    settings = [(AS_IT_WAS, setup)]
    if not setup.immutable and epoch.span.merged[CHECKS]:
        settings.append((IMMUTABLE, replace(setup, immutable=True)))
    if not setup.copies:
        settings.append(("--prefetch auto", replace(setup, copies=True)))
    settings += [
        (f"--evict {policy.value}", replace(setup, policy=policy))
        for policy in EvictionPolicy
        if setup.copies and policy is not setup.policy
    ]
    if not setup.scans:
        settings.append(("--prefetch all", replace(setup, scans=True, copies=True)))
    if nodes > 1:
        settings.append((f"{PEERS} of {nodes} nodes", replace(setup, nodes=nodes)))
    missing = replay.bytes_needed - sum(setup.capacities) if setup.copies else 0
    for part in (4, 2, 1) if missing > 0 else ():
        more = -(-missing // part) * 101 // 100
        name = f"{format_bytes(more)} more on {facts.tier_paths[-1]}"
        settings.append((name, setup.with_more(more)))
    return [replay.run(name, one, epoch, epochs[0]) for name, one in settings]
