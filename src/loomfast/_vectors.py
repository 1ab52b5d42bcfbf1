"""FOLD_VECTORS: language-neutral cases `{name, events, state}` by which any kernel's fold can be checked.

`events` is a log in the language-neutral form and `state` what it folds to, in the form `State.to_json`
gives. There is a case for every event kind, the stamp included: a fold that ignores envelope metadata fails.
The file beside this module, `fold_vectors.json`, is meant to be read from other languages too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from loomfast._kernels import decode

FOLD_VECTORS: Final[list[dict[str, Any]]] = decode(Path(__file__).with_name("fold_vectors.json").read_bytes())
