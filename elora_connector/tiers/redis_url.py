"""One URL for each way of running Redis, and what may be shown of it.

| scheme | store |
|---|---|
| ``redis``, ``rediss``, ``unix`` | one server (plain, TLS, socket file) |
| ``redis-sentinel``, ``rediss-sentinel`` | the primary that Sentinels name |
| ``redis-cluster``, ``rediss-cluster`` | all primaries of a cluster |

``valkey`` in place of ``redis`` and ``valkeys`` in place of ``rediss`` mean the same.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Final

from elora_connector.errors import ConfigError

Address = tuple[str, int]
"""Host and port of one server."""

_NAME: Final = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]*)"
_HOST: Final = rf"{_NAME}(:\d+)?"
_SERVICE: Final = r"[A-Za-z0-9._-]+"
_PLACE: Final = re.compile(rf"{_HOST}(/\d*)?")
_PLACES: Final = re.compile(rf"{_HOST}(,{_HOST})*(/{_SERVICE})?(/\d*)?")
_ONE: Final = re.compile(rf"(?P<host>{_NAME})(:(?P<port>\d{{1,5}}))?")
_SEVERAL: Final = re.compile(r"(?:redis|valkey)s?(-sentinel|-cluster)")
_BEFORE_OPTIONS: Final = re.compile(r"[?#]")


class Topology(enum.Enum):
    """How the servers belong together; the value is what the scheme ends with."""

    SINGLE = ""
    SENTINEL = "-sentinel"
    CLUSTER = "-cluster"


_DEFAULT_PORT: Final = {Topology.SENTINEL: 26379, Topology.CLUSTER: 6379}
_FORM: Final = {
    Topology.SENTINEL: "redis-sentinel://[user:password@]host:port[,host:port...]/service[/db]",
    Topology.CLUSTER: "redis-cluster://[user:password@]host:port[,host:port...]",
}


def topology_of(url: str) -> Topology:
    """What the URL's scheme asks for; an unknown scheme is refused later, as one server."""
    found = _SEVERAL.fullmatch(url.partition("://")[0])
    return Topology(found[1]) if found else Topology.SINGLE


def as_redis(url: str) -> str:
    """The URL with Valkey's names of the schemes replaced by those that redis-py knows."""
    return re.sub(
        r"^valkey(s?)(?=(-sentinel|-cluster)?://)", lambda m: f"redis{m[1]}", url, count=1
    )


def redact_url(url: str) -> str:
    """The URL without user, password and options, for logs and reprs.

    Anything that cannot be told apart from a secret with certainty is left out, so a
    mistyped URL shows little more than its scheme.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***"
    credentials, at, place = rest.rpartition("@")
    place = _BEFORE_OPTIONS.split(place, maxsplit=1)[0]
    ambiguous = bool(_BEFORE_OPTIONS.search(credentials))
    known = _PLACE if topology_of(url) is Topology.SINGLE else _PLACES
    if ambiguous or not (scheme == "unix" or known.fullmatch(place)):
        return f"{scheme}://***"
    return f"{scheme}://***@{place}" if at else f"{scheme}://{place}"


@dataclass(frozen=True)
class SeveralUrl:
    """A URL that names several servers, taken apart.

    Attributes:
        label: it without secrets.
        scheme: `redis` or `rediss`, for each of the servers.
        login: `user:password@` as it was written, or empty.
        places: addresses in the order given.
        service: name of the primary at the Sentinels; empty for a cluster.
        database: number, 0 for a cluster.
        options: what follows the question mark.

    Raises:
        ConfigError: it is not of its topology's form.
    """

    label: str
    scheme: str
    login: str = field(repr=False)
    places: tuple[Address, ...]
    service: str
    database: int
    options: str = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> SeveralUrl:
        kind, label = topology_of(url), redact_url(url)
        scheme, _, rest = as_redis(url).partition("://")
        login, at, place = rest.rpartition("@")
        place, _, options = place.partition("?")
        hosts, *path = place.split("/")
        if label.endswith("://***") or len(path) > 2 or "#" in options:
            raise _malformed(kind, label)
        service = path.pop(0) if kind is Topology.SENTINEL and path else ""
        database = path.pop(0) if path else ""
        if path or (kind is Topology.SENTINEL and not service):
            raise _malformed(kind, label)
        if kind is Topology.CLUSTER and database not in {"", "0"}:
            raise ConfigError(f"remote_url {label}: a Redis Cluster has only database 0")
        places = tuple(_place(text, kind, label) for text in hosts.split(","))
        tls = scheme.removesuffix(kind.value)
        return cls(label, tls, login + at, places, service, int(database or 0), options)

    def server(self, address: Address) -> str:
        """URL of one of the servers, with the login, the database and the options."""
        host, port = address
        name = f"[{host}]" if ":" in host else host
        options = f"?{self.options}" if self.options else ""
        return f"{self.scheme}://{self.login}{name}:{port}/{self.database}{options}"


def _place(text: str, kind: Topology, label: str) -> Address:
    found = _ONE.fullmatch(text)
    if found is None or not found["host"]:
        raise _malformed(kind, label)
    return found["host"].strip("[]"), int(found["port"] or _DEFAULT_PORT[kind])


def _malformed(kind: Topology, label: str) -> ConfigError:
    return ConfigError(f"remote_url {label} is not usable: expected {_FORM[kind]}")
