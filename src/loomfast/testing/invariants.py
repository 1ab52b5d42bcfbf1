"""What must hold of every log, whatever happened to the processes that wrote it.

What lives here: `check_invariants`, for a case of the matrix, and `log_faults`, for any log. What must not:
how a case is played (crash), what effects did (world).

It looks at a log from outside and shares nothing with the emit rule, the context or the journal: it must not
repeat their mistakes. Its only help is `clean`, the same scenario without a crash; what each run emitted, as
seen from the flow's side; and where in the log each process began.

Theory of operation
-------------------
*Shape.* Sequences 0, 1, 2 …; one terminal fact, and nothing behind it; each gate opened once and passed once,
in order; each attempt of a step has a number of its own and at most one outcome, and none follows a settled
one; each decision is recorded once; folding the log whole, or event by event, gives one state.

*Nothing lost.* The last run of a flow went through all of it, so every emit it made, served or not, is in the
log, content for content and count for count; and it made what the last run of the clean case made. What only
an effect emits is there at least once.

*Nothing proven twice.* A stamp says "a re-run reproduces this". So of one identity there are never more
stamped events than one run makes.

*No duplicate without a reason.* ADR 0102 lists the duplicates that remain; each leaves a trace. The log is
cut into runs (a new one begins with each process and behind each answer). Within its run

 U  an unstamped emit needs a reason not to be stamped: a step is executing; something ended unsettled before;
    or all copies were logged by earlier runs and something in this one was live (it is a duplicate itself);
 D  an emit of which the log already holds every copy, stamped, needs a step or a decision that was live in
    this run before it: otherwise it was to be served;
 S  a stamped emit is not behind anything in its run that ended unsettled. (A failed attempt that is tried
    again has not ended its step; of a run that was cut short nobody knows whether it would have been.)

What no log shows (emits from inside a decider or effect, or after a decider has raised; a payload without
JSON form) is declared by the scenario (`unstamped`), as are paths that an unsettled outcome decides
(`optional`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from loomfast._events import END_KIND, KIND_NAMES, RESERVED
from loomfast._kernels import Envelope, fold_events
from loomfast.testing.crash import Played
from loomfast.testing.recording import Content, Made, content_of

_ENDS = frozenset(KIND_NAMES[kind] for kind in END_KIND.values())
_OUTCOMES = ("STEP_COMPLETED", "STEP_FAILED", "STEP_CANCELLED")


class InvariantError(AssertionError):
    """A case broke promises. `broken` lists them; the message says how to play the case again."""

    def __init__(self, played: Played, broken: list[str]) -> None:
        listed = "\n".join(f"  - {sentence}" for sentence in broken)
        log = "\n".join(_line(event, played) for event in played.log)
        super().__init__(
            f"scenario {played.scenario.name!r}, crashed "
            f"{' and '.join(map(str, played.crashes)) or 'never'}:\n{listed}\nreplay: {played}\nlog:\n{log}"
        )
        self.played = played
        self.broken = broken


def check_invariants(played: Played, clean: Played) -> None:
    """Raise `InvariantError` unless everything holds of `played`; `clean` is its scenario without a crash."""
    broken = [
        *played.world.violations,
        *log_faults(played.log),
        *_result(played, clean),
        *_emits(played, clean),
    ]
    if broken:
        raise InvariantError(played, broken)


# --- shape ---------------------------------------------------------------------------------------


def log_faults(log: Sequence[Envelope], *, ended: bool = True) -> list[str]:
    """Return what is wrong with a whole log by itself, a sentence each: its shape, its steps, its fold.

    With `ended`, there must be a terminal fact. Which emits it should hold, a log alone does not show.
    """
    return [*_shape(log, ended), *_steps(log), *_folds(log)]


def _shape(log: Sequence[Envelope], ended: bool) -> Iterator[str]:
    if [event.sequence for event in log] != list(range(len(log))):
        yield "the sequences have a gap or a repeat"
    if not log or log[0].event_type != "EXECUTION_STARTED":
        yield "the log does not begin with EXECUTION_STARTED"
    ends = [event.sequence for event in log if event.event_type in _ENDS]
    if len(ends) > 1 or (ended and not ends):
        yield f"{len(ends)} terminal facts, at {ends}; there must be one"
    elif ends and ends[0] != log[-1].sequence:
        yield f"events behind the terminal fact at {ends[0]}"
    opened, passed, decided = 0, 0, set()
    for event in log:
        payload = event.payload
        if event.event_type == "EXECUTION_SUSPENDED":
            if payload["gate"] != opened or opened != passed:
                yield f"gate {payload['gate']} opened at {event.sequence}: expected gate {passed}"
            opened += 1
        elif event.event_type == "EXECUTION_RESUMED":
            if payload["gate"] != passed or passed >= opened:
                yield f"gate {payload['gate']} passed at {event.sequence}: expected gate {passed}"
            if log[event.sequence - 1].event_type != payload["on"]:
                yield f"gate {payload['gate']} passed at {event.sequence} without its answer before it"
            passed += 1
        elif event.event_type == "DECISION_RECORDED":
            if payload["id"] in decided:
                yield f"decision {payload['id']!r} recorded again at {event.sequence}"
            decided.add(payload["id"])


def _steps(log: Sequence[Envelope]) -> Iterator[str]:
    attempts: dict[str, int] = {}
    open_since: dict[str, int] = {}
    settled: set[str] = set()
    doubted: set[str] = set()
    for event in log:
        kind = event.event_type
        if kind not in (*_OUTCOMES, "STEP_STARTED", "EFFECT_INDOUBT"):
            continue
        payload, at = event.payload, event.sequence
        key: str = payload["key"]
        if key in settled:
            yield f"{kind} of step {key!r} at {at}, which was settled before"
        if kind == "STEP_STARTED":
            if payload["attempt"] != attempts.get(key, 0) + 1:
                yield f"attempt {payload['attempt']} of step {key!r} at {at}: expected the next number"
            attempts[key] = payload["attempt"]
            open_since[key] = at
            doubted.discard(key)
        elif kind == "EFFECT_INDOUBT":
            doubted.add(key)
        else:
            if open_since.pop(key, None) is None and key not in doubted:
                yield f"{kind} of step {key!r} at {at}: no attempt is open"
            if kind == "STEP_COMPLETED" or (kind == "STEP_FAILED" and payload["typed"]):
                settled.add(key)


def _folds(log: Sequence[Envelope]) -> Iterator[str]:
    if not log:
        return
    whole = fold_events(None, log)
    state = None
    for event in log:
        state = fold_events(state, (event,))
    if state != whole:
        yield "folding the log event by event gives another state than folding it whole"


def _result(played: Played, clean: Played) -> Iterator[str]:
    ours, theirs = played.log[-1:], clean.log[-1:]
    if not ours or not theirs:
        return
    if ours[0].event_type != theirs[0].event_type:
        yield f"ended with {ours[0].event_type}, and cleanly with {theirs[0].event_type}"
    elif not played.scenario.same(ours[0].payload, theirs[0].payload):
        yield f"ended with {ours[0].payload}, and cleanly with {theirs[0].payload}"


# --- emits ---------------------------------------------------------------------------------------


def _is_emit(log: list[Envelope], place: int) -> bool:
    event = log[place]
    if event.event_type in RESERVED:
        return False
    after = log[place + 1] if place + 1 < len(log) else None
    is_answer = (
        after is not None
        and after.event_type == "EXECUTION_RESUMED"
        and after.payload["on"] == event.event_type
    )
    return not is_answer


def _emits(played: Played, clean: Played) -> Iterator[str]:
    optional = frozenset(played.scenario.optional)
    emits = [event for place, event in enumerate(played.log) if _is_emit(played.log, place)]
    logged = Counter(content_of(event) for event in emits)
    last, clean_last = (Counter(made.content for made in _last_run(case)) for case in (played, clean))
    for content, count in last.items():
        if logged[content] < count:
            yield f"emit {content} lost: the log has {logged[content]} of {count}"
    for content in {content_of(event) for place, event in enumerate(clean.log) if _is_emit(clean.log, place)}:
        if content not in logged and content[0] not in optional:
            yield f"emit {content} lost: only the clean log has it"
    if played.scenario.cancel_on is None:
        for content in (last - clean_last) + (clean_last - last):
            if content[0] not in optional and content[0] not in played.scenario.unstamped:
                yield f"the last run made emit {content} {last[content]} times, cleanly {clean_last[content]}"

    most: Counter[int | None] = Counter()
    most_alike: Counter[Content] = Counter()
    for run in (*played.world.runs, *clean.world.runs):
        most |= Counter(made.digest for made in run.made)
        most_alike |= Counter(made.content for made in run.made)
    stamped = Counter(event.stamp for event in emits if event.stamp is not None)
    for event in emits:
        if event.stamp is not None and stamped[event.stamp] > most[event.stamp]:
            yield f"emit {content_of(event)} at {event.sequence}: stamped more often than a run makes it"
    yield from _reasons(played, most_alike)


def _last_run(case: Played) -> list[Made]:
    return case.world.runs[-1].made if case.world.runs else []


def _reasons(played: Played, most: Counter[Content]) -> Iterator[str]:
    """Rules U, D and S; see the top of this file. `most`: how often one run makes an emit of this content."""
    proven: Counter[Content] = Counter()
    for run, cut in _runs(played):
        executing: set[str] = set()
        failed: set[str] = set()
        live = unsettled = False
        for event in run:
            kind = event.event_type
            if kind == "STEP_STARTED":
                executing.add(event.payload["key"])
                failed.discard(event.payload["key"])
                live = True
            elif kind == "DECISION_RECORDED":
                live = True
            elif kind == "EFFECT_INDOUBT":
                unsettled = True
            elif kind in _OUTCOMES:
                payload = event.payload
                executing.discard(payload["key"])
                unsettled = unsettled or kind == "STEP_CANCELLED"
                if kind == "STEP_FAILED" and not payload["typed"]:
                    failed.add(payload["key"])
            elif _is_emit(played.log, event.sequence):
                content = content_of(event)
                complete = proven[content] >= most[content] > 0
                if complete and not live:
                    yield f"emit {content} appended at {event.sequence}, though all proved it a replay"
                if event.stamp is not None:
                    proven[content] += 1
                    over = set() if cut else failed - _retried(run, event.sequence)
                    if unsettled or over or kind in played.scenario.unstamped:
                        yield f"emit {content} stamped at {event.sequence}, though a re-run may not make it"
                elif not (
                    executing
                    or failed
                    or unsettled
                    or (complete and live)
                    or kind in played.scenario.unstamped
                ):
                    yield f"emit {content} unstamped at {event.sequence} without a reason"


def _retried(run: list[Envelope], sequence: int) -> set[str]:
    """Return the steps that have a further attempt in this run after `sequence`."""
    return {
        event.payload["key"]
        for event in run
        if event.event_type == "STEP_STARTED" and event.sequence > sequence
    }


def _runs(played: Played) -> Iterator[tuple[list[Envelope], bool]]:
    """Cut the log into runs: one begins with each process, behind each answer, behind each resolution.

    Beside each run stands whether a crash cut it short.
    """
    run: list[Envelope] = []
    doubted: set[str] = set()
    for event in played.log:
        if event.sequence in played.lives and run:
            yield run, True
            run = []
        run.append(event)
        kind = event.event_type
        if kind == "EFFECT_INDOUBT":
            doubted.add(event.payload["key"])
        resolved = kind in _OUTCOMES and event.payload["key"] in doubted
        if resolved:
            doubted.discard(event.payload["key"])
        if kind == "EXECUTION_RESUMED" or resolved:
            yield run[:-1] if resolved else run, False
            run = []
    yield run, False


def _line(event: Envelope, played: Played) -> str:
    life = "─── a process begins\n" if event.sequence in played.lives else ""
    stamp = "*" if event.stamp is not None else ""
    text = str(event.payload)
    return f"{life}{event.sequence:4} {event.event_type}{stamp} {text[:100]}"
