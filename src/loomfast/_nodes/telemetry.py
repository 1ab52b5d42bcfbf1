"""How a worker fares, as OpenTelemetry metrics.

What lives here: `Telemetry`, the instruments. What must not: exporting them, which is the application's
choice of an SDK. Without the package `opentelemetry-api` (extra `worker`) nothing is measured.

    loomfast.worker.driving         {execution}  up and down: taken up, and not at rest
    loomfast.worker.recovered       {execution}  nobody drove it, and it was taken up
    loomfast.worker.woken           {execution}  its gate's time had come
    loomfast.worker.wake_lateness   s            how long after
    loomfast.worker.set_aside       {execution}  it was found to have crashed too often
    loomfast.worker.failed          {failure}    by `error.type`: what could not go on, and is tried again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METER = "loomfast.worker"
# Bounds of the buckets of lateness, in seconds.
_LATENESS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0]


class Telemetry:
    """The instruments of a worker; those of one process share them."""

    def __init__(self) -> None:
        meter = _meter()
        self._driving = meter.create_up_down_counter(f"{_METER}.driving", "{execution}")
        self._recovered = meter.create_counter(f"{_METER}.recovered", "{execution}")
        self._woken = meter.create_counter(f"{_METER}.woken", "{execution}")
        self._lateness = meter.create_histogram(
            f"{_METER}.wake_lateness", "s", explicit_bucket_boundaries_advisory=_LATENESS
        )
        self._set_aside = meter.create_counter(f"{_METER}.set_aside", "{execution}")
        self._failed = meter.create_counter(f"{_METER}.failed", "{failure}")

    def driving(self, more: int) -> None:
        """So many more executions are driven than before, or fewer."""
        self._driving.add(more)

    def recovered(self) -> None:
        """An execution that nobody drove goes on."""
        self._recovered.add(1)

    def woken(self, late_ms: int) -> None:
        """A gate was passed because its time had come, so long ago."""
        self._woken.add(1)
        self._lateness.record(max(late_ms, 0) / 1000)

    def set_aside(self) -> None:
        """An execution was found to have crashed too often."""
        self._set_aside.add(1)

    def failed(self, key: str, error: Exception) -> None:
        """An execution or a schedule could not go on."""
        self._failed.add(1, {"error.type": type(error).__name__})


def _meter() -> Any:
    try:
        from opentelemetry import metrics
    except ImportError:
        return _Nothing()
    return metrics.get_meter(_METER)


class _Nothing:
    """A meter whose instruments do nothing, and each of them."""

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **options: self
