"""Taking secrets out of text that people or logs will see."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"^([a-z0-9+.\-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(
    r"([?&;][^=&;]*(?:pass|pwd|secret|token|key|auth|user|sig|cred)[^=&;]*=)[^&;]*", re.IGNORECASE
)


def redact_url(text: str) -> str:
    """`redis://user:pw@host/0` becomes `redis://***@host/0`; query secrets go too.

    Everything up to the last `@` is dropped, because a password may itself
    contain `@`, `/` or `:` and lists of hosts may carry several.
    """
    return _PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))
