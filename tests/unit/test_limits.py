"""Modules, classes and constructors stay small enough to be read at once.

A dataclass is a record of values here: its fields are no parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import monarchfs

PACKAGE = Path(monarchfs.__file__).parent

MOST_LINES = 400
MOST_METHODS = 20
MOST_PARAMETERS = 8

EXCEPTIONS: Mapping[str, str] = {
    "fuse/adapter.py Adapter": "pyfuse3 calls one of its methods for each kind of request.",
    "fuse/passthrough.py": "It is the class below, and little else.",
    "fuse/passthrough.py Passthrough": "The modes of inodes, their backing ids and the opens that"
    " wait for both change together, because the kernel allows an inode one mode.",
    "fuse/relay.py Relay": "It has a method for each function of the C part that it stands for.",
    "prefetch/copy.py Copy": "It is the life of one file's copy, whose states most methods change.",
    "prefetch/order.py Order": "What was found, fetched and opened of one list changes together.",
    "source/source.py Source": "It has a method for each function of PosixSource.",
}
"""By file, or file and class: why it is as large as it is, in a sentence."""


def above_the_limits() -> Iterator[tuple[str, str]]:
    """Where, and what is too large there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text, file = path.read_text("utf-8"), str(path.relative_to(PACKAGE))
        if (lines := text.count("\n")) > MOST_LINES:
            yield file, f"{lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                for what in too_large(node):
                    yield f"{file} {node.name}", what


def too_large(node: ast.ClassDef) -> Iterator[str]:
    methods = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if len(methods) > MOST_METHODS:
        yield f"{len(methods)} methods"
    for method in methods:
        if method.name == "__init__":
            taken = method.args
            count = len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs]) - 1
            if count > MOST_PARAMETERS:
                yield f"a constructor with {count} parameters"


def test_what_is_above_the_limits_says_why() -> None:
    missing = [f"{where}: {what}" for where, what in above_the_limits() if where not in EXCEPTIONS]
    assert not missing, f"divide these, or say in EXCEPTIONS why they stay whole: {missing}"


def test_no_exception_is_stale() -> None:
    assert set(EXCEPTIONS) <= {where for where, _what in above_the_limits()}


def test_each_exception_has_a_sentence() -> None:
    for where, why in EXCEPTIONS.items():
        assert why.endswith("."), where
        assert len(why.split()) > 4, where
