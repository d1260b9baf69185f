"""Content digests of saved documents, by which damage is told from disagreement.

A document says the digest of everything else in it. A file that does not agree with its own digest was damaged or
edited on the way; one that agrees with it and is wrong was made wrong, which `phaze verify` finds. A digest is no
signature: whoever edits a file on purpose can write a new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from phaze.errors import FormatError, shown

__all__ = ["DIGEST", "digest_of", "with_digest", "without_digest"]

DIGEST = "digest"
"""The field of a document that holds its digest."""


def digest_of(document: Mapping[str, object], after: str = "") -> str:
    """The digest of a document without its digest; with `after`, that of a document behind another one."""
    body = {name: value for name, value in document.items() if name != DIGEST}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{after}{text}".encode()).hexdigest()


def with_digest(document: Mapping[str, object]) -> dict[str, object]:
    """The document with its digest."""
    return {**document, DIGEST: digest_of(document)}


def without_digest(document: Mapping[str, object], where: str) -> dict[str, object]:
    """The document without its digest; raises FormatError where they do not agree."""
    said, found = document.get(DIGEST), digest_of(document)
    if said != found:
        raise FormatError(
            f"{where} is damaged or was edited: it says the digest {shown(said)}, and its content has {found[:16]}... "
            "Get the file again from where it was made, or make it again."
        )
    return {name: value for name, value in document.items() if name != DIGEST}
