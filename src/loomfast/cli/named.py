"""Finding what a program names on the command line as `MODULE:NAME`."""

from __future__ import annotations

import importlib
import os
import sys

from loomfast.cli.output import CommandError


def load_named(name: str, said: str) -> object:
    """Import a module and return an attribute of it. Raises `CommandError`, which quotes `said`."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise CommandError(f"{said} {name}: must be MODULE:NAME")
    sys.path.insert(0, os.getcwd())  # a project's own modules, as `python -m` finds them
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandError(f"{said} {name}: {error}") from error
    if not hasattr(module, attribute):
        raise CommandError(f"{said} {name}: {module_name} has no {attribute}")
    return getattr(module, attribute)
