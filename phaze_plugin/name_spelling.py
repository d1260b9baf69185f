"""How other spellings of a name lead to the one that is known: `H100`, `TPU v5p`, `meta-llama/Llama-3.1-8B-Instruct`.

Two spellings are of one name where they differ in case and in separators only. A separator between two digits counts,
whichever it is: `llama2-7b` and `Llama-2-7B` are one name, `llama-27b` is another. Of models, the organization in front
of a hub's name is left out, and so are words behind it that say how the same architecture was trained further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["folded_name", "hub_spellings", "spelled_alike"]

_BETWEEN_DIGITS = re.compile(r"(?<=\d)[\s._:-]+(?=\d)")
_SEPARATORS = re.compile(r"[\s._:]+|-(?!\d)|(?<!\d)-")
_TRAINING_WORDS = re.compile(
    r"[-_](?:base|chat|hf|instruct|it|pt|thinking|v0\.1|2[3-6](?:0[1-9]|1[0-2]))$", re.IGNORECASE
)
"""Words behind a model's name that change its weights and not its shapes; four digits are a year and a month."""


def folded_name(name: str) -> str:
    """What all spellings of a name have in common: small letters, without separators but between digits."""
    return _SEPARATORS.sub("", _BETWEEN_DIGITS.sub("-", name.strip().casefold()))


def spelled_alike(name: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str | None:
    """The known name that `name` is a spelling of; `others` are further names, each with the known one it stands for.

    A name that is known as it stands is itself; None where no name, or more than one, is spelled alike.
    """
    names = {**(others or {}), **{candidate: candidate for candidate in known}}
    if name in names:
        return names[name]
    folded = folded_name(name)
    alike = {meant for candidate, meant in names.items() if folded and folded_name(candidate) == folded}
    return alike.pop() if len(alike) == 1 else None


def hub_spellings(model: str) -> Iterator[str]:
    """A model's name as a hub has it, then without its organization, then without one word behind it after another."""
    yield model
    name = model.rpartition("/")[2]
    name = name[len("meta-") :] if name.casefold().startswith("meta-") else name
    while name:
        yield name
        shorter = _TRAINING_WORDS.sub("", name)
        name = shorter if shorter != name else ""
