"""Guarantee 6: events come back as they went in, to the bit."""

from __future__ import annotations

from typing import Any, Final

import pytest

from loomfast import _events as ev
from loomfast._errors import UnsupportedTypeError
from loomfast._kernels import Envelope, fold_events
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, step_started

TEXTS: Final = [
    "plain",
    "a\x00b",
    "\ud800",
    "\udfff\ud800",
    "é\N{SNOWMAN}\U0001f600",
    "\x1e\x1f",
    "' OR 1=1 --",
    "1",
    "1:a:b",
    " ",
]
VALUES: Final[list[Any]] = [
    None,
    float("nan"),
    float("-inf"),
    -0.0,
    1e21,
    2**63,
    10**30,
    {"b": 1, "a": 2, "\udfff": 3, "": {}},
    {"executionId": "q", "forkOf": {"executionId": "q"}},
    [[], {}, "", "a\x00b", "\ud800"],
    *TEXTS,
]


class ValueConformance(Conformance):
    """Payloads, metadata, texts and stamps."""

    @guarantee(6)
    async def test_a_value_comes_back_equal_from_the_payload_and_the_metadata(self) -> None:
        async with self.open_store() as store:
            events = [event("x", 0)]
            events += [event("x", n, "note", value, hint=value) for n, value in enumerate(VALUES, 1)]
            await store.append_batch(events)
            read = await store.read("x")
            assert read == events
            for one, original in zip(read, events, strict=True):
                assert repr(one.payload) == repr(original.payload)
                assert repr(one.metadata) == repr(original.metadata)
                assert (one.body, one.timestamp) == (original.body, original.timestamp)

    @guarantee(6, needs="restart")
    async def test_a_value_comes_back_equal_after_a_restart_with_its_stamps_and_fences(self) -> None:
        async with self.open_store() as store:
            fence = await store.acquire_fence("x")
            events = [event("x", 0, fence=fence)]
            events += [
                event("x", n, "note", value, fence=fence, hint=value, flowEmit=f"{2**64 - n:016x}")
                for n, value in enumerate(VALUES, 1)
            ]
            await store.append_batch(events)
        async with self.open_store() as store:
            read = await store.read("x")
            assert read == events
            assert [repr(one.payload) for one in read] == [repr(one.payload) for one in events]
            assert [repr(one.metadata) for one in read] == [repr(one.metadata) for one in events]

    @guarantee(6)
    @pytest.mark.parametrize(
        "fork_of",
        [{"executionId": "q", "sequence": 4}, {"executionId": 5}, {"executionId": ""}, "q", None, {}],
        ids=str,
    )
    async def test_where_a_fork_comes_from_is_metadata_like_any_other(self, fork_of: Any) -> None:
        async with self.open_store() as store:
            events = [event("x", 0, forkOf=fork_of), event("x", 1, forkOf=fork_of, b=1, a=2)]
            await store.append_batch(events)
            assert await store.read("x") == events
            assert [repr(one.metadata) for one in await store.read("x")] == [
                repr(one.metadata) for one in events
            ]

    @guarantee(6)
    @pytest.mark.parametrize("text", TEXTS, ids=ascii)
    async def test_a_text_comes_back_equal_from_every_place_that_takes_one(self, text: str) -> None:
        async with self.open_store() as store:
            events = [
                event(text, 0, "EXECUTION_STARTED", {"flowId": text, "flowVersion": text, "input": text}),
                event(text, 1, "STEP_STARTED", step_started(text)),
                event(text, 2, "STEP_COMPLETED", {"key": text, "output": text}),
                event(text, 3, "DECISION_RECORDED", {"id": text, "choice": text}),
                event(text, 4, text, {text: text}, **{text: text}),
                event(text, 5, "EXECUTION_SUSPENDED", {"gate": 0, "on": text}),
                event(text, 6, text, text),
            ]
            for one in events:
                await store.append(one)
            await store.acquire_fence(text + text)
            assert await store.read(text) == events
            assert [p.event for p in await store.read_all()] == events
            assert await store.fold(text) == fold_events(None, events)
            summary = (await store.list_executions(status=ev.SUSPENDED))[0]
            assert (summary.execution_id, summary.flow_id) == (text, text)
            assert await store.last_sequence(text) == 6
            assert await store.read("other") == []

    @guarantee(6)
    async def test_every_bit_of_a_stamp_comes_back(self) -> None:
        async with self.open_store() as store:
            stamps = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
            events = [event("x", 0)]
            events += [
                event("x", n, flowEmit=f"{stamp:016x}", fence=2**63 - 1) for n, stamp in enumerate(stamps, 1)
            ]
            await store.append_batch(events)
            read = await store.read("x")
            assert [one.stamp for one in read[1:]] == stamps
            assert read == events
            assert await store.fold("x") == fold_events(None, events)

    @guarantee(6)
    async def test_a_payload_without_a_json_form_is_kept_or_refused_before_anything_is_written(self) -> None:
        async with self.open_store() as store:
            value = object()
            opaque = Envelope("x", 1, "note", ev.Opaque(value), 5)
            await store.append(event("x", 0))
            if store.persists_json:
                with pytest.raises(UnsupportedTypeError) as caught:
                    await store.append_batch([event("x", 1), opaque])
                assert (caught.value.path, caught.value.type_name) == ("$", "object")
                assert await store.last_sequence("x") == 0
            else:
                await store.append(opaque)
                assert (await store.read("x"))[1].payload is value
