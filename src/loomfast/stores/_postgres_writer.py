"""The one task that appends to a PostgreSQL store: group commit.

What lives here: `Writer`: who shares a transaction, what becomes of a group whose server is lost, and who is
told what. What must not: judging (`_postgres_ledger.py`), SQL of its own but for the little that asks what
happened.

Theory of operation. The task takes what has queued up, at most about `MAX_EVENTS` events, and makes it one
statement, which is one transaction; meanwhile the next group queues up. A lone call waits for nothing but the
end of the turn of the event loop it was made in. Nobody is answered before COMMIT has. A group that is too
large for one statement is sent in several, in one transaction.

Callers are answered a few at a time. What they do next queues up while the others still wait for their turn,
so the server works on the first of them meanwhile, and no turn of the event loop is long.

A refused call has changed nothing, and its neighbours go on. When the transaction itself fails, its calls are
tried one by one, so that only those that fail alone are told so. A lock that is held too long fails all.

When the server is lost, nobody knows whether the group was committed. The task connects again, for as long as
`reconnect_s`, and asks: every row keeps the tag of the append that wrote it, so an append that finds its own
tag in its last row is answered, and the others are judged and sent again. A statement that still runs on the
lost connection does no harm: it either commits before, and then the heads are not where the repeated group
expects them, and the question is asked again; or after, and then it is the late one that writes nothing. What
has queued up meanwhile has waited as well: it is not waited for once more, one behind the other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import Any, Final, TypeAlias

from loomfast._errors import LoomError, StorageWriteError, StoreClosedError
from loomfast._kernels import Envelope
from loomfast.stores._postgres_connections import (
    BUSY,
    Connection,
    Connections,
    Patience,
    is_lost,
    write_error,
)
from loomfast.stores._postgres_ledger import AcquireFence, Append, Group, Ledger
from loomfast.stores._postgres_rows import key_of
from loomfast.stores._threads import ANSWERS_A_TURN, Call, deliver

# Bounds of one group, so that no caller waits for the whole of an endless queue.
MAX_CALLS: Final = 500
MAX_EVENTS: Final = 500
# How many events are judged on the event loop; more are judged on a thread.
_AT_HAND: Final = 500
# How often a group may find its heads elsewhere before it is judged under the lock.
_TRIES_WITHOUT_LOCK: Final = 3

# What a call is told that waits for an event loop which ends.
LOOP_ENDED: Final = "the event loop that opened the store ended before the server answered"

_WRITTEN: Final = (
    "SELECT q.tag FROM unnest($1::bytea[], $2::bigint[], $3::bigint[]) AS q (key, sequence, tag)"
    " JOIN executions x ON x.key = q.key JOIN events e ON e.execution = x.number AND e.sequence = q.sequence"
    " WHERE e.call = q.tag"
)


class Task(Call):
    """A write of another kind, in turn, in a transaction of its own; answered with what `perform` returns.

    `repeat`: doing it twice is as good as once, so it is when nobody knows whether it was committed.
    """

    __slots__ = ("execution_id", "perform", "repeat")

    def __init__(
        self, execution_id: str, perform: Callable[[Connection], Awaitable[Any]], *, repeat: bool
    ) -> None:
        super().__init__()
        self.execution_id = execution_id
        self.perform = perform
        self.repeat = repeat

    def subject(self) -> tuple[str, int | None]:
        """The execution and sequence to name in an error."""
        return self.execution_id, None


Write: TypeAlias = "Append | AcquireFence"
Outcomes: TypeAlias = list[tuple[Call, Any]]


class Writer:
    """Serves `Append`, `AcquireFence` and `Task` in the order of `submit`. Belongs to the home loop."""

    def __init__(self, connections: Connections, connection: Connection) -> None:
        """Begin with a connection that is open; it is the writer's from now on."""
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = connection
        self._ledger = Ledger()
        self._queue: deque[tuple[Write | Task, float]] = deque()  # and when they came
        self._lost_since = 0.0  # when the last connection that was lost was
        self._unreachable: Exception | None = None  # why it could not be made anew
        self._task: asyncio.Task[None] | None = None
        self._answers: deque[tuple[Call, Any]] = deque()
        self._answering = False
        self._closed = False
        self._tags = count(secrets.randbits(62))

    def append(self, envelopes: Sequence[Envelope]) -> Append:
        """Make a call, from any thread's event loop; `submit` it on the store's."""
        return Append(envelopes, self.tag())

    def tag(self) -> int:
        """A number that no other append has."""
        return next(self._tags)

    def submit(self, call: Write | Task) -> None:
        """Queue a call. After `close` it is answered with `StoreClosedError`."""
        if self._closed:
            self.answer([(call, StoreClosedError(call.subject()[0], "the store has been closed"))])
            return
        self._queue.append((call, self._loop.time()))
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Finish what is queued, then close the connection."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self._connection is not None:
            await self._connection.close()

    def terminate(self) -> None:
        """Drop the connection at once."""
        if self._connection is not None:
            self._connection.terminate()

    async def _serve(self) -> None:
        under_way: Sequence[Write | Task] = ()
        try:
            while self._queue:
                calls, came = self._take()
                if calls:
                    under_way = calls
                    self.answer(await self._commit(calls, self._patience(came)))
                else:
                    task, came = self._queue.popleft()
                    assert isinstance(task, Task)  # it is what nothing was taken for
                    under_way = (task,)
                    self.answer([(task, await self._perform(task, self._patience(came)))])
                    del task  # or a long group would keep it alive
                under_way = ()
        except asyncio.CancelledError:
            self._give_up(under_way)
            raise
        finally:
            self._task = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:  # cancelled before its first turn
            self._task = None
            self._give_up(())

    def _give_up(self, under_way: Iterable[Write | Task]) -> None:
        """The event loop ends: tell everybody, since those who wait on other loops go on."""
        waiting, self._queue = self._queue, deque()
        outcomes: Outcomes = []
        for call in under_way:
            error = StorageWriteError(*call.subject(), f"{LOOP_ENDED}, so this may have been written")
            error.doubtful = True
            outcomes.append((call, error))
        outcomes += [(call, StoreClosedError(call.subject()[0], LOOP_ENDED)) for call, _ in waiting]
        self.answer(outcomes)

    def _take(self) -> tuple[list[Write], float]:
        """What goes into the next group, and when the last of it came; a call is never cut."""
        calls: list[Write] = []
        events = 0
        last = 0.0
        while self._queue and len(calls) < MAX_CALLS and events < MAX_EVENTS:
            call, came = self._queue[0]
            if isinstance(call, Task):
                break
            last = came
            self._queue.popleft()
            calls.append(call)
            events += len(call.envelopes) if isinstance(call, Append) else 1
        return calls, last

    def _patience(self, came: float) -> Patience:
        """How long what came then, and has its turn now, goes on trying if the server is or gets lost."""
        lost = self._connection is None or self._connection.is_closed()
        return Patience(self._connections.reconnect_s, max(came, self._lost_since) if lost else None)

    def answer(self, outcomes: Iterable[tuple[Call, Any]]) -> None:
        """Answer calls, each on the event loop it was made on, and some at a turn."""
        elsewhere: Outcomes = []
        for call, outcome in outcomes:
            if call._loop is self._loop:
                self._answers.append((call, outcome))
            else:
                elsewhere.append((call, outcome))
        if elsewhere:
            deliver(elsewhere)
        if self._answers and not self._answering:
            self._answer_some()

    def _answer_some(self) -> None:
        for _ in range(min(ANSWERS_A_TURN, len(self._answers))):
            call, outcome = self._answers.popleft()
            if not call.future.done():  # done already: its caller was cancelled
                call.future.set_result(outcome)
        self._answering = bool(self._answers)
        if self._answering:
            self._loop.call_soon(self._answer_some)

    async def _commit(self, calls: Sequence[Write], patience: Patience) -> Outcomes:
        outcomes: Outcomes = []
        while calls:
            sent = False
            try:
                connection = await self._connected(patience)
                sent = True
                outcomes += await self._settled(connection, calls)
                return outcomes
            except Exception as error:
                self._forget(calls)
                if is_lost(error):
                    self._drop()
                    for call in calls:
                        if isinstance(call, Append):
                            call.doubtful = call.doubtful or sent
                    if await patience.wait():
                        continue
                elif len(calls) > 1 and not isinstance(error, BUSY):
                    for call in calls:
                        outcomes += await self._commit([call], patience)
                    return outcomes
                return outcomes + [(call, _failed(call, error)) for call in calls]
        return outcomes

    async def _perform(self, task: Task, patience: Patience) -> Any:
        """Do a task in a transaction; return what it returns, or its error."""
        while True:
            committing = False
            try:
                connection = await self._connected(patience)
                transaction = connection.transaction()
                await transaction.start()
                try:
                    answer = await task.perform(connection)
                except BaseException:
                    if not connection.is_closed():
                        await transaction.rollback()
                    raise
                committing = True
                await transaction.commit()
                return answer
            except LoomError as error:
                return error.with_traceback(None)
            except Exception as error:
                if is_lost(error):
                    self._drop()
                    if (task.repeat or not committing) and await patience.wait():
                        continue
                return write_error(task.execution_id, None, error, doubtful=committing and is_lost(error))

    def _drop(self) -> None:
        """Give up a connection whose server is lost."""
        if self._connection is not None:
            self._lost_since = self._loop.time()
        self.terminate()
        self._connection = None

    async def _connected(self, patience: Patience) -> Connection:
        """Return the connection, made anew if need be; not if that has failed, and patience is over."""
        if self._connection is None or self._connection.is_closed():
            if self._unreachable is not None and patience.over:
                raise self._unreachable.with_traceback(None)
            try:
                self._connection = await self._connections.connect()
            except Exception as error:
                self._unreachable = error.with_traceback(None)
                raise
            self._unreachable = None
        return self._connection

    async def _settled(self, connection: Connection, calls: Sequence[Write]) -> Outcomes:
        """Write a group. Raises, having written nothing or nobody knows what, when the transaction fails."""
        outcomes: Outcomes = []
        tries = 0
        while True:
            unknown = self._ledger.unknown(calls)
            if unknown:
                await self._ledger.look_up(connection, unknown)
            # Behind the heads, never before: they must not know of a late commit that this does not find.
            written = await self._written(connection, calls)
            outcomes += [(call, None) for call in calls if call in written]
            calls = [call for call in calls if call not in written]
            if tries < _TRIES_WITHOUT_LOCK:
                group = await self._send(connection, calls)
            else:
                async with connection.transaction():
                    await connection.execute("SELECT lock_log()")
                    await self._ledger.look_up(connection, _concerned(calls))
                    if await self._written(connection, calls):
                        continue
                    group = await self._send(connection, calls)
            if group is not None:
                return [*outcomes, *group.outcomes]
            tries += 1

    async def _send(self, connection: Connection, calls: Sequence[Write]) -> Group | None:
        """Judge a group and write it; None, with nothing written, if it was judged by heads that were old."""
        if sum(len(call.envelopes) for call in calls if isinstance(call, Append)) <= _AT_HAND:
            group = self._ledger.judge(calls)
        else:
            group = await asyncio.to_thread(self._ledger.judge, calls)
        if group.large:
            async with connection.transaction():
                written = await self._write(connection, calls, group)
        else:
            written = await self._write(connection, calls, group)
        if not written:
            return None
        self._ledger.adopt(group)
        return group

    async def _write(self, connection: Connection, calls: Sequence[Write], group: Group) -> bool:
        """Write a group; False, with nothing written, if heads or leases were not as thought: learned."""
        first = True
        for statement, arguments in group.statements():
            rows = await connection.fetch(statement, *arguments)
            if first:
                if len(rows) != 1 or rows[0][0] is not None:
                    self._learn(calls, rows)
                    return False
                group.top = rows[0][1]
                first = False
        return True

    def _learn(self, calls: Sequence[Write], rows: Sequence[Any]) -> None:
        """Learn which leases are lost, or else where heads stand: the rows are all of one kind."""
        lost = {(row["key"], row["number"]) for row in rows if row["last_sequence"] is None}
        if not lost:
            self._ledger.learn(_concerned(calls), rows)
            return
        for call in calls:
            if isinstance(call, AcquireFence) and call.under in lost:
                call.lost = True

    async def _written(self, connection: Connection, calls: Sequence[Write]) -> set[Write]:
        """Which of the doubtful calls have been committed after all."""
        doubtful = {call.tag: call for call in calls if isinstance(call, Append) and call.doubtful}
        if not doubtful:
            return set()
        last = [call.envelopes[-1] for call in doubtful.values()]
        rows = await connection.fetch(
            _WRITTEN,
            [key_of(event.execution_id) for event in last],
            [event.sequence for event in last],
            list(doubtful),
        )
        return {doubtful[row[0]] for row in rows}

    def _forget(self, calls: Sequence[Write]) -> None:
        self._ledger.forget(_concerned(calls))


def _concerned(calls: Sequence[Write]) -> Iterable[str]:
    return dict.fromkeys(execution_id for call in calls for execution_id in call.concerns())


def _failed(call: Write, cause: Exception) -> StorageWriteError:
    doubtful = isinstance(call, Append) and call.doubtful
    return write_error(*call.subject(), cause, doubtful=doubtful)
