"""Run as a program: write what the blocks of docs/ print now in place of what they show, where the two differ.

After a change of prices many pages show old numbers: `make docs-outputs` runs all of them (the long ones with
`LONG=1`) and rewrites the outputs. Where a page shows only parts of an output (lines `...`) nothing is rewritten, and
the step is listed to be mended by hand. Read the changes before you commit them: the words around may need them, too.
"""

import sys
import tempfile
from pathlib import Path

from documents import Step, is_as_told
from site_pages import DOCS, LONG, QUICK, run_all


def main(with_long: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        answers = list(zip(QUICK, run_all(QUICK, Path(name)), strict=True))
        if with_long:
            answers += zip(LONG, run_all(LONG, Path(name)), strict=True)
    by_hand = []
    # From the end of each page to its beginning, so that the lines of steps stay right.
    for step, answer in sorted(answers, key=lambda pair: (pair[0].document, -pair[0].line)):
        if not answer["error"] and (step.expected is None or is_as_told(answer["printed"], step.expected)):
            continue
        page = DOCS / step.document
        text = None if answer["error"] else rewritten(page.read_text(), step, answer["printed"])
        if text is None:
            by_hand.append(f"{step} is left to you; it prints\n{answer['error'] or answer['printed']}")
        else:
            page.write_text(text)
            sys.stdout.write(f"{step}: rewritten\n")
    sys.stdout.write("\n".join(by_hand))
    return 1 if by_hand else 0


def rewritten(text: str, step: Step, printed: str) -> str | None:
    """A page with the output of a step as it is now; None where the page shows only parts of it."""
    assert step.expected is not None
    if any(line.endswith("...") for line in step.expected.splitlines()):
        return None
    lines = text.splitlines(keepends=True)
    before, after = "".join(lines[: step.line]), "".join(lines[step.line :])
    output = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return before + after.replace(step.expected, output, 1)


if __name__ == "__main__":
    sys.exit(main(with_long="--long" in sys.argv))
