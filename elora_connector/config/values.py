"""Kinds of setting values: what is accepted, in words, and how it is read.

A kind turns what a YAML file, an environment variable or a JSON object holds
into one Python value, or raises `ValueError`.  The error carries no text: the
caller knows the key and the origin, the kind says what it `expects`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NOTHING = frozenset({"", "null", "none"})
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


class Kind(Protocol):
    """One kind of value.  `parse` raises ValueError for what is not accepted."""

    @property
    def name(self) -> str:
        """Short word for the table in the documentation."""
        ...

    @property
    def expects(self) -> str:
        """What is accepted, to complete the sentence "expected ..."."""
        ...

    def parse(self, raw: object) -> Any:
        """The value, in one canonical form."""
        ...


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false; the words 1/0, yes/no and on/off are understood as well."""

    @property
    def name(self) -> str:
        return "bool"

    @property
    def expects(self) -> str:
        return "true or false"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError


@dataclass(frozen=True, slots=True)
class AlwaysFalse:
    """A switch of LMCache that exists for compatibility and cannot be turned on."""

    why: str

    @property
    def name(self) -> str:
        return "bool"

    @property
    def expects(self) -> str:
        return f"false: {self.why}"

    def parse(self, raw: object) -> bool:
        if Flag().parse(raw):
            raise ValueError
        return False


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`."""

    low: int = 0
    high: int | None = None

    @property
    def name(self) -> str:
        return "int"

    @property
    def expects(self) -> str:
        if self.high is None:
            return f"a whole number, at least {self.low}"
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, raw: object) -> int:
        value = _whole(raw)
        if value < self.low or (self.high is not None and value > self.high):
            raise ValueError
        return value


def _whole(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError
    if isinstance(raw, float) and not raw.is_integer():
        raise ValueError
    return int(raw)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number: above 0 or, with `zero`, also 0; at most `high`."""

    zero: bool = False
    high: float | None = None

    @property
    def name(self) -> str:
        return "float"

    @property
    def expects(self) -> str:
        low = "a number, 0 or more" if self.zero else "a number above 0"
        return low if self.high is None else f"{low}, at most {self.high:g}"

    def parse(self, raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError
        try:
            value = float(raw)
        except OverflowError:
            raise ValueError from None
        too_low = value < 0 or (value == 0 and not self.zero)
        if too_low or not math.isfinite(value) or (self.high is not None and value > self.high):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is not empty.

    A bare number is refused: YAML would already have changed it (`0123` is 83),
    which for a password must not happen silently.
    """

    what: str = "text"

    @property
    def name(self) -> str:
        return "str"

    @property
    def expects(self) -> str:
        return f"{self.what} (in quotes where it looks like a number)"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not raw.strip():
            raise ValueError
        return raw.strip()


@dataclass(frozen=True, slots=True)
class Variable:
    """The name of an environment variable, in capitals: a secret pasted here is noticed."""

    @property
    def name(self) -> str:
        return "str"

    @property
    def expects(self) -> str:
        return "the name of an environment variable, in capitals"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not _VARIABLE_NAME.fullmatch(raw):
            raise ValueError
        return raw


@dataclass(frozen=True, slots=True)
class Secret:
    """Text taken exactly as it is, white space included."""

    @property
    def name(self) -> str:
        return "str"

    @property
    def expects(self) -> str:
        return "text (in quotes where it looks like a number)"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not raw:
            raise ValueError
        return raw


@dataclass(frozen=True, slots=True)
class Url:
    """An address with a scheme and something after it."""

    @property
    def name(self) -> str:
        return "str"

    @property
    def expects(self) -> str:
        return "an address such as redis://host:6379 or rediss://host:6379"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError
        url = raw.strip()
        scheme, separator, rest = url.partition("://")
        if not separator or not rest or not scheme.replace("-", "").replace("+", "").isalnum():
            raise ValueError
        return url


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; case does not matter."""

    options: tuple[str, ...]

    @property
    def name(self) -> str:
        return "str"

    @property
    def expects(self) -> str:
        return self.options[0] if len(self.options) == 1 else "one of " + ", ".join(self.options)

    def parse(self, raw: object) -> str:
        for option in self.options:
            if isinstance(raw, str) and raw.strip().lower() == option.lower():
                return option
        raise ValueError


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping; in an environment variable a JSON object.  Nothing is an empty one."""

    @property
    def name(self) -> str:
        return "mapping"

    @property
    def expects(self) -> str:
        return "a mapping (in an environment variable: a JSON object)"

    def parse(self, raw: object) -> dict[str, Any]:
        value: object = raw
        if raw is None or (isinstance(raw, str) and not raw.strip()):
            value = {}
        elif isinstance(raw, str):
            value = json.loads(raw)
        if not isinstance(value, Mapping):
            raise ValueError
        return {str(key): item for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Maybe:
    """Another kind, or nothing: null or one of `words`."""

    kind: Kind
    words: frozenset[str] = _NOTHING

    @property
    def name(self) -> str:
        return f"{self.kind.name} or null"

    @property
    def expects(self) -> str:
        return f"{self.kind.expects}, or null"

    def parse(self, raw: object) -> Any:
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in self.words):
            return None
        return self.kind.parse(raw)
