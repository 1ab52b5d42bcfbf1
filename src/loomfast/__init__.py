"""loomfast: an embeddable durable-execution kernel whose hot path is compiled.

A flow is a plain async function. Everything it does becomes an event in an append-only log; its state is
`fold_events(None, events)`. This module and `loomfast.testing` are the doors: what they do not name is
private.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loomfast._core.definitions import FlowDefinition, StepDefinition, flow, step
from loomfast._core.retry import RetryPolicy
from loomfast._core.snapshots import Snapshot, snapshot_of, state_of
from loomfast._errors import (
    BadInputError,
    BadSnapshotError,
    BeyondLogError,
    BranchExistsError,
    CircularValueError,
    ConflictError,
    DeterminismError,
    DuplicateEnvelopeIdError,
    DuplicateSequenceError,
    ExecutionAlreadyExistsError,
    ExecutionCancelledError,
    ExecutionEndedError,
    ExecutionFailedError,
    ExecutionSetAsideError,
    FlowError,
    GateRefusedError,
    InputValidationError,
    InstallError,
    JsonFormError,
    JsonTextError,
    KernelMissingError,
    KeyCollisionError,
    LeaseHeldError,
    LeaseLostError,
    LoomError,
    MalformedEventError,
    NotAStoreError,
    PrefixTruncatedError,
    ResumeIdReusedError,
    RunOverError,
    RuntimeClosedError,
    SnapshotNeededError,
    StaleFenceError,
    StaleKernelError,
    StartFencedOutError,
    StepFailedError,
    StepRefusedError,
    StepTimeoutError,
    StorageError,
    StorageWriteError,
    StoreBusyError,
    StoreClosedError,
    StoreCorruptError,
    StoreFullError,
    StoreLostError,
    StoreMissingError,
    StoreReadError,
    StoreReadOnlyError,
    StoreTooNewError,
    StoreUnreachableError,
    TooDeepError,
    UnknownBranchError,
    UnknownExecutionError,
    UnknownFlowError,
    UnknownScheduleError,
    UnsupportedTypeError,
)
from loomfast._events import EVENT_SCHEMA_VERSION, KERNEL_ABI_VERSION
from loomfast._kernels import (
    MAX_DEPTH,
    Envelope,
    State,
    Table,
    Trie,
    canonical,
    decode,
    digest,
    encode,
    encode_digest,
    fnv1a64,
    fold_events,
    format_digest,
    implementation,
    parse_digest,
)
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.deps import DeterminismPolicy
from loomfast._runtime.effects import EffectContext, EffectMiddleware
from loomfast._runtime.following import ExecutionEvents
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.journal import ExecutionJournal
from loomfast._runtime.recovering import Recovered
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import (
    Branch,
    BranchRegistry,
    CoalescingEventStore,
    EventStore,
    EventStoreDecorator,
    ExecutionSummary,
    Lease,
    LeaseStore,
    MemoryEventStore,
    PositionedEvent,
    Recovery,
    RecoveryStore,
    ReplicaReadEventStore,
    ScheduleRow,
    SnapshotStore,
    SnapshotSummary,
    TenantScopedEventStore,
    TimerStore,
    Tip,
    Wake,
    open_store,
)

if TYPE_CHECKING:
    from loomfast._core.schedules import (
        CatchUp,
        Cron,
        Every,
        Occurrence,
        ScheduleDefinition,
        Trigger,
        occurrence_id,
        occurrence_of,
    )
    from loomfast._nodes.allocating import Allocation, Dispatch, LocalWorkerRuntime
    from loomfast._nodes.app import App
    from loomfast._nodes.attempts import Dispatched, DispatchWorker
    from loomfast._nodes.dispatching import LocalDispatcher, SupervisingDispatcher
    from loomfast._nodes.limits import Limits
    from loomfast._nodes.schedules import Schedules
    from loomfast._nodes.timers import TimerService
    from loomfast._nodes.worker import Health, Worker
    from loomfast._vectors import FOLD_VECTORS
    from loomfast.projections import Projection, ProjectionRuntime, UiProjection
    from loomfast.readmodels import CatchUpReader, FilePosition, PositionKeeper, ReadModel
    from loomfast.stores import PostgresEventStore, SqliteEventStore
    from loomfast.verification import Fault, Verified, verify_store

__version__ = "0.1.0"

__all__ = [
    "EVENT_SCHEMA_VERSION",
    "FOLD_VECTORS",
    "KERNEL_ABI_VERSION",
    "MAX_DEPTH",
    "Allocation",
    "App",
    "BadInputError",
    "BadSnapshotError",
    "BeyondLogError",
    "Branch",
    "BranchExistsError",
    "BranchRegistry",
    "CatchUp",
    "CatchUpReader",
    "CircularValueError",
    "Clock",
    "CoalescingEventStore",
    "ConflictError",
    "Cron",
    "DeterminismError",
    "DeterminismPolicy",
    "Dispatch",
    "DispatchWorker",
    "Dispatched",
    "DuplicateEnvelopeIdError",
    "DuplicateSequenceError",
    "EffectContext",
    "EffectMiddleware",
    "Envelope",
    "EventStore",
    "EventStoreDecorator",
    "Every",
    "ExecutionAlreadyExistsError",
    "ExecutionCancelledError",
    "ExecutionEndedError",
    "ExecutionEvents",
    "ExecutionFailedError",
    "ExecutionHandle",
    "ExecutionJournal",
    "ExecutionSetAsideError",
    "ExecutionSummary",
    "Fault",
    "FilePosition",
    "FlowDefinition",
    "FlowError",
    "GateRefusedError",
    "Health",
    "InputValidationError",
    "InstallError",
    "JsonFormError",
    "JsonTextError",
    "KernelMissingError",
    "KeyCollisionError",
    "Lease",
    "LeaseHeldError",
    "LeaseLostError",
    "LeaseStore",
    "Limits",
    "LocalDispatcher",
    "LocalWorkerRuntime",
    "LoomError",
    "MalformedEventError",
    "MemoryEventStore",
    "NotAStoreError",
    "Occurrence",
    "PositionKeeper",
    "PositionedEvent",
    "PostgresEventStore",
    "PrefixTruncatedError",
    "Projection",
    "ProjectionRuntime",
    "ReadModel",
    "Recovered",
    "Recovery",
    "RecoveryStore",
    "ReplicaReadEventStore",
    "ResumeIdReusedError",
    "RetryPolicy",
    "RunOverError",
    "RuntimeClosedError",
    "ScheduleDefinition",
    "ScheduleRow",
    "Schedules",
    "Snapshot",
    "SnapshotNeededError",
    "SnapshotStore",
    "SnapshotSummary",
    "SqliteEventStore",
    "StaleFenceError",
    "StaleKernelError",
    "StartFencedOutError",
    "State",
    "StepDefinition",
    "StepFailedError",
    "StepRefusedError",
    "StepTimeoutError",
    "StorageError",
    "StorageWriteError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreCorruptError",
    "StoreFullError",
    "StoreLostError",
    "StoreMissingError",
    "StoreReadError",
    "StoreReadOnlyError",
    "StoreTooNewError",
    "StoreUnreachableError",
    "SupervisingDispatcher",
    "SystemClock",
    "Table",
    "TenantScopedEventStore",
    "TimerService",
    "TimerStore",
    "Tip",
    "TooDeepError",
    "Trie",
    "Trigger",
    "UiProjection",
    "UnknownBranchError",
    "UnknownExecutionError",
    "UnknownFlowError",
    "UnknownScheduleError",
    "UnsupportedTypeError",
    "Verified",
    "Wake",
    "Worker",
    "WorkflowContext",
    "WorkflowRuntime",
    "__version__",
    "canonical",
    "decode",
    "digest",
    "encode",
    "encode_digest",
    "flow",
    "fnv1a64",
    "fold_events",
    "format_digest",
    "implementation",
    "occurrence_id",
    "occurrence_of",
    "open_store",
    "parse_digest",
    "snapshot_of",
    "state_of",
    "step",
    "verify_store",
]

# The driver of PostgreSQL is an optional extra: `import *` gives what is installed.
if find_spec("asyncpg") is None:
    __all__.remove("PostgresEventStore")

# What most programs do not use, by where it is: imported on first use.
_LATER = {
    "CatchUp": "_core.schedules",
    "Cron": "_core.schedules",
    "Every": "_core.schedules",
    "Occurrence": "_core.schedules",
    "ScheduleDefinition": "_core.schedules",
    "Trigger": "_core.schedules",
    "occurrence_id": "_core.schedules",
    "occurrence_of": "_core.schedules",
    "Allocation": "_nodes.allocating",
    "Dispatch": "_nodes.allocating",
    "LocalWorkerRuntime": "_nodes.allocating",
    "App": "_nodes.app",
    "Dispatched": "_nodes.attempts",
    "DispatchWorker": "_nodes.attempts",
    "LocalDispatcher": "_nodes.dispatching",
    "SupervisingDispatcher": "_nodes.dispatching",
    "Limits": "_nodes.limits",
    "Schedules": "_nodes.schedules",
    "TimerService": "_nodes.timers",
    "Health": "_nodes.worker",
    "Worker": "_nodes.worker",
    "FOLD_VECTORS": "_vectors",
    "Projection": "projections",
    "ProjectionRuntime": "projections",
    "UiProjection": "projections",
    "CatchUpReader": "readmodels",
    "FilePosition": "readmodels",
    "PositionKeeper": "readmodels",
    "ReadModel": "readmodels",
    "PostgresEventStore": "stores",
    "SqliteEventStore": "stores",
    "Fault": "verification",
    "Verified": "verification",
    "verify_store": "verification",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
