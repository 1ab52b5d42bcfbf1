"""The one door to the kernels: digest, trie, fold and admission, compiled or pure, always all together.

`LOOMFAST_IMPL` is read once, when this module is first imported:

    auto    (default) compiled when the extensions are installed, else pure
    native  compiled, or `KernelMissingError`
    pure    the Python twins, which are the kernels' specification

Only "our own extension is not there" lets `auto` choose pure. An extension that is there and does not
load, was built from other sources (`REVISION`), or gives a wrong answer to a known question is an error:
a kernel that digests differently would corrupt logs in silence.

Nothing else imports `loomfast._pure` or `loomfast._native`, save the tests and benchmarks that compare them.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from loomfast._errors import BadInputError, KernelMissingError, StaleKernelError

# Raised by one whenever a kernel changes what it accepts, returns or how it is called.
REVISION = 3

_STEMS = ("digest", "trie", "fold", "admission")


def load(implementation: str) -> dict[str, ModuleType]:
    """Import the kernels of `implementation` (`native` or `pure`) and check them.

    Raises `KernelMissingError`, `StaleKernelError`, or whatever the import of a broken extension raises.
    """
    package = f"loomfast._{implementation}"
    kernels: dict[str, ModuleType] = {}
    for stem in _STEMS:
        name = f"{package}.{stem}"
        try:
            kernels[stem] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (package, name):
                raise
            raise KernelMissingError(f"the compiled kernel {name} is not installed") from error
        revision = getattr(kernels[stem], "REVISION", None)
        if revision != REVISION:
            raise StaleKernelError(f"{name} has revision {revision}, this package needs {REVISION}")
    _check_known_answers(kernels)
    return kernels


def _check_known_answers(kernels: dict[str, ModuleType]) -> None:
    digest, trie, fold, admission = (kernels[stem] for stem in _STEMS)
    stamp = digest.digest(0, "NOTE", {"b": [1.0, 1e21, "\ud800"], "a": None})
    counts = trie.Trie().bump(stamp).bump(stamp)
    event = fold.Envelope("k", 0, "EXECUTION_STARTED", b'{"flowId":"f","flowVersion":"1","input":null}', 0)
    wrong = [
        name
        for name, holds in (
            ("digest", stamp == 0x732885E97D8AA751),
            ("trie", counts.get(stamp) == 2 and len(counts) == 1),
            ("fold", fold.fold_events(None, [event]).status == "running"),
            ("admission", admission.admit(lambda _: admission.Head(), [event])["k"].flow_id == "f"),
            ("fold", fold.row_guard(1 << 32 | 7, 21, "k", -1, b"{}") == 0x1D851135),
            ("fold", fold.event_rows(7, 9, [event])[7] == 0x0FA2D494),
        )
        if not holds
    ]
    if wrong:
        raise StaleKernelError(
            f"kernel {wrong[0]} ({digest.__name__}) gives a wrong answer to a known question"
        )


def _choose() -> tuple[str, dict[str, ModuleType]]:
    wanted = os.environ.get("LOOMFAST_IMPL", "auto")
    if wanted == "auto":
        try:
            return "native", load("native")
        except KernelMissingError:
            return "pure", load("pure")
    if wanted not in ("native", "pure"):
        raise BadInputError(f"LOOMFAST_IMPL={wanted!r}: choose auto, native or pure")
    return wanted, load(wanted)


_IMPLEMENTATION, _KERNELS = _choose()


def implementation() -> str:
    """Return `"native"` or `"pure"`: which kernels this process runs on."""
    return _IMPLEMENTATION


if TYPE_CHECKING:
    from loomfast._jsonform import MAX_DEPTH
    from loomfast._pure.admission import NO_EVENT, Head, admit
    from loomfast._pure.digest import (
        canonical,
        decode,
        digest,
        encode,
        encode_digest,
        fnv1a64,
        format_digest,
        parse_digest,
    )
    from loomfast._pure.fold import (
        Envelope,
        State,
        event_rows,
        fold_events,
        fold_guarded,
        fold_rows,
        row_checksum,
    )
    from loomfast._pure.trie import Table, Trie
else:
    _digest, _trie, _fold, _admission = (_KERNELS[stem] for stem in _STEMS)
    MAX_DEPTH = _digest.MAX_DEPTH
    canonical = _digest.canonical
    decode = _digest.decode
    digest = _digest.digest
    encode = _digest.encode
    encode_digest = _digest.encode_digest
    fnv1a64 = _digest.fnv1a64
    format_digest = _digest.format_digest
    parse_digest = _digest.parse_digest
    Trie = _trie.Trie
    Table = _trie.Table
    Envelope = _fold.Envelope
    State = _fold.State
    event_rows = _fold.event_rows
    fold_events = _fold.fold_events
    fold_guarded = _fold.fold_guarded
    fold_rows = _fold.fold_rows
    row_checksum = _fold.row_checksum
    NO_EVENT = _admission.NO_EVENT
    Head = _admission.Head
    admit = _admission.admit

__all__ = [
    "MAX_DEPTH",
    "NO_EVENT",
    "REVISION",
    "Envelope",
    "Head",
    "State",
    "Table",
    "Trie",
    "admit",
    "canonical",
    "decode",
    "digest",
    "encode",
    "encode_digest",
    "event_rows",
    "fnv1a64",
    "fold_events",
    "fold_guarded",
    "fold_rows",
    "format_digest",
    "implementation",
    "parse_digest",
    "row_checksum",
]
