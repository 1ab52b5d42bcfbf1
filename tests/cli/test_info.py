"""`loomfast info`, and the entry point without its library."""

from __future__ import annotations

import subprocess
import sys

import loomfast as lf
from loomfast.cli.info import driver


def test_info_names_versions_implementation_and_stores(invoke):
    result = invoke("info")
    assert result.exit_code == 0
    for text in (
        lf.__version__,
        lf.implementation(),
        lf.EVENT_SCHEMA_VERSION,
        lf.KERNEL_ABI_VERSION,
        "SQLite",
    ):
        assert text in result.stdout


def test_info_as_json_has_the_same_facts(spawn):
    ended = spawn("info", "--json")
    facts = lf.decode(ended.out)
    assert ended.code == 0
    assert facts["implementation"] == lf.implementation()
    assert facts["eventSchemaVersion"] == lf.EVENT_SCHEMA_VERSION
    assert set(facts["stores"]) == {"memory", "sqlite", "postgresql"}
    assert facts["stores"]["postgresql"].startswith("asyncpg ")


def test_a_driver_that_is_not_there_is_named_with_the_way_to_install_it():
    assert driver("no-such-driver", extra="postgres") == "no driver (pip install 'loomfast[postgres]')"


def test_without_click_the_entry_point_says_what_to_install():
    script = "import sys; sys.modules['click'] = None; from loomfast.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "loomfast: the command line needs click; run: pip install 'loomfast[cli]'\n"


def test_importing_loomfast_imports_no_click():
    script = "import loomfast, sys; sys.exit('click' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_an_unknown_command_exits_2(spawn):
    ended = spawn("nope")
    assert ended.code == 2
    assert "No such command 'nope'" in ended.err
