"""Code blocks of a document, and what they print when they are run as written.

    ```python              a program; a ```text block right after it is what it prints. One whose first line is
                           `# NAME.py: COMMAND` is written to that file and run by that command
    ```console             commands after `$ `, each followed by what it prints (nothing there: anything)
    ```text                anywhere else: a drawing
    ```LANGUAGE title="F"  the file F, which later blocks of the document need

In expected output a line `...` stands for any number of lines, ` ...` at the end of a line for the rest of it, and
spaces at the end of a line do not count. Commands that start with `make` are not run but looked up (`make --dry-run`),
since `make test` is what runs the tests. A comment on the line before a block says what is special about it:
`<!-- exhaustive -->` leaves it to `make test-full`, because it takes long, and `<!-- fails -->` says that its command
ends with an error, which is what is shown.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

LANGUAGES = ("python", "console", "text", "bibtex")
NAMED = re.compile(r"# (\w+\.py): (.+)\n")
FENCE = re.compile(
    r'^(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One thing to run: a program or a command, what it is said to print (None: not said), and a file it needs.

    A step without a command only writes its file. `mark` is what the comment before its block says.
    """

    document: str
    line: int
    command: tuple[str, ...] | str
    expected: str | None
    file: tuple[str, str] | None = None
    mark: str = ""

    @property
    def is_exhaustive(self) -> bool:
        """Whether it takes so long that only `make test-full` runs it."""
        return "exhaustive" in self.mark.split()

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Block:
    """A fenced block; `title` is the file that it shows, if it shows one."""

    line: int
    language: str
    text: str
    title: str = ""
    mark: str = ""


def blocks(text: str) -> list[Block]:
    """Every fenced block of a document."""
    return [
        Block(
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["title"] or "",
            found["mark"] or "",
        )
        for found in FENCE.finditer(text)
    ]


def steps(document: str, text: str) -> list[Step]:
    """Everything in a document that can be run, in order."""
    found: list[Step] = []
    listed = blocks(text)
    for index, block in enumerate(listed):
        if block.title:
            found.append(Step(document, block.line, "", None, (block.title, block.text), block.mark))
        elif block.language == "python":
            told = next((after.text for after in listed[index + 1 : index + 2] if is_output(text, block, after)), None)
            named = NAMED.match(block.text)
            command = named[2] if named else (sys.executable, "-c", block.text)
            found.append(
                Step(document, block.line, command, told, (named[1], block.text) if named else None, block.mark)
            )
        elif block.language == "console":
            found += console_steps(document, block)
    return found


def is_output(text: str, block: Block, following: Block) -> bool:
    """Whether a block is what the one before it prints: nothing but empty lines stands between them."""
    end = block.line + block.text.count("\n") + 1
    return following.language == "text" and not "".join(text.splitlines()[end : following.line - 1]).strip()


def console_steps(document: str, block: Block) -> list[Step]:
    """The commands of a console block."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"{document}:{block.line}: a console block starts with `$ `"
    commands, outputs = parts[1::2], parts[2::2]
    return [
        Step(document, block.line, command, output if output.strip() else None, mark=block.mark)
        for command, output in zip(commands, outputs, strict=True)
    ]


def run_step(step: Step, folder: Path) -> str:
    """Run a step in a folder, with this environment's programs first; returns what it printed."""
    is_make = isinstance(step.command, str) and step.command.startswith("make")
    command = f"{step.command} --dry-run" if is_make else step.command
    if step.file is not None:
        (folder / step.file[0]).write_text(step.file[1])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=ROOT if is_make else folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{step}: {step.command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_as_told(printed: str, expected: str) -> bool:
    """Whether output is what a document says, `...` standing for any lines."""
    lines = [line.rstrip() for line in expected.strip("\n").splitlines()]
    pattern = "".join(r"(?:.*\n)*" if line == "..." else _line_pattern(line) + r"\n" for line in lines)
    actual = "".join(line.rstrip() + "\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, actual) is not None


def _line_pattern(line: str) -> str:
    """What a line of expected output matches."""
    return re.escape(line.removesuffix("...")) + ".*" if line.endswith(" ...") else re.escape(line)
