"""The command ``weigh``: how much files weigh, by their paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from monarchfs.cache.cache import Cache
from monarchfs.control.weights import weights_of
from monarchfs.prefetch.named_files import NamedFiles
from monarchfs.types import EvictionPolicy, OperationError


class Weighing:
    """Constant: its parts."""

    def __init__(self, files: NamedFiles, cache: Cache) -> None:
        self._files = files
        self._cache = cache

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result. Raises OperationError."""
        if self._cache.eviction is not EvictionPolicy.WEIGHTED:
            evict = self._cache.eviction.value
            raise OperationError(f"the mount has --evict {evict}: weights need --evict weighted")
        try:
            weights = weights_of(request)
        except ValueError as exc:
            raise OperationError(str(exc)) from None
        nodes = await self._files.nodes([os.fsencode(path) for path in request["paths"]])
        found = [
            (node.ino, weight)
            for node, weight in zip(nodes, weights, strict=True)
            if node is not None
        ]
        # At once, so that a job is never weighed by half of a request.
        self._cache.weigh(found, replace=request.get("replace") is True)
        return {"files": len(found), "unknown": len(weights) - len(found)}
