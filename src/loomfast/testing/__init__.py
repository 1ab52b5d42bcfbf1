"""The testing kit: what loomfast is tested with, and what flows and stores can be tested with.

Virtual time (`run_virtual`, `VirtualClock`) and the crash matrix (`crash_matrix`, `check_invariants`). The
conformance kit for stores is a package of its own beside them, `loomfast.testing.conformance`, since it needs
pytest. The rest of loomfast imports nothing of it.
"""

from loomfast.testing.crash import (
    MatrixReport,
    Played,
    Scenario,
    crash_matrix,
    look_at_the_world,
    play_case,
)
from loomfast.testing.crashing import Crash, CrashingStore, ProcessKilled
from loomfast.testing.invariants import InvariantError, check_invariants, log_faults
from loomfast.testing.time import (
    VirtualClock,
    VirtualExecutor,
    VirtualLoop,
    VirtualTimeError,
    counted_ids,
    run_virtual,
    running_loop,
    seeded_entropy,
)
from loomfast.testing.world import ProcessGoneError, World

__all__ = [
    "Crash",
    "CrashingStore",
    "InvariantError",
    "MatrixReport",
    "Played",
    "ProcessGoneError",
    "ProcessKilled",
    "Scenario",
    "VirtualClock",
    "VirtualExecutor",
    "VirtualLoop",
    "VirtualTimeError",
    "World",
    "check_invariants",
    "counted_ids",
    "crash_matrix",
    "log_faults",
    "look_at_the_world",
    "play_case",
    "run_virtual",
    "running_loop",
    "seeded_entropy",
]
