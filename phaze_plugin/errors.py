"""Every error that Phaze raises on purpose.

PhazeError
├── GraphError            a graph, rule or layer that contradicts itself; names the op, tensor or field
├── LimitError            a count beyond what is worked with by default; says how to raise the limit
├── FormatError           a file or JSON document that is damaged, foreign or of another schema version
├── ImportModelError      a frontend could not turn a model into a graph
├── HardwareError         an accelerator, cluster or network that cannot exist; an unknown preset
├── CostError             an op or a collective that nobody can price
├── ShardError            a layer that cannot be split so many ways; layout constraints that contradict or match nothing
├── ScheduleError         a schedule that breaks a rule of its problem, or a problem that is malformed
├── PlacementError        a placement problem that contradicts itself or cannot be asked
├── PlanError             a plan that cannot be made, or is used with something that it was not made for
│   └── QuestionError     an argument of `optimize` or `evaluate` that cannot be; a ValueError too
├── SolverError           a solver was misused, or is missing where it was asked for by name
├── PluginError           a plugin clashes with another, raised, or answered with the wrong type
└── UnknownNameError      a name that nobody registered; lists the known ones

PluginWarning (a UserWarning)  a plugin raised and was passed over; says which and why
JournalWarning (a UserWarning)  the damaged end of a journal was dropped; says what is computed again

Bad argument values are ValueError or TypeError as everywhere in Python; these are for what the arguments describe.

An error of which a topic of `phaze help` explains more carries the name of that topic: that of its class, that of the
first words of its message, or that of the block which it leaves (`explained_by`). The command line shows it as its last
line, and a traceback as a note below the message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

__all__ = [
    "CostError",
    "FormatError",
    "GraphError",
    "HardwareError",
    "ImportModelError",
    "JournalWarning",
    "LimitError",
    "PhazeError",
    "PlacementError",
    "PlanError",
    "PluginError",
    "PluginWarning",
    "QuestionError",
    "ScheduleError",
    "ShardError",
    "SolverError",
    "UnknownNameError",
]


def shown(value: object) -> str:
    """A value as messages show it: shortened, and without failing on integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


TOPIC_OF_WORD: Mapping[str, str] = MappingProxyType(
    {
        "accelerator": "cluster",
        "attention": "calibration",
        "calibration": "calibration",
        "chip": "cluster",
        "chunks": "schedules",
        "cluster": "cluster",
        "cp": "sequences",
        "devices": "search",
        "ep": "experts",
        "executor": "search",
        "expert_imbalance": "experts",
        "expert_tp": "experts",
        "frontend_options": "models",
        "gap": "proof",
        "global_batch": "strategy",
        "global_batch_size": "strategy",
        "graph": "models",
        "hbm_gib": "search",
        "inputs": "models",
        "journal": "search",
        "loss_fn": "models",
        "measured": "calibration",
        "micro_batch_size": "strategy",
        "model": "models",
        "model_type": "models",
        "network": "cluster",
        "objective": "objectives",
        "offload": "recompute",
        "optimizer": "precision",
        "precision": "precision",
        "price": "objectives",
        "recompute": "recompute",
        "schedule": "schedules",
        "sequence_length": "sequences",
        "sequence_parallel": "sequences",
        "shard": "zero",
        "solver": "solvers",
        "space": "search",
        "step_time": "objectives",
        "strategy": "strategy",
        "target": "targets",
        "term": "calibration",
        "time_limit": "limits",
        "time_limit_s": "limits",
        "tp": "strategy",
        "trace": "calibration",
        "zero": "zero",
    }
)
"""Arguments of questions and kinds of names, and the topic that explains each."""

_FIRST_WORDS = re.compile(r"(?:unknown )?(\w+)(?: has (\w+))?")
"""The first word of a message, and the field of which `strategy has FIELD` speaks."""


class PhazeError(Exception):
    """The root: what the command line shows in one readable block, without a traceback."""

    topic: str | None = None
    """The topic of `phaze help` that explains such errors."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        words = _FIRST_WORDS.match(str(self))
        self.topic = None
        self.lead_to(type(self).topic)
        for word in (words[2], words[1]) if words else ():
            self.lead_to(TOPIC_OF_WORD.get(word))

    def lead_to(self, topic: str | None) -> None:
        """Name the topic that explains more, unless one is named already."""
        if topic is not None and self.topic is None:
            self.topic = topic
            self.add_note(f"see: phaze help {topic}")


@contextmanager
def explained_by(topic: str) -> Iterator[None]:
    """Errors that leave the block, and name no topic themselves, name this one; it decorates functions too."""
    try:
        yield
    except PhazeError as error:
        error.lead_to(topic)
        raise


class GraphError(PhazeError):
    """A graph, rule or layer contradicts itself."""


class FormatError(PhazeError):
    """A file or JSON document is damaged, foreign or of another schema version."""

    topic = "files"


class LimitError(PhazeError):
    """A count is beyond what is worked with by default; the message says how to raise the limit."""

    topic = "limits"


class ImportModelError(PhazeError):
    """A frontend could not turn a model into a graph."""

    topic = "models"


class HardwareError(PhazeError):
    """An accelerator, cluster or network cannot exist as described."""

    topic = "cluster"


class CostError(PhazeError):
    """An op or a collective has no price."""

    topic = "calibration"


class ShardError(PhazeError):
    """A layer cannot be split as asked, or layout constraints contradict each other or match nothing."""

    topic = "strategy"


class ScheduleError(PhazeError):
    """A schedule breaks a rule of its problem, or the problem is malformed."""


class PlacementError(PhazeError):
    """A placement problem contradicts itself or cannot be asked."""

    topic = "strategy"


class PlanError(PhazeError):
    """A plan cannot be made as asked, or does not belong to what it is used with."""


class QuestionError(PlanError, ValueError):
    """An argument of `optimize` or `evaluate` cannot be; the message says what it may be."""


class SolverError(PhazeError):
    """A solver was misused, or is missing where it was asked for by name."""

    topic = "solvers"


class PluginError(PhazeError):
    """A plugin clashes with another, raised, or answered with the wrong type."""

    topic = "plugins"


class PluginWarning(UserWarning):
    """A plugin raised and was passed over; the others went on."""


class JournalWarning(UserWarning):
    """The damaged end of a search's journal was dropped; what was in it is computed again."""


_MOST_LISTED = 60
"""Names that a message lists: more are no longer read, and hide the near ones; the error has them all in `known`."""


class UnknownNameError(PhazeError):
    """A name that nobody registered; the message offers near names and lists the known ones, where they are few."""

    def __init__(
        self, what: str, name: str, known: Iterable[str], advice: str = "", *, near: Sequence[str] | None = None
    ) -> None:
        names = sorted(known)
        hint = _hint(near_names(str(name), names) if near is None else near)
        listed = ", ".join(names) if names else "none"
        if len(names) > _MOST_LISTED:
            listed = f"{len(names)} names"
        super().__init__(f"unknown {what} {shown(name)}.{hint} Known: {listed}.{advice and f' {advice}'}")
        self.what, self.name, self.known = what, name, tuple(names)

    def __reduce__(self) -> tuple[object, ...]:
        """For another process: the message as it is, since it cannot be made again from itself."""
        return _restored_name_error, (str(self), self.__dict__)


def _restored_name_error(message: str, state: dict[str, object]) -> UnknownNameError:
    """The error that another process raised."""
    error = UnknownNameError.__new__(UnknownNameError, message)
    error.__dict__.update(state)
    return error


def meant(name: object, known: Iterable[str]) -> str:
    """The known names that a wrong one is near to, as a question that ends a message; nothing where none is near."""
    return _hint(near_names(str(name), known))


def _hint(near: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(near)}?" if near else ""


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that start like `name` or, failing that, are spelled like it; case is ignored."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    folded = name.casefold()
    starting = [candidate for candidate in by_folded if folded and candidate.startswith(folded)]
    near = starting[:3] or difflib.get_close_matches(folded, by_folded, n=3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, folded, candidate).ratio() for candidate in near]
    return [by_folded[folded] for folded, ratio in zip(near, likeness, strict=True) if ratio > max(likeness) - 0.1]
