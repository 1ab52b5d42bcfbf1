"""Examples are programs beside the package: these tests import them as their own folder would."""

from __future__ import annotations

import sys

from tests.examples.writer import EXAMPLES

sys.path.insert(0, EXAMPLES)
