"""Every error loomfast raises, in one tree.

The branches say who must act: the caller (`BadInputError`), nobody because somebody else was first
(`ConflictError`), the operator of the store (`StorageError`), the author of the flow (`FlowError`), the
installer (`InstallError`). Each class has a stable `code` for programs and a `hint` for people.

Control signals that must pass through a flow's `except Exception` derive from `BaseException` and live
with the runtime, not here.

This module imports nothing of loomfast: every layer may import it.
"""

from __future__ import annotations

from typing import ClassVar


class LoomError(Exception):
    """Root of every error raised by loomfast.

    `str(error)` is one line; `code` is stable; `hint` says what to do, and is a note under tracebacks.
    """

    code: ClassVar[str] = "loom"
    hint: str = ""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.hint and self.hint not in getattr(self, "__notes__", ()):
            self.add_note(self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by args and fields, since no two constructors here take the same arguments."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[LoomError], args: tuple[object, ...], fields: dict[str, object]) -> LoomError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


# --- the caller must act -------------------------------------------------------------------------


class BadInputError(LoomError, ValueError):
    """What the caller handed over cannot be used; nothing was written."""

    code = "bad-input"
    hint = "Nothing was written; correct the argument and call again."


class JsonFormError(BadInputError):
    """A value has no JSON form. `path` is where (`$.items[3].when`), `type_name` is what stood there."""

    code = "no-json-form"
    hint = "Hand over JSON values, or one of the types listed in docs/values.md."

    def __init__(self, path: str, type_name: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.type_name = type_name
        self.reason = reason


class UnsupportedTypeError(JsonFormError):
    """The value's type is not in the table of JSON forms, or its conversion hook failed."""

    code = "unsupported-type"


class KeyCollisionError(JsonFormError):
    """Two keys of one mapping become the same JSON name, such as `1` and `"1"`."""

    code = "key-collision"
    hint = "Use text keys, so that each stays distinct once written."


class CircularValueError(JsonFormError):
    """The value contains itself."""

    code = "circular-value"
    hint = "Hand over a tree; put an id where the value refers back to itself."


class TooDeepError(JsonFormError):
    """The value, or a JSON text, nests deeper than `MAX_DEPTH`."""

    code = "too-deep"
    hint = "Flatten the value; loomfast stores at most MAX_DEPTH levels."


class JsonTextError(BadInputError):
    """A text that should be JSON is not. `offset` counts bytes from its start."""

    code = "bad-json"
    hint = "The text was not written by loomfast or was damaged; restore it from a copy."

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"not JSON at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class MalformedEventError(BadInputError):
    """An event breaks the contract of its kind, or the sequence of its log.

    `execution_id` and `sequence` are `None` where the event is too broken to tell; `field` is the offending
    field, dotted (`payload.gate`).
    """

    code = "malformed-event"
    hint = "Fold the log as it was written: every event, in sequence, unaltered."

    def __init__(self, execution_id: str | None, sequence: int | None, field: str, reason: str) -> None:
        super().__init__(f"execution {execution_id!r}, sequence {sequence}: {field}: {reason}")
        self.execution_id = execution_id
        self.sequence = sequence
        self.field = field
        self.reason = reason


class BadSnapshotError(BadInputError):
    """A persisted state, or a part of one, is not what the fold writes, or not what it claims to be.

    `field` is the offending part; `execution_id` and `sequence` are those of the snapshot, None where a bare
    state was read.
    """

    code = "bad-snapshot"
    hint = "Drop the snapshot and fold the log from its start."

    def __init__(
        self, field: str, reason: str, execution_id: str | None = None, sequence: int | None = None
    ) -> None:
        of = "" if execution_id is None else f"snapshot of execution {execution_id!r} at {sequence}: "
        super().__init__(f"{of}{field}: {reason}")
        self.field = field
        self.reason = reason
        self.execution_id = execution_id
        self.sequence = sequence


class PrefixTruncatedError(BadInputError):
    """What was asked for lies below the cut of a compacted log.

    `sequence` is the first one asked for that is gone, `first_available` the first that is there; sequence 0
    always is.
    """

    code = "prefix-truncated"
    hint = "Load the newest snapshot and read what follows it."

    def __init__(self, execution_id: str, sequence: int, first_available: int) -> None:
        super().__init__(
            f"execution {execution_id!r}: sequence {sequence} was truncated,"
            f" the first available is {first_available}"
        )
        self.execution_id = execution_id
        self.sequence = sequence
        self.first_available = first_available


class SnapshotNeededError(BadInputError):
    """The call would leave a log that no snapshot completes: nothing was removed.

    `sequence` is the lowest one that a snapshot must cover.
    """

    code = "snapshot-needed"
    hint = "Save a snapshot at that sequence or beyond it first."

    def __init__(self, execution_id: str, sequence: int) -> None:
        super().__init__(f"execution {execution_id!r}: no sound snapshot covers sequence {sequence}")
        self.execution_id = execution_id
        self.sequence = sequence


class BeyondLogError(BadInputError):
    """A sequence was named that the log does not hold yet. `last_sequence` is where it ends."""

    code = "beyond-log"
    hint = "Name a sequence up to the log's last; what is not durable yet does not count."

    def __init__(self, execution_id: str, sequence: int, last_sequence: int) -> None:
        super().__init__(
            f"execution {execution_id!r}: sequence {sequence} is beyond its last, {last_sequence}"
        )
        self.execution_id = execution_id
        self.sequence = sequence
        self.last_sequence = last_sequence


class UnknownBranchError(BadInputError):
    """The lineage of this execution has no branch of this name."""

    code = "unknown-branch"
    hint = "List the branches with store.branches.refs(origin_id)."

    def __init__(self, origin_id: str, name: str) -> None:
        super().__init__(f"execution {origin_id!r} has no branch {name!r}")
        self.origin_id = origin_id
        self.name = name


# --- somebody else was first ---------------------------------------------------------------------


class ConflictError(LoomError):
    """Somebody else was first. Nothing of the refused call was written."""

    code = "conflict"
    hint = "Load the state again before deciding anything."

    def __init__(self, execution_id: str, message: str) -> None:
        super().__init__(message)
        self.execution_id = execution_id


class DuplicateSequenceError(ConflictError):
    """The log already holds an event at this sequence. `execution_id` is the id as the store knows it."""

    code = "duplicate-sequence"
    hint = "Another writer drives this execution; load its state again before deciding anything."

    def __init__(self, execution_id: str, sequence: int) -> None:
        super().__init__(execution_id, f"execution {execution_id!r} already has sequence {sequence}")
        self.sequence = sequence


class DuplicateEnvelopeIdError(ConflictError):
    """A store whose envelope ids are unique over all executions already holds this id."""

    code = "duplicate-envelope-id"
    hint = "Two executions wrote one envelope id; look for an id that was minted twice."

    def __init__(self, execution_id: str, envelope_id: str) -> None:
        super().__init__(execution_id, f"envelope id {envelope_id!r} is taken (execution {execution_id!r})")
        self.envelope_id = envelope_id


class StaleFenceError(ConflictError):
    """A newer fencing token has been acquired for this execution, or a token is needed and missing.

    `fence` is the writer's token (None when it had none), `current` the newest.
    """

    code = "stale-fence"
    hint = "This writer has been superseded; stop, and let the newer one drive the execution."

    def __init__(self, execution_id: str, fence: int | None, current: int) -> None:
        held = "no fence" if fence is None else f"fence {fence}"
        super().__init__(execution_id, f"execution {execution_id!r}: {held}, the current one is {current}")
        self.fence = fence
        self.current = current


class ExecutionAlreadyExistsError(ConflictError):
    """`start` with a chosen id found that execution already started. Nothing ran (ADR 0103, D2)."""

    code = "execution-already-exists"
    hint = "Treat it as started: attach with runtime.handle(execution_id), or ignore the repeat."

    def __init__(self, execution_id: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r} already exists")


class LeaseHeldError(ConflictError):
    """Another process holds the lease of this execution: it drives it, or died a moment ago."""

    code = "lease-held"
    hint = "Try again once it rests there; runtime.handle(execution_id) waits for that."

    def __init__(self, execution_id: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r} is leased to another process")


class LeaseLostError(ConflictError):
    """The lease of an execution ran out, or somebody took it over, while it was driven here.

    Its run is stopped, and nothing that it did since is recorded.
    """

    code = "lease-lost"
    hint = "Another process may drive it by now; what stalls this one for longer than lease_ttl_s?"

    def __init__(self, execution_id: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r}: its lease was lost")


class ResumeIdReusedError(ConflictError):
    """An answer with this `resume_id` is on record, and it was another answer. `sequence` is its place."""

    code = "resume-id-reused"
    hint = "Name each answer anew; only a repeat of the same answer has the same resume_id."

    def __init__(self, execution_id: str, resume_id: str, sequence: int) -> None:
        super().__init__(
            execution_id,
            f"execution {execution_id!r}: resume_id {resume_id!r} names another answer, at {sequence}",
        )
        self.resume_id = resume_id
        self.sequence = sequence


class BranchExistsError(ConflictError):
    """The name is taken in this lineage, or the execution is part of a lineage already.

    `name` is the branch that is there, `execution_id` the execution it stands for.
    """

    code = "branch-exists"
    hint = "Choose another name, or use the branch that is there."

    def __init__(self, execution_id: str, name: str) -> None:
        super().__init__(execution_id, f"branch {name!r} stands for execution {execution_id!r} already")
        self.name = name


# --- the operator of the store must act ----------------------------------------------------------


class StorageError(LoomError):
    """The store could not do what was asked, for a reason of its own."""

    code = "storage"
    hint = "Look at the cause, which is the store's own error; other executions are not affected."

    def __init__(self, execution_id: str | None, message: str) -> None:
        super().__init__(message)
        self.execution_id = execution_id


class StorageWriteError(StorageError):
    """A write did not become durable. `__cause__` is the store's own error.

    `sequence` is the first one that was not written, None where the write was not an append. `doubtful`: the
    store was lost before it answered, and the write may have happened all the same.
    """

    code = "storage-write"
    hint = "Nothing acknowledged is lost; mend the store, then recover the execution."
    doubtful = False

    def __init__(self, execution_id: str | None, sequence: int | None, reason: str) -> None:
        about = "the store" if execution_id is None else f"execution {execution_id!r}"
        place = "" if sequence is None else f", sequence {sequence}"
        super().__init__(execution_id, f"{about}{place}: {reason}")
        self.sequence = sequence
        self.reason = reason


class StartFencedOutError(StorageWriteError):
    """A start was refused on its fence twice while nobody has written sequence 0: it may be tried again.

    ADR 0103, L20: the newer token's holder wrote nothing and may be dead.
    """

    code = "start-fenced-out"
    hint = "Start again with a newer fence."


class StoreBusyError(StorageWriteError):
    """The store was locked by another writer for longer than the busy time.

    Nothing was written; safe to repeat.
    """

    code = "store-busy"
    hint = "Repeat the call; if it recurs, find the process that holds the database locked."


class StoreFullError(StorageWriteError):
    """There is no room for the write: the disk, a quota or the greatest size of a file is reached."""

    code = "store-full"
    hint = "Free some space and recover the execution; the store need not be opened again."


class StoreReadOnlyError(StorageWriteError):
    """The store cannot be written: file and folder by this process, or the database by this role."""

    code = "store-read-only"
    hint = "Give this process the right to write there; reads go on."


class StoreLostError(StorageError):
    """The file of the store was deleted, moved or replaced while it was open.

    It is the `__cause__` of what failed: reads see and writes reach a file that nobody else can open.
    """

    code = "store-lost"
    hint = "Close the store and open what is there now; what was acknowledged is in the file that is gone."

    def __init__(self, path: str) -> None:
        super().__init__(None, f"{path}: was deleted, moved or replaced while it was open")
        self.path = path


class StoreClosedError(StorageError):
    """The store has been closed."""

    code = "store-closed"
    hint = "Open a new store; this one's owner has closed it."


class StoreMissingError(StorageError):
    """There is no store at the path, or of the schema, and none was to be made, or none can be there."""

    code = "store-missing"
    hint = "Check where it should be; nothing was created."

    def __init__(self, path: str, reason: str = "no loomfast store is there") -> None:
        super().__init__(None, f"{path}: {reason}")
        self.path = path


class NotAStoreError(StorageError):
    """What is at the path belongs to somebody else. It was not changed."""

    code = "not-a-store"
    hint = "Give the path of a loomfast database, or one where nothing is yet."

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(None, f"{path}: {reason}")
        self.path = path
        self.reason = reason


class StoreTooNewError(StorageError):
    """The store has the tables of a newer loomfast than this one, which cannot tell what they mean."""

    code = "store-too-new"
    hint = "The store was left as it is; every program that opens it needs a loomfast that knows its version."

    def __init__(self, place: str, version: int, known: int) -> None:
        super().__init__(
            None,
            f"{place}: has schema version {version}, this loomfast knows {known} only: upgrade loomfast",
        )
        self.place = place
        self.version = version
        self.known = known


class StoreReadError(StorageError):
    """Something stored could not be read back. `execution_id` names the execution that it concerns.

    `position` is its place in the store's total order, where `read_all` met it.
    """

    code = "storage-read"
    hint = "Other executions are not affected; restore this one from a copy."

    def __init__(self, execution_id: str | None, message: str, *, position: int | None = None) -> None:
        super().__init__(execution_id, message)
        self.position = position


class StoreUnreachableError(StoreReadError):
    """The server of the store could not be reached, or was lost before it answered a read."""

    code = "store-unreachable"
    hint = "Nothing is wrong with what is stored; repeat the call once the server can be reached."


class StoreCorruptError(StoreReadError):
    """The database is damaged: one of its pages or indexes is not what was written, or its end is missing.

    Where a write met it, it is the `__cause__` of the `StorageWriteError`.
    """

    code = "store-corrupt"
    hint = "Run loomfast verify to see what is affected; the rest can be read and exported."


# --- the author of the flow must act -------------------------------------------------------------


class InputValidationError(BadInputError):
    """A flow's input or a gate's answer does not fit the declared schema. Nothing was appended.

    `where` says what was checked (`input of flow 'x'`, `answer to gate 0 ('go')`); `problems` lists
    `(path, reason)` pairs.
    """

    code = "input-validation"
    hint = "Send a value that fits the schema; the execution is unchanged."

    def __init__(self, where: str, problems: list[tuple[str, str]]) -> None:
        super().__init__(f"{where}: " + "; ".join(f"{path}: {reason}" for path, reason in problems))
        self.where = where
        self.problems = problems


class UnknownExecutionError(BadInputError):
    """The store holds no execution of this id."""

    code = "unknown-execution"
    hint = "Check the id, and that this runtime uses the store the execution was started on."

    def __init__(self, execution_id: str) -> None:
        super().__init__(f"no execution {execution_id!r}")
        self.execution_id = execution_id


class UnknownFlowError(BadInputError):
    """This runtime has no flow of the id that the log names."""

    code = "unknown-flow"
    hint = "Pass the flow to WorkflowRuntime(flows=[...])."

    def __init__(self, flow_id: str, execution_id: str | None = None) -> None:
        of = "" if execution_id is None else f" (execution {execution_id!r})"
        super().__init__(f"no flow {flow_id!r} is registered{of}")
        self.flow_id = flow_id
        self.execution_id = execution_id


class UnknownScheduleError(BadInputError):
    """The store has no schedule of this id."""

    code = "unknown-schedule"
    hint = "Make it with Schedules.put, or look at what there is with Schedules.list."

    def __init__(self, schedule_id: str) -> None:
        super().__init__(f"no schedule {schedule_id!r}")
        self.schedule_id = schedule_id


class GateRefusedError(ConflictError):
    """An answer does not fit the execution as it stands: no such gate is open, or another one is."""

    code = "gate-refused"
    hint = "Load the state, look at its pending gate, and answer that one; a passed gate keeps its answer."

    def __init__(self, execution_id: str, event_type: str, reason: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r} does not take {event_type!r}: {reason}")
        self.event_type = event_type
        self.reason = reason


class StepRefusedError(ConflictError):
    """What was said about a step does not fit the execution as it stands."""

    code = "step-refused"
    hint = "Load the state and look at its steps."

    def __init__(self, execution_id: str, key: str, reason: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r}, step {key!r}: {reason}")
        self.key = key
        self.reason = reason


class ExecutionEndedError(ConflictError):
    """The execution has ended otherwise than was asked for."""

    code = "execution-ended"
    hint = "An ended execution keeps its outcome; fork it to take another way."

    def __init__(self, execution_id: str, status: str) -> None:
        super().__init__(execution_id, f"execution {execution_id!r} has already ended: {status}")
        self.status = status


class FlowError(LoomError):
    """Something a flow did, or met."""

    code = "flow"
    hint = "Look at the log: loomfast export DB EXECUTION_ID."


class DeterminismError(FlowError):
    """A re-run asks the log a different question than the one it answers.

    `key` names the call, `sequence` the event that recorded it, `recorded` and `requested` what differs.
    """

    code = "determinism"
    hint = "Keep the path of executions in flight: give changed steps new ids, or branch on a decision."

    def __init__(self, execution_id: str, key: str, sequence: int, recorded: str, requested: str) -> None:
        super().__init__(
            f"execution {execution_id!r}, {key!r} at sequence {sequence}: "
            f"recorded {recorded}, now asked {requested}"
        )
        self.execution_id = execution_id
        self.key = key
        self.sequence = sequence
        self.recorded = recorded
        self.requested = requested


class StepFailedError(FlowError):
    """A step's recorded failure whose class is no longer declared.

    `error` is its `{type, message, data?}`.
    """

    code = "step-failed"
    hint = "Declare the recorded class in the step's failures, so that the flow can catch it."

    def __init__(self, key: str, error: dict[str, object]) -> None:
        super().__init__(f"step {key!r} failed: {error['type']}: {error['message']}")
        self.key = key
        self.error = error


class StepTimeoutError(FlowError, TimeoutError):
    """An attempt of a step took longer than the step's `timeout_s`. Its effect may still be running."""

    code = "step-timeout"
    hint = "Raise timeout_s, give the step a RetryPolicy, or declare StepTimeoutError among its failures."

    def __init__(self, key: str, timeout_s: float) -> None:
        super().__init__(f"step {key!r} took longer than {timeout_s} s")
        self.key = key
        self.timeout_s = timeout_s


class ExecutionFailedError(FlowError):
    """The execution ended `failed`. `error` is its `{type, message, data?}`."""

    code = "execution-failed"
    hint = "The traceback went to the loomfast logger where the flow ran; the log holds the rest."

    def __init__(self, execution_id: str, error: dict[str, object]) -> None:
        super().__init__(f"execution {execution_id!r} failed: {error['type']}: {error['message']}")
        self.execution_id = execution_id
        self.error = error


class ExecutionSetAsideError(FlowError):
    """The execution has crashed too often to be recovered again. `reason` says how often."""

    code = "execution-set-aside"
    hint = "Mend what crashes it, then put it back: runtime.release(execution_id)."

    def __init__(self, execution_id: str, reason: str) -> None:
        super().__init__(f"execution {execution_id!r} is set aside: {reason}")
        self.execution_id = execution_id
        self.reason = reason


class ExecutionCancelledError(FlowError):
    """The execution ended `cancelled`."""

    code = "execution-cancelled"
    hint = "A cancelled execution keeps its log; start or fork another one."

    def __init__(self, execution_id: str, reason: object) -> None:
        super().__init__(f"execution {execution_id!r} was cancelled: {reason}")
        self.execution_id = execution_id
        self.reason = reason


class RuntimeClosedError(LoomError):
    """The runtime was closed; an execution it drove is unharmed and can be recovered."""

    code = "runtime-closed"
    hint = "Use another runtime; what this one drove can be recovered there."

    def __init__(self, execution_id: str | None = None) -> None:
        where = "" if execution_id is None else f"execution {execution_id!r}: "
        super().__init__(f"{where}the runtime is closed")
        self.execution_id = execution_id


class RunOverError(FlowError):
    """A context was used after its run ended."""

    code = "run-over"
    hint = "Await everything a flow starts before it returns; a context belongs to one run."


# --- the installer must act ----------------------------------------------------------------------


class InstallError(LoomError, ImportError):
    """What is installed cannot be used as asked: a kernel is unsound, or a driver is missing."""

    code = "install"
    hint = "Install what is missing, or reinstall loomfast."


class StaleKernelError(InstallError):
    """A compiled kernel was built from other sources than the Python files beside it."""

    code = "stale-kernel"
    hint = "Reinstall loomfast, so that the extensions are built from these sources."


class KernelMissingError(InstallError):
    """LOOMFAST_IMPL=native was asked for and the extensions are not installed."""

    code = "kernel-missing"
    hint = "Install with a C compiler present, or set LOOMFAST_IMPL=auto or pure."
