"""The web service with a writer that a test holds in its hand; run as `python writer.py FOLDER …`.

What lives here: a writer that keeps a ledger of what it begins and has done, in `FOLDER/ledger`, and is done
with a section only when `FOLDER/permits` is longer than its number. So a test knows at which step the process
is when it kills it. The other arguments are those of the service.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def words(section: int) -> list[str]:
    """What the writer makes of a section: some words stand there twice, and in every section."""
    return ["the ", "part ", f"{section} ", "of ", "the ", "report. "]


def main() -> None:
    """Serve."""
    sys.path.insert(0, EXAMPLES)
    folder = Path(sys.argv.pop(1))
    from web_service import __main__, report

    def note(line: str) -> None:
        with open(folder / "ledger", "a") as ledger:
            ledger.write(line + "\n")

    async def compose(topic: str, section: int) -> list[str]:
        note(f"begun {section}")
        while (folder / "permits").stat().st_size <= section:
            await asyncio.sleep(0.005)
        note(f"done {section}")
        return words(section)

    report.compose = compose
    __main__.main()


if __name__ == "__main__":
    main()
