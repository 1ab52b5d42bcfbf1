"""`loomfast info`: what is installed, for a person or for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import apsw
import click

import loomfast
from loomfast.cli.output import print_json


def facts() -> dict[str, Any]:
    """Return versions, kernels, store drivers and platform, as plain JSON values."""
    return {
        "version": loomfast.__version__,
        "implementation": loomfast.implementation(),
        "eventSchemaVersion": loomfast.EVENT_SCHEMA_VERSION,
        "kernelAbiVersion": loomfast.KERNEL_ABI_VERSION,
        "stores": {
            "memory": "built in",
            "sqlite": f"SQLite {apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})",
            "postgresql": driver("asyncpg", extra="postgres"),
        },
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu": cpu(),
    }


def driver(package: str, *, extra: str) -> str:
    """Return a driver's version, or how to install it."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no driver (pip install 'loomfast[{extra}]')"


def cpu() -> str:
    """Return the processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def info(*, as_json: bool) -> None:
    """Show versions, the kernels in use, store drivers and the platform."""
    if as_json:
        print_json(facts())
        return
    for name, value in facts().items():
        if isinstance(value, dict):
            value = "; ".join(f"{key}: {of}" for key, of in value.items())
        click.echo(f"{name:<20}{value}")
