"""``python -m tests.demo_picture``: docs/images/demo.svg, the end of a real ``syncd demo``."""

import io
import os
import pty
import re
import sys
from pathlib import Path
from typing import Final

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

_TO: Final = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
_WIDTH: Final = 80
_HIDES, _SHOWS = "\x1b[?25l", "\x1b[?25h"
_REDRAWS: Final = re.compile(r"(?:\x1b\[1A\x1b\[2K)+")


def last_screen(said: str) -> str:
    """What a terminal shows in the end: of a table that was drawn again and again, the last."""
    before, _, rest = said.partition(_HIDES)
    return before + _REDRAWS.split(rest)[-1].replace(_SHOWS, "")


def picture(screen: str) -> str:
    """A screen as SVG, with the reader's own fonts."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True)
    console.print(Text.from_ansi(screen))
    loads_no_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(
        title="syncd demo", code_format=loads_no_fonts.replace("Fira Code,", ""), unique_id="demo"
    )


def main() -> None:
    """Run the demo in a terminal, and draw it."""
    said = bytearray()

    def read(terminal: int) -> bytes:
        said.extend(data := os.read(terminal, 65536))
        return data

    os.environ |= {"COLUMNS": str(_WIDTH), "TERM": "xterm-256color"}
    if pty.spawn([sys.executable, "-m", "syncd", "demo"], read):
        sys.exit("the demo has failed")
    _TO.write_text(picture(last_screen(said.decode().replace("\r", ""))))


if __name__ == "__main__":
    main()
