"""HLO and StableHLO text as other tools and other versions write it, made into what the parsers here take.

A file may hold several modules: test files of MLIR put `// -----` between them, HLO text begins each with `HloModule`.
Before 2024 StableHLO wrote lists of integers as tensors (`dense<[1, 0]> : tensor<2xi64>`), and before 2022 the
dimension numbers of a product as a dictionary; both are rewritten where the parser refuses the text as it is.
Operations of other dialects than StableHLO's cannot be read at all, which `explained` says in a sentence.
"""

from __future__ import annotations

import re

__all__ = ["ForeignTextError", "explained", "split_hlo_modules", "split_stablehlo_modules", "upgraded"]


class ForeignTextError(ValueError):
    """The text is of another language than StableHLO; the message says which."""


_SEPARATOR = re.compile(r"^// -----.*$", re.MULTILINE)
_HEADER = re.compile(r"^[ \t]*HloModule\b", re.MULTILINE)
_COMMENT = re.compile(r"//.*$", re.MULTILINE)

_LISTS = (
    "base_dilations|broadcast_dimensions|broadcast_sizes|dimensions|edge_padding_high|edge_padding_low|fft_length|"
    "interior_padding|lhs_dilation|limit_indices|permutation|rhs_dilation|slice_sizes|start_indices|strides|"
    "window_dilations|window_dimensions|window_strides"
)
"""Attributes of StableHLO that were tensors of integers and are arrays now."""

_TENSOR_LIST = re.compile(rf"\b({_LISTS})(\s*=\s*)dense<(\[[-\d,\s]*\]|-?\d+)>\s*:\s*tensor<(\d+)xi64>", re.DOTALL)
_REVERSAL = re.compile(r"\b(window_reversal\s*=\s*)dense<(\[[\w,\s]*\]|\w+)>\s*:\s*tensor<(\d+)xi1>", re.DOTALL)
_STABLEHLO_OPERATION = re.compile(r'"?stablehlo\.\w+')
_PRODUCT_NUMBERS = re.compile(r"\bdot_dimension_numbers\s*=\s*\{([^{}]*)\}", re.DOTALL)
_PRODUCT_FIELD = re.compile(r"(\w+)\s*=\s*dense<(\[[\d,\s]*\]|\d+)>\s*:\s*tensor<(\d+)xi64>", re.DOTALL)
_FOREIGN_OPERATION = re.compile(r'"-":(\d+):\d+: Dialect `(\w+)\' not found for custom op \'([\w.]+)\'')


def split_hlo_modules(text: str) -> list[str]:
    """The modules of HLO text, each from its header on; the whole text where there is at most one header."""
    bare = _COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    starts = [header.start() for header in _HEADER.finditer(bare)]
    if len(starts) < 2:
        return [text]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_stablehlo_modules(text: str) -> list[str]:
    """The modules of StableHLO text; parts that are comments alone are none."""
    parts, lines = [], 0
    for part in _SEPARATOR.split(text):
        if _COMMENT.sub("", part).strip():
            parts.append("\n" * lines + part)  # so that complaints name the line of the file
        lines += part.count("\n")
    return parts or [text]


def upgraded(text: str) -> str:
    """The text in today's form of attributes; itself where nothing in it is of an older form.

    MHLO still has the older form, so that a text with operations of it alone keeps it.
    """
    dialect = "stablehlo" if _STABLEHLO_OPERATION.search(text) else "mhlo"
    text = _PRODUCT_NUMBERS.sub(lambda found: _product_numbers(found[1], dialect), text)
    if dialect == "mhlo":
        return text
    text = _TENSOR_LIST.sub(lambda found: f"{found[1]}{found[2]}array<i64{_array(found[3], int(found[4]))}>", text)
    return _REVERSAL.sub(lambda found: f"{found[1]}array<i1{_array(found[2], int(found[3]))}>", text)


def _product_numbers(fields: str, dialect: str) -> str:
    numbers = {field[1]: _elements(field[2], int(field[3])) for field in _PRODUCT_FIELD.finditer(fields)}
    written = ", ".join(f"{name} = [{', '.join(dims)}]" for name, dims in numbers.items() if dims)
    return f"dot_dimension_numbers = #{dialect}.dot<{written}>"


def _array(text: str, size: int) -> str:
    """The elements of an array attribute behind its type, with the colon that an empty one does not have."""
    elements = _elements(text, size)
    return f": {', '.join(elements)}" if elements else ""


def _elements(text: str, size: int) -> list[str]:
    """The elements of a dense attribute; a single one stands for all."""
    if not text.startswith("["):
        return [text] * size
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def explained(complaint: str) -> str | None:
    """What is wrong with text that the parser complains about so, in a sentence; None where that is not known."""
    foreign = _FOREIGN_OPERATION.search(complaint)
    if foreign is not None:
        line, dialect, operation = foreign.groups()
        return (
            f"line {line} has {operation}, an operation of the dialect {dialect!r}, which is no part of StableHLO; "
            "lower the module to StableHLO alone first."
        )
    return None
