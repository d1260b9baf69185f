"""The page of examples: the table of `examples/README.md` and the text of each script."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["examples"]

_FOLDER = Path(__file__).resolve().parents[2] / "examples"


def examples() -> str:
    """The page: what `examples/README.md` says, then one part for each script with its text."""
    told = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"`\1`", (_FOLDER / "README.md").read_text())
    lines = [told.rstrip()]
    for path in sorted(_FOLDER.glob("*.py")):
        lines += ["", f"## {path.name}", "", "```python", path.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"
