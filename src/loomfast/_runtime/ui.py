"""`ctx.ui`: changes to a surface that a person looks at, as patches in the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loomfast._core.arguments import text_argument
from loomfast._errors import BadInputError
from loomfast._events import DEFAULT_SURFACE, MAX_PATH
from loomfast._runtime.journal import Room


class SurfacePatches:
    """Each call appends one SURFACE_PATCH, once per execution, by the rule of `ctx.emit`.

    `path` is a dotted path into the surface (`progress.done`); `surface` names one of several.
    """

    __slots__ = ("_emit",)

    def __init__(self, emit: Callable[[str, object], Room]) -> None:
        self._emit = emit

    def set(self, path: str, value: object, *, surface: str = DEFAULT_SURFACE) -> Room:
        """Put `value` at `path`."""
        return self._patch(surface, "set", path, value)

    def merge(self, path: str, value: Mapping[str, object], *, surface: str = DEFAULT_SURFACE) -> Room:
        """Put each member of `value` into the object at `path`."""
        return self._patch(surface, "merge", path, value)

    def append(self, path: str, value: object, *, surface: str = DEFAULT_SURFACE) -> Room:
        """Add `value` to the end of the list at `path`."""
        return self._patch(surface, "append", path, value)

    def increment(self, path: str, by: int | float = 1, *, surface: str = DEFAULT_SURFACE) -> Room:
        """Add `by` to the number at `path`."""
        return self._patch(surface, "increment", path, by)

    def remove(self, path: str, *, surface: str = DEFAULT_SURFACE) -> Room:
        """Remove what is at `path`."""
        return self._patch(surface, "remove", path, None)

    def _patch(self, surface: str, op: str, path: str, value: object) -> Room:
        text_argument("surface", surface)
        text_argument("path", path)
        if path.count(".") >= MAX_PATH:
            raise BadInputError(f"path: has {path.count('.') + 1} parts, at most {MAX_PATH} can be")
        return self._emit("SURFACE_PATCH", {"surface": surface, "op": op, "path": path, "value": value})
