"""``python -m tests.demo_picture``: docs/images/demo.svg, the screen of a real ``syncd demo``."""

import io
import re
import subprocess
import sys

from rich.console import CONSOLE_SVG_FORMAT, Console

from tests.places import DOCS

_TO = DOCS / "images" / "demo.svg"


def picture(screen: str) -> str:
    """A screen of 80 columns as SVG, with the reader's own fonts."""
    console = Console(record=True, file=io.StringIO(), width=80, force_terminal=True)
    console.print(screen, markup=False, highlight=False)
    loads_no_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    drawn = console.export_svg(
        title="syncd demo", code_format=loads_no_fonts.replace("Fira Code,", ""), unique_id="demo"
    )
    return re.sub(" +$", "", drawn, flags=re.MULTILINE)


def main() -> None:
    """Run the demo, and draw what it prints."""
    demo = [sys.executable, "-m", "syncd", "demo"]
    _TO.write_text(picture(subprocess.check_output(demo, stderr=subprocess.STDOUT, text=True)))


if __name__ == "__main__":
    main()
