"""What a PostgreSQL store knows of executions, and how a judged group of calls becomes one statement.

What lives here: `Ledger`, the heads that are remembered between groups; `Group`, the arrays that the server's
functions `append` and `append_under` take. What must not: connections, waiting.

Theory of operation. A process mostly drives its own executions, so it knows where they stand: it judges a
group by the heads it remembers (`admit`), and sends with the group what it has taken for granted.
The server compares under its lock (`_postgres_schema.py`). A head that is elsewhere comes back, is learned,
and the group is judged again. Refusals are judged the same way and count only once the server has confirmed
every head they rest on. So the rule of admission exists once, in Python, and a group costs one round trip.
A fence that is asked for under a lease is taken to be granted; where the server says that the lease is lost,
the call is marked, and the group is judged again.

An execution that is not remembered and whose first event is sequence 0 is taken to be new. Anything else that
is not remembered is looked up first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from loomfast import _events as ev
from loomfast._errors import LeaseLostError, LoomError, StorageWriteError
from loomfast._kernels import NO_EVENT, Envelope, Head, admit, decode, encode
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.stores._postgres_rows import key_and_long, key_of, load_text, place_of, store_text, to_row
from loomfast.stores._postgres_schema import APPEND_PARAMETERS, HEAD_COLUMNS, UNDER_PARAMETERS
from loomfast.stores._postgres_waking import payloads_of
from loomfast.stores._spi_arguments import check_texts
from loomfast.stores._threads import Call

MAX_HEADS: Final = 10_000

# Events sent in one statement. What is larger is sent in several, in one transaction.
STATEMENT_EVENTS: Final = 500
STATEMENT_BYTES: Final = 4_000_000


def _statement(function: str, parameters: int) -> str:
    return f"SELECT * FROM {function}({', '.join(f'${place}' for place in range(1, parameters + 1))})"


APPEND: Final = _statement("append", len(APPEND_PARAMETERS))
APPEND_UNDER: Final = _statement("append_under", len(UNDER_PARAMETERS))
_LOAD: Final = f"SELECT {HEAD_COLUMNS} FROM executions WHERE key = ANY($1::bytea[])"

_EXPECTED: Final = 3
_HEADS: Final = 10
_EVENTS: Final = 11
_LEASES: Final = 2


class Append(Call):
    """Append these events, all or nothing; answered with None.

    `tag` is stored with every row, and tells afterwards whether it was this append that wrote them.
    `doubtful`: it has been sent, and the answer was lost.
    """

    __slots__ = ("doubtful", "envelopes", "tag")

    def __init__(self, envelopes: Sequence[Envelope], tag: int) -> None:
        super().__init__()
        self.envelopes = envelopes
        self.tag = tag
        self.doubtful = False

    def concerns(self) -> Iterable[str]:
        return {event.execution_id: None for event in self.envelopes}

    def subject(self) -> tuple[str, int | None]:
        """The execution and sequence to name in an error."""
        return self.envelopes[0].execution_id, self.envelopes[0].sequence


class AcquireFence(Call):
    """Raise the execution's token; answered with the new one.

    `under` is the key and token of the lease that must be held; `lost`: the server has said that it is not.
    """

    __slots__ = ("execution_id", "lost", "under")

    def __init__(self, execution_id: str, under: tuple[str, int] | None) -> None:
        check_texts(execution_id)
        super().__init__()
        self.execution_id = execution_id
        self.under = None if under is None else (key_of(under[0]), under[1])
        self.lost = False

    def concerns(self) -> Iterable[str]:
        return (self.execution_id,)

    def subject(self) -> tuple[str, int | None]:
        """The execution and sequence to name in an error."""
        return self.execution_id, None


class Group:
    """A judged group: how its calls are to be answered, and the arguments of the statements that write it."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Append | AcquireFence, Any]] = []
        self.expected: list[tuple[Any, ...]] = []
        self.heads: list[tuple[Any, ...]] = []
        self.rows: list[tuple[Any, ...]] = []
        self.sizes: list[int] = []
        self.told: list[str] = []
        self.leases: list[tuple[bytes, int]] = []  # that must be held
        # The heads as they will stand; those of new executions are numbered below 0.
        self.after: dict[str, Head] = {}
        self.top = 0  # what new executions are numbered from, once the first statement has told

    def statements(self) -> Iterable[tuple[str, list[Any]]]:
        """The statements, each with its arguments.

        In the first, numbers below 0 stand for new executions; set `top` before asking for the second.
        """
        start = self._stop(0)
        first = arguments(self.rows[:start], self.heads, self.expected, self.told)
        if self.leases:
            yield APPEND_UNDER, [*_columns(self.leases, _LEASES), *first]
        else:
            yield APPEND, first
        while start < len(self.rows):
            stop = self._stop(start)
            rows = self.rows[start:stop]
            yield APPEND, arguments([row if row[0] > 0 else (self.top - row[0], *row[1:]) for row in rows])
            start = stop

    @property
    def large(self) -> bool:
        """Whether it takes more than one statement."""
        return self._stop(0) < len(self.rows)

    def _stop(self, start: int) -> int:
        size = 0
        for place in range(start, min(start + STATEMENT_EVENTS, len(self.rows))):
            size += self.sizes[place]
            if size > STATEMENT_BYTES and place > start:
                return place
        return min(start + STATEMENT_EVENTS, len(self.rows))


class Ledger:
    """The heads that a store remembers, by execution id."""

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}

    def unknown(self, calls: Iterable[Append | AcquireFence]) -> list[str]:
        """The executions that must be looked up before these calls can be judged."""
        if len(self._heads) > MAX_HEADS:
            self._heads.clear()
        wanted: dict[str, None] = {}
        begun: set[str] = set()
        for call in calls:
            if isinstance(call, AcquireFence):
                if call.execution_id not in begun:
                    wanted[call.execution_id] = None
                continue
            for event in call.envelopes:
                if event.sequence == 0 and event.fence is None and event.execution_id not in wanted:
                    begun.add(event.execution_id)
                elif event.execution_id not in begun:
                    wanted[event.execution_id] = None
        return [execution_id for execution_id in wanted if execution_id not in self._heads]

    async def look_up(self, connection: AnyConnection, execution_ids: Iterable[str]) -> None:
        """Learn where executions stand from the server."""
        self._heads.update(await load_heads(connection, execution_ids))

    def learn(self, execution_ids: Iterable[str], rows: Iterable[Any]) -> None:
        """Learn where executions stand from rows of `HEAD_COLUMNS`."""
        by_key = {key_of(execution_id): execution_id for execution_id in execution_ids}
        for row in rows:
            self._heads[by_key[row[0]]] = _head_of(row)

    def forget(self, execution_ids: Iterable[str]) -> None:
        for execution_id in execution_ids:
            self._heads.pop(execution_id, None)

    def judge(self, calls: Sequence[Append | AcquireFence]) -> Group:
        """Judge calls one by one, each as those before it leave the heads. Nothing remembered is changed."""
        group = Group()
        concerned: dict[str, None] = {}
        births = 0

        def head_of(execution_id: str) -> Head:
            return group.after.get(execution_id) or self._heads.get(execution_id) or Head()

        for call in calls:
            concerned.update(dict.fromkeys(call.concerns()))
            rows: list[tuple[Any, ...]] = []
            try:
                if isinstance(call, AcquireFence):
                    if call.lost:
                        raise LeaseLostError(call.execution_id)
                    head = head_of(call.execution_id).copy()
                    answer = head.fence = (head.fence or 0) + 1
                    heads = {call.execution_id: head}
                else:
                    answer = None
                    heads = admit(head_of, call.envelopes)
                    places = {execution_id: place_of(execution_id) for execution_id in heads}
                    rows = [to_row(places[event.execution_id], event) for event in call.envelopes]
            except LoomError as error:
                group.outcomes.append((call, error.with_traceback(None)))
                continue
            except struct.error as cause:
                unfit = StorageWriteError(*call.subject(), f"holds a number that no 64 bits hold: {cause}")
                unfit.__cause__ = cause.with_traceback(None)
                group.outcomes.append((call, unfit))
                continue
            for head in heads.values():
                if head.number == 0 and head.last_sequence != NO_EVENT:
                    births += 1
                    head.number = -births
            group.after.update(heads)
            if isinstance(call, AcquireFence):
                if call.under is not None:
                    group.leases.append(call.under)
            else:
                for event, row in zip(call.envelopes, rows, strict=True):
                    group.rows.append((heads[event.execution_id].number, call.tag, *row))
                    group.sizes.append(len(row[-1]))
            group.outcomes.append((call, answer))
        self._describe(group, concerned)
        return group

    def _describe(self, group: Group, concerned: Iterable[str]) -> None:
        """Fill in what is expected of the executions concerned, and how those that change will stand."""
        told: list[str] = []
        for execution_id in concerned:
            before = self._heads.get(execution_id) or Head()
            key, long_id = key_and_long(execution_id)
            group.expected.append((key, before.last_sequence, before.fence))
            head = group.after.get(execution_id)
            if head is None:
                continue
            group.heads.append(head_row(key, long_id, head))
            if before.status not in ("", head.status):
                told.append(execution_id)
        group.told = payloads_of(told)

    def adopt(self, group: Group) -> None:
        """Remember how a group that was written has left its executions."""
        for execution_id, head in group.after.items():
            if head.number < 0:
                head.number = group.top - head.number
            if head.status in ev.END_KIND:
                self._heads.pop(execution_id, None)  # nobody appends to it any more
            else:
                self._heads[execution_id] = head


def arguments(
    rows: Sequence[tuple[Any, ...]],
    heads: Sequence[tuple[Any, ...]] = (),
    expected: Sequence[tuple[Any, ...]] = (),
    told: Sequence[str] = (),
) -> list[Any]:
    """The arguments of `append`. A row is its execution's number, its call's tag, and what `to_row` makes."""
    return [
        *_columns(expected, _EXPECTED),
        *_columns(heads, _HEADS),
        *_columns(rows, _EVENTS),
        told,
    ]


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> Iterable[Sequence[Any]]:
    return zip(*rows, strict=True) if rows else [()] * width


def head_row(key: bytes, long_id: bytes | None, head: Head) -> tuple[Any, ...]:
    """How an execution stands, as `append` takes it."""
    return (
        key,
        long_id,
        head.number or None,
        store_text(head.flow_id),
        head.status,
        head.last_sequence,
        head.fence,
        head.pending,
        encode(sorted(head.in_doubt)) if head.in_doubt else None,
        head.wake_at,
    )


async def load_heads(connection: AnyConnection, execution_ids: Iterable[str]) -> dict[str, Head]:
    """Look up where executions stand; those that are not there have no events."""
    by_key = {key_of(execution_id): execution_id for execution_id in execution_ids}
    heads = dict.fromkeys(by_key.values(), Head())
    for row in await connection.fetch(_LOAD, list(by_key)):
        heads[by_key[row[0]]] = _head_of(row)
    return heads


def _head_of(row: Any) -> Head:
    _, number, flow_id, status, last_sequence, fence, pending, in_doubt, wake_at = row
    if status is None:
        return Head()
    parked: Any = () if in_doubt is None else decode(in_doubt)
    return Head(
        number or 0, load_text(flow_id), status, last_sequence, fence, pending, frozenset(parked), wake_at
    )
