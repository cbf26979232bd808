"""The primary that Redis Sentinels name, asked for anew with every connection.

So a fail-over needs no code of its own: the old primary's connections break or it turns
read-only, the breaker opens, and the probe that closes it has dialled the new primary.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final
from urllib.parse import parse_qsl, urlencode

from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_link import Link
from elora_connector.tiers.redis_pool import Dialler, Endpoint
from elora_connector.tiers.redis_url import Address, SeveralUrl, Topology, topology_of

_LOGIN_OPTIONS: Final = ("sentinel_username", "sentinel_password")


Login = tuple[str | None, ...]
"""User name, password, CA file, certificate and key, as `Endpoint` takes them."""


def endpoint_at(url: str, *login: str | None) -> Dialler:
    """What a URL of one server, or of the Sentinels that know it, leads to.

    Raises:
        ConfigError: the URL, an option in it or a certificate file cannot be used.
    """
    if topology_of(url) is Topology.SENTINEL:
        return SentinelEndpoint(url, login)
    return Endpoint(url, *login)


class SentinelEndpoint:
    """Dials the primary of a service.

    The Sentinels get TLS and certificates like the servers, but a login only if the URL
    has the options ``sentinel_username`` or ``sentinel_password``.

    Args:
        url: redis-sentinel:// or rediss-sentinel://.
        login: at the servers.

    Raises:
        ConfigError: as from `endpoint_at`.
    """

    def __init__(self, url: str, login: Login) -> None:
        parsed = SeveralUrl.parse(url)
        options = dict(parse_qsl(parsed.options, keep_blank_values=True))
        user, password = (options.pop(name, None) for name in _LOGIN_OPTIONS)
        self.label = parsed.label
        self._login = login
        self._service = parsed.service
        self._servers = replace(parsed, options=urlencode(options))
        bare = replace(self._servers, login="", database=0)
        files = login[2:]
        self._sentinels = [
            Endpoint(bare.server(place), user, password, *files) for place in parsed.places
        ]
        self._server(parsed.places[0])  # refuses unusable options at start

    def dial(self, deadline: float) -> Link:
        """A link to the present primary; see `Endpoint.dial`."""
        return self._server(self._primary(deadline)).dial(deadline)

    def primary_url(self, deadline: float) -> str:
        """URL of the present primary, login included.  Raises StoreError as `dial` does."""
        return self._servers.server(self._primary(deadline))

    def led_astray(self, failure: StoreError) -> bool:
        """A primary that turned into a replica: the Sentinels know the next one."""
        return failure.reason == "readonly"

    def _server(self, address: Address) -> Endpoint:
        return Endpoint(self._servers.server(address), *self._login)

    def _primary(self, deadline: float) -> Address:
        """Ask one Sentinel after the other; each gets an equal share of what time is left."""
        failure = StoreError("connection", "no Sentinel was asked", down=True)
        for position, sentinel in enumerate(list(self._sentinels)):
            now = time.monotonic()
            shares = len(self._sentinels) - position + 1  # the last is for the primary itself
            try:
                found = sentinel.ask(
                    now + (deadline - now) / shares,
                    *("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service),
                )
            except StoreError as error:
                failure = error
                continue
            if found is not None:
                self._prefer(sentinel)
                return _text(found[0]), int(found[1])
            failure = StoreError(
                "connection", f"the Sentinels know no service {self._service!r}", down=True
            )
        raise failure

    def _prefer(self, sentinel: Endpoint) -> None:
        """Who answered is asked first the next time, so that a dead one costs time once."""
        self._sentinels = [sentinel, *(s for s in self._sentinels if s is not sentinel)]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
