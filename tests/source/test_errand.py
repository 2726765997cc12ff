"""What becomes of an errand's files, whoever comes first: the thread or the event loop."""

from __future__ import annotations

from monarchfs.source.errand import Errand, Wanted
from monarchfs.types import DirRef, SourceVersion

FILE: Wanted = (DirRef(b"", 1), b"f", SourceVersion(0, 2, 3, 4, 5))


def test_what_was_not_begun_can_be_taken_back() -> None:
    errand = Errand([FILE] * 5, lambda: None)
    places = iter(errand)
    assert next(places) == 0
    assert not errand.take(0)
    assert errand.take(2)
    assert not errand.take(2)
    assert next(places) == 1
    assert errand.take_all() == [3, 4]
    assert list(places) == []


def test_an_answer_is_told_to_who_waits_for_it_and_nobody_else() -> None:
    told: list[dict[int, object]] = []
    errand = Errand([FILE] * 3, lambda: told.append(dict(errand.answers)))
    errand.answer(0, b"none waits")
    assert told == []
    assert errand.wait_for(0) == b"none waits"
    assert errand.wait_for(1) is None
    errand.answer(2, b"not for this one")
    assert told == []
    errand.answer(1, b"this")
    assert [answers[1] for answers in told] == [b"this"]
