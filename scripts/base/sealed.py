"""JSON documents that carry a digest of themselves, so that a changed byte shows.

A seal tells of damage and of careless edits. Whoever writes a whole document anew can seal it too; against
that there are signatures (docs/trust.md).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

SEAL = "digest"


def digest(document: dict[str, Any]) -> str:
    """The sha256 of a document without its seal, whatever the order of its keys."""
    rest = json.loads(json.dumps({key: value for key, value in document.items() if key != SEAL}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def seal(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its digest at its end.

    >>> seal({"format": 1}) == seal(seal({"format": 1}))
    True
    >>> flaw(render(seal({"sizes": {10: 1, 9: 1}})))
    ''
    """
    rest = {key: value for key, value in document.items() if key != SEAL}
    return {**rest, SEAL: digest(rest)}


def render(document: dict[str, Any]) -> bytes:
    """A document as this project writes it; no other bytes say the same."""
    return (json.dumps(document, indent=1) + "\n").encode()


def flaw(content: bytes) -> str:
    """What is wrong with a sealed document, as the end of a sentence; nothing for a sound one."""
    try:
        document = json.loads(content)
    except ValueError as e:
        return f"is no JSON: {e}"
    if not isinstance(document, dict):
        return "is no JSON object"
    if SEAL not in document:
        return "has no digest of its own"
    if document[SEAL] != digest(document):
        return "was changed: its digest is not that of what it says"
    if render(document) != content:
        return "was changed: it is not written as this program writes it"
    return ""
