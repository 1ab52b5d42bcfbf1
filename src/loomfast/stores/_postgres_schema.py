"""The tables of the PostgreSQL store, their versions, and how they are made and recognised.

What lives here: the migrations, the one function that appends, and telling our schemas from others'. What
must not: connections' life (`_postgres_connections.py`), the rows' meaning.

The order of all events
-----------------------
Positions are given out under one lock (`lock_log`, an advisory lock of the schema) that is held until COMMIT:
whoever has it counts on from the highest position. PostgreSQL lets go of the locks of a transaction only
after its rows are visible. So positions become visible in order and without holes, over all processes: a
reader never passes over one that commits late, because none does, and a transaction that is rolled back
leaves its positions to the next one. The price is one commit at a time for a schema; that is why each process
commits what has queued up together (`_postgres_writer.py`). The lock is taken by the statement that writes,
so it is held for as long as the server works on that, and no client's silence prolongs it; what needs several
statements (a batch of thousands, a copy) is bounded by `idle_in_transaction_session_timeout`. A transaction
of anybody else's, however old, delays nobody. Ordering by `xid8` and the oldest running transaction was the
other way: it lets commits run side by side, but one forgotten transaction anywhere in the cluster stops every
reader.

`append` judges nothing itself. It is told where the executions of a group stand for all that the caller knows
(`admit` has judged by that), and compares under the lock. If all are as expected it writes the
group; if not, it writes nothing and returns those that stand elsewhere, and the caller judges again.

`append_under` is `append` for a group with fences that are asked for under leases: it looks first, under the
same lock, whether these are held. If not, it writes nothing and returns those that are lost: the `key`, the
token as `number`, and no `last_sequence`, which every head has. Whoever has taken a lease over acts on it by
an append or a fence, and so under this lock, behind their acquisition. So the look finds the lease taken over
by everybody whom the fence could stop. No row of `leases` is locked: renewals wait for nobody.

Migrations run in order, in the one transaction that also raises the version, under a lock of the schema's
name; whoever loses the race finds the version raised and does nothing. A migration, once released, is never
edited.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from loomfast._errors import BadInputError, NotAStoreError, StoreMissingError, StoreTooNewError

APPLICATION: Final = "loomfast"
# The first halves of our advisory locks: "LOOM", and a number of its own for migrations.
_LOG_LOCK: Final = 0x4C4F4F4D
_MIGRATION_LOCK: Final = 0x4C4F4F4E
_LONGEST_NAME: Final = 63

# The parameters of `append`, in order: what is expected of every execution concerned, how those that change
# stand afterwards, the events, and whom to tell.
APPEND_PARAMETERS: Final = (
    ("expected_keys", "bytea[]"),
    ("expected_lasts", "bigint[]"),
    ("expected_fences", "bigint[]"),
    ("keys", "bytea[]"),
    ("long_ids", "bytea[]"),
    ("numbers", "bigint[]"),
    ("flow_ids", "bytea[]"),
    ("statuses", "text[]"),
    ("lasts", "bigint[]"),
    ("fences", "bigint[]"),
    ("pendings", "boolean[]"),
    ("in_doubts", "bytea[]"),
    ("wakes", "bigint[]"),
    ("executions", "bigint[]"),
    ("calls", "bigint[]"),
    ("sequences", "bigint[]"),
    ("kinds", "smallint[]"),
    ("stamps", "bigint[]"),
    ("subjects", "bytea[]"),
    ("event_fences", "bigint[]"),
    ("timestamps", "bigint[]"),
    ("checksums", "bigint[]"),
    ("extras", "bytea[]"),
    ("bodies", "bytea[]"),
    ("told", "text[]"),
)
# Those of `append_under`: the leases that must be held, and the same.
UNDER_PARAMETERS: Final = (("lease_keys", "bytea[]"), ("lease_tokens", "bigint[]"), *APPEND_PARAMETERS)

_LOCK: Final = f"pg_advisory_xact_lock({_LOG_LOCK}, hashtext(current_schema()))"

HEAD_COLUMNS: Final = "key, number, flow_id, status, last_sequence, fence, pending, in_doubt, wake_at"

_HEADS: Final = (
    "TABLE (key bytea, number bigint, flow_id bytea, status text, last_sequence bigint, fence bigint,"
    " pending boolean, in_doubt bytea, wake_at bigint)"
)

_APPEND: Final = f"""
    CREATE FUNCTION append({", ".join(f"{name} {kind}" for name, kind in APPEND_PARAMETERS)})
    RETURNS {_HEADS}
    LANGUAGE plpgsql AS $$
    #variable_conflict use_column
    DECLARE
        top bigint;
        newest bigint;
    BEGIN
        PERFORM {_LOCK};
        RETURN QUERY
            SELECT e.key, x.number, x.flow_id, x.status, coalesce(x.last_sequence, -1), x.fence, x.pending,
                   x.in_doubt, x.wake_at
            FROM unnest(expected_keys, expected_lasts, expected_fences) AS e (key, last_sequence, fence)
            LEFT JOIN executions x ON x.key = e.key
            WHERE coalesce(x.last_sequence, -1) <> e.last_sequence OR x.fence IS DISTINCT FROM e.fence;
        IF FOUND THEN
            RETURN;
        END IF;
        SELECT coalesce(max(x.number), 0) INTO top FROM executions x;
        INSERT INTO executions AS x (key, long_id, number, flow_id, status, last_sequence, fence, pending,
                                     in_doubt, wake_at)
            SELECT h.key, h.long_id, CASE WHEN h.number < 0 THEN top - h.number ELSE h.number END, h.flow_id,
                   h.status, h.last_sequence, h.fence, h.pending, h.in_doubt, h.wake_at
            FROM unnest(keys, long_ids, numbers, flow_ids, statuses, lasts, fences, pendings, in_doubts,
                        wakes) AS h
                (key, long_id, number, flow_id, status, last_sequence, fence, pending, in_doubt, wake_at)
            ON CONFLICT (key) DO UPDATE SET
                number = excluded.number, flow_id = excluded.flow_id, status = excluded.status,
                last_sequence = excluded.last_sequence, fence = excluded.fence, pending = excluded.pending,
                in_doubt = excluded.in_doubt, wake_at = excluded.wake_at;
        SELECT coalesce(max(e.position), 0) INTO newest FROM events e;
        INSERT INTO events (execution, call, sequence, kind, stamp, subject, fence, timestamp, checksum,
                            extra, body, position)
            SELECT CASE WHEN v.execution < 0 THEN top - v.execution ELSE v.execution END, v.call, v.sequence,
                   v.kind, v.stamp, v.subject, v.fence, v.timestamp, v.checksum, v.extra, v.body,
                   newest + v.place
            FROM unnest(executions, calls, sequences, kinds, stamps, subjects, event_fences, timestamps,
                        checksums, extras, bodies)
                WITH ORDINALITY AS v (execution, call, sequence, kind, stamp, subject, fence, timestamp,
                                      checksum, extra, body, place);
        PERFORM pg_notify(channel(), notices) FROM unnest(told) AS notices;
        RETURN QUERY SELECT NULL::bytea, top, NULL::bytea, NULL::text, newest, NULL::bigint, NULL::boolean,
                            NULL::bytea, NULL::bigint;
    END $$
"""

_APPEND_UNDER: Final = f"""
    CREATE FUNCTION append_under({", ".join(f"{name} {kind}" for name, kind in UNDER_PARAMETERS)})
    RETURNS {_HEADS}
    LANGUAGE plpgsql AS $$
    #variable_conflict use_column
    BEGIN
        PERFORM {_LOCK};
        RETURN QUERY
            SELECT w.key, w.token, NULL::bytea, NULL::text, NULL::bigint, NULL::bigint, NULL::boolean,
                   NULL::bytea, NULL::bigint
            FROM unnest(lease_keys, lease_tokens) AS w (key, token)
            WHERE NOT EXISTS (SELECT FROM leases l
                              WHERE l.key = w.key AND l.token = w.token AND l.expires_ms > now_ms());
        IF FOUND THEN
            RETURN;
        END IF;
        RETURN QUERY SELECT * FROM append(
            {", ".join(f"append_under.{name}" for name, _ in APPEND_PARAMETERS)});
    END $$
"""

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        # number is NULL while an execution has a fence and no event yet; cut is the first sequence beyond 0
        # that was not truncated. There is room for updates in place on every page.
        """CREATE TABLE executions (
            key bytea PRIMARY KEY,
            long_id bytea,
            number bigint UNIQUE,
            flow_id bytea NOT NULL,
            status text NOT NULL,
            last_sequence bigint NOT NULL,
            fence bigint,
            pending boolean NOT NULL,
            in_doubt bytea,
            wake_at bigint,
            cut bigint NOT NULL DEFAULT 1
        ) WITH (fillfactor = 70)""",
        "CREATE INDEX executions_by_status ON executions (status, number)",
        "CREATE INDEX executions_by_wake ON executions (wake_at, number) WHERE wake_at IS NOT NULL",
        # call tells which append wrote a row, for an append whose answer was lost
        """CREATE TABLE events (
            execution bigint NOT NULL,
            sequence bigint NOT NULL,
            position bigint NOT NULL,
            call bigint NOT NULL,
            stamp bigint,
            fence bigint,
            timestamp bigint NOT NULL,
            checksum bigint NOT NULL,
            kind smallint NOT NULL,
            subject bytea,
            extra bytea,
            body bytea NOT NULL,
            PRIMARY KEY (execution, sequence)
        )""",
        "CREATE UNIQUE INDEX events_by_position ON events (position)",
        """CREATE TABLE snapshots (
            execution bigint NOT NULL,
            sequence bigint NOT NULL,
            schema_version bytea NOT NULL,
            checksum bytea NOT NULL,
            body bytea NOT NULL,
            PRIMARY KEY (execution, sequence)
        )""",
        # origin, execution and parent are numbers of executions; an origin's own row has no parent, no cut
        """CREATE TABLE branches (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            origin bigint NOT NULL,
            key bytea NOT NULL,
            long_name bytea,
            execution bigint NOT NULL UNIQUE,
            parent bigint,
            cut bigint,
            main boolean NOT NULL,
            UNIQUE (origin, key)
        )""",
        "CREATE INDEX branches_by_parent ON branches (parent)",
        """CREATE TABLE leases (
            key bytea PRIMARY KEY,
            owner bytea NOT NULL,
            token bigint NOT NULL,
            expires_ms bigint NOT NULL
        )""",
        "CREATE SEQUENCE lease_tokens",
        """CREATE TABLE recoveries (
            execution bigint PRIMARY KEY,
            crashes bigint NOT NULL,
            progress bigint NOT NULL,
            orderly boolean NOT NULL,
            set_aside bytea
        )""",
        """CREATE TABLE schedules (
            key bytea PRIMARY KEY,
            long_id bytea,
            body bytea NOT NULL,
            next_ms bigint,
            version bigint NOT NULL
        )""",
        "CREATE INDEX schedules_by_time ON schedules (next_ms) WHERE next_ms IS NOT NULL",
        f"CREATE FUNCTION lock_log() RETURNS void LANGUAGE sql AS $$ SELECT {_LOCK} $$",
        """CREATE FUNCTION channel() RETURNS text LANGUAGE sql STABLE AS
            $$ SELECT 'loomfast_' || md5(current_schema()) $$""",
        """CREATE FUNCTION now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS
            $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint $$""",
        _APPEND,
        # The lock keeps tokens of one key in the order of their acquisitions.
        """CREATE FUNCTION acquire_lease(wanted bytea, by_owner bytea, ttl_ms bigint)
            RETURNS TABLE (token bigint, expires_ms bigint) LANGUAGE plpgsql AS $$
            #variable_conflict use_column
            BEGIN
                PERFORM pg_advisory_xact_lock(
                    hashtextextended(encode(wanted, 'hex'), hashtext(current_schema())));
                RETURN QUERY
                    INSERT INTO leases AS l (key, owner, token, expires_ms)
                    VALUES (wanted, by_owner, nextval('lease_tokens'), now_ms() + ttl_ms)
                    ON CONFLICT (key) DO UPDATE
                        SET owner = excluded.owner, token = excluded.token, expires_ms = excluded.expires_ms
                        WHERE l.owner = excluded.owner OR l.expires_ms <= now_ms()
                    RETURNING l.token, l.expires_ms;
            END $$""",
    ),
    (
        # one count for all schedules, so that the versions of one that was deleted do not come again
        "CREATE SEQUENCE schedule_versions",
        "SELECT setval('schedule_versions', coalesce(max(version), 0) + 1, false) FROM schedules",
    ),
    (_APPEND_UNDER,),
)


def check_name(schema: str) -> None:
    """Refuse a name that no schema can have. Raises `BadInputError`."""
    if not schema or "\x00" in schema or schema.startswith("pg_"):
        raise BadInputError(f"schema {schema!r}: must be a name, and not one of PostgreSQL's own")
    try:
        size = len(schema.encode())
    except UnicodeEncodeError:
        raise BadInputError(f"schema {schema!r}: PostgreSQL takes names in UTF-8 only") from None
    if size > _LONGEST_NAME:
        raise BadInputError(f"schema {schema!r}: PostgreSQL takes names of at most {_LONGEST_NAME} bytes")


def quoted(schema: str) -> str:
    """A schema's name as an identifier."""
    return '"' + schema.replace('"', '""') + '"'


async def prepare(connection: asyncpg.Connection[Any], place: str, schema: str, *, create: bool) -> None:
    """Make the tables of this version, or bring an older version's up to date.

    Raises `StoreMissingError` where nothing is and `create` is off, `NotAStoreError` for a schema of somebody
    else's (which is not changed), `StoreTooNewError` for a newer version's.
    """
    version = await _version(connection, place, schema)
    if version == 0 and not create:
        raise StoreMissingError(place)
    if version == len(MIGRATIONS):
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1, hashtext($2))", _MIGRATION_LOCK, schema)
        version = await _version(connection, place, schema)
        if version == len(MIGRATIONS):
            return
        if version == 0:
            exists = await connection.fetchval("SELECT true FROM pg_namespace WHERE nspname = $1", schema)
            if not exists:
                await connection.execute(f"CREATE SCHEMA {quoted(schema)}")
            await connection.execute(
                "CREATE TABLE about (application text NOT NULL, version integer NOT NULL)"
            )
            await connection.execute("INSERT INTO about VALUES ($1, 0)", APPLICATION)
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                await connection.execute(statement)
        await connection.execute("UPDATE about SET version = $1", len(MIGRATIONS))


async def _version(connection: asyncpg.Connection[Any], place: str, schema: str) -> int:
    """The version of a schema's tables: 0 where the schema is missing or empty."""
    found = await connection.fetchrow(
        "SELECT count(*) AS things, bool_or(c.relname = 'about' AND c.relkind = 'r') AS about"
        " FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid WHERE n.nspname = $1",
        schema,
    )
    assert found is not None  # an aggregate has one row
    if not found["things"]:
        return 0
    try:
        about = found["about"] and await connection.fetch("SELECT application, version FROM about")
    except asyncpg.UndefinedColumnError:
        about = None
    if not about or len(about) != 1 or about[0]["application"] != APPLICATION:
        raise NotAStoreError(place, "is not loomfast's schema but another application's")
    version = int(about[0]["version"])
    if version > len(MIGRATIONS):
        raise StoreTooNewError(place, version, len(MIGRATIONS))
    return version
