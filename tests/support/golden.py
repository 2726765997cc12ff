"""Texts that are reviewed as texts: what is printed stands in tests/golden."""

import json
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "golden"


class Golden:
    """Compares a text with a file of `DIRECTORY`; with ``--update-golden`` it writes the file."""

    def __init__(self, update: bool) -> None:
        self._update = update

    def __call__(self, name: str, text: str) -> None:
        path = DIRECTORY / name
        if self._update:
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path}: see --update-golden"


def unfolded(out: str) -> list[str]:
    if not out.startswith("{"):
        return out.splitlines()
    assert out.count("\n") == 1
    return ["{", *(f"  {key}: {json.dumps(value)}" for key, value in json.loads(out).items()), "}"]
