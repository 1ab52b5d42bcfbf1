"""A worker's health over HTTP, and its metrics by OpenTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import loomfast as lf
from loomfast._nodes.health import AT_A_TIME, REQUEST_S, serve_health
from loomfast._nodes.telemetry import Telemetry


@lf.flow
async def naps(ctx: lf.WorkflowContext, input: Any) -> None:
    await ctx.sleep(0.01)


async def asked(address: tuple[str, int], request: bytes) -> tuple[str, bytes]:
    """Send a request; return the status line and the body of the answer."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), body


async def test_health_is_told_over_http() -> None:
    worker = lf.Worker(lf.MemoryEventStore(), lf.App([naps]))
    async with serve_health(worker, "127.0.0.1", 0) as address:
        status, _ = await asked(address, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status.startswith("HTTP/1.1 503")
        async with worker:
            while not worker.health().well:
                await asyncio.sleep(0.01)
            status, body = await asked(address, b"GET /healthz?full=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status.startswith("HTTP/1.1 200")
            told = lf.decode(body)
            assert (told["phase"], told["well"], told["limit"]) == ("running", True, 100)
            status, body = await asked(address, b"HEAD / HTTP/1.0\r\n\r\n")
            assert (status.split()[1], body) == ("200", b"")
        status, body = await asked(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (status.split()[1], lf.decode(body)["phase"]) == ("503", "closed")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n", "404"),
        (b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", "405"),
    ],
)
async def test_what_is_not_asked_for_health_is_told_so(request_: bytes, status: str) -> None:
    async with serve_health(lf.Worker(lf.MemoryEventStore(), lf.App([naps])), "127.0.0.1", 0) as address:
        said, _ = await asked(address, request_)
        assert said.split()[1] == status


@pytest.mark.parametrize("request_", [b"\0\1\2\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b""])
async def test_what_is_no_request_ends_its_connection_and_no_other(request_: bytes) -> None:
    async with serve_health(lf.Worker(lf.MemoryEventStore(), lf.App([naps])), "127.0.0.1", 0) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_)
        if writer.can_write_eof():
            writer.write_eof()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        status, _ = await asked(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status.split()[1] == "503"


async def test_whoever_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REQUEST_S == 5.0
    monkeypatch.setattr("loomfast._nodes.health.REQUEST_S", 0.05)
    async with serve_health(lf.Worker(lf.MemoryEventStore(), lf.App([naps])), "127.0.0.1", 0) as address:
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b""
        writer.close()


async def test_many_who_say_nothing_keep_nobody_out_and_do_not_hold_up_the_end() -> None:
    async with serve_health(lf.Worker(lf.MemoryEventStore(), lf.App([naps])), "127.0.0.1", 0) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(3 * AT_A_TIME)]
        async with asyncio.timeout(REQUEST_S - 1):
            status, _ = await asked(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status.split()[1] == "503"
    async with asyncio.timeout(REQUEST_S - 1):
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


# --- metrics -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected() -> InMemoryMetricReader:
    """OpenTelemetry takes one provider per process."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    return reader


def points(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_a_worker_measures_what_it_does(collected: InMemoryMetricReader) -> None:
    store = lf.MemoryEventStore()
    for name, flow_id in (("left", "naps"), ("strange", "unknown")):
        payload = {"flowId": flow_id, "flowVersion": naps.version, "input": None}
        await store.append(lf.Envelope.make(name, 0, "EXECUTION_STARTED", payload, 0))
    async with lf.Worker(store, lf.App([naps]), sweep_s=0.05) as worker:
        await worker.runtime.handle("left").result()
        measured = points(collected)
        while not {"loomfast.worker.woken", "loomfast.worker.failed"} <= measured.keys():
            await asyncio.sleep(0.01)
            measured = points(collected)
    assert measured["loomfast.worker.recovered"][0].value == 1
    assert measured["loomfast.worker.woken"][0].value == 1
    [late] = measured["loomfast.worker.wake_lateness"]
    assert (late.count, late.explicit_bounds[0]) == (1, 0.005)
    [failed] = measured["loomfast.worker.failed"]
    assert (failed.value, failed.attributes) == (1, {"error.type": "UnknownFlowError"})
    assert measured["loomfast.worker.driving"][0].value == 0


async def test_without_opentelemetry_nothing_is_measured_and_all_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    store = lf.MemoryEventStore()
    async with lf.Worker(store, lf.App([naps])) as worker:
        await (await worker.runtime.start(naps)).result()
    telemetry = Telemetry()
    telemetry.woken(3)
    telemetry.failed("x", ValueError())
