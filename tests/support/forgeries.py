"""Files as a forger writes them: edited on purpose, with digests that agree with what they say now."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from phaze.json_documents import DIGEST, digest_of, with_digest

__all__ = ["forged", "forged_journal"]


def forged(document: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A document with some fields changed, and digests that agree with them; a plan's run has one of its own."""
    changed = {**document, **changes}
    run = changed.pop("run", None)
    sealed = with_digest(changed)
    return sealed if run is None else {**sealed, "run": with_digest(run) if isinstance(run, dict) else run}


def forged_journal(lines: Iterable[str]) -> str:
    """The text of a journal of these lines, the first one included, whose digests agree with them."""
    written, before = [], ""
    for line in lines:
        document = {name: value for name, value in json.loads(line).items() if name != DIGEST}
        before = digest_of(document, before)[:16]
        written.append(json.dumps({**document, DIGEST: before}) + "\n")
    return "".join(written)
