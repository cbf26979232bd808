"""The remote tier over one Redis or Valkey server: a fixed one, or Sentinel's primary.

Failures never leave this module as exceptions: they are results with a reason, a log
line per reason and interval, and a breaker that refuses further calls at once while a
background thread asks whether the server is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import ClassVar, Final, TypeVar

from elora_connector.errors import ConfigError
from elora_connector.tiers.after_fork import begin_anew
from elora_connector.tiers.base import (
    Health,
    Item,
    LookupResult,
    Outcome,
    Result,
    ValueSpec,
    refreshed_ttl_s,
)
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.redis_failure import ReplyError, StoreError, explain
from elora_connector.tiers.redis_link import Link, Reply, pack, pack_set_options
from elora_connector.tiers.redis_pipeline import Guard, Pipeline, Window
from elora_connector.tiers.redis_pool import LinkPool
from elora_connector.tiers.redis_sentinel import endpoint_at
from elora_connector.tiers.redis_url import redact_url
from elora_connector.tiers.redis_values import Exchange, Reading, Seal, Writing

__all__ = ["RedisTier", "redact_url"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOG_INTERVAL_S: Final = 60.0
_MINUTE_S: Final = 60.0
_WINDOW: Final = Window(count=4, nbytes=4 * 1024 * 1024)
"""More does not move more, and large replies side by side push each other out of the caches."""
_MISFIT: Final = Result(Outcome.BAD, "length")
"""The buffer is not of the size that the value has."""


class RedisTier:
    """Chunk values in Redis; see `RemoteTier` for the contract.

    Args:
        url: of one server or of Sentinels (`redis_url`), with user, password and database
            if needed.
        ttl_s: seconds a value lives after it was written; None for ever.
        connect_timeout_s: one bound over TCP, TLS and login, also of the constructor.
        operation_timeout_s: one bound over a whole operation on an open connection.
        checksum: write and demand payload checksums.
        mac_key: secret that authenticates values, or None.
        username, password: login; they beat the URL's.
        ssl_ca, ssl_cert, ssl_key: PEM files for rediss://.
        fail_open: start without Redis and wait for it in the background; else raise.
        max_connections: upper bound of open connections.
        window: bounds of what is on its way over each of them.
        on_event: called with ("breaker", state), ("error", reason) or
            ("delete", "done" | "limited" | "failed"), on the thread where it happened;
            it must not raise.
        delete_limit_per_minute: bound on deletions of damaged values.

    Raises:
        ConfigError: the settings cannot be used, or the server cannot while not `fail_open`.
    """

    _new_pool: ClassVar[type[LinkPool]] = LinkPool

    def __init__(  # noqa: PLR0913 - one setting each, all by keyword
        self,
        url: str,
        *,
        ttl_s: int | None,
        connect_timeout_s: float = 1.0,
        operation_timeout_s: float = 1.0,
        checksum: bool = True,
        mac_key: bytes | None = None,
        username: str | None = None,
        password: str | None = None,
        ssl_ca: str | None = None,
        ssl_cert: str | None = None,
        ssl_key: str | None = None,
        fail_open: bool = True,
        max_connections: int = 8,
        window: Window = _WINDOW,
        on_event: Callable[[str, str], None] | None = None,
        delete_limit_per_minute: int = 60,
        breaker: Callable[..., CircuitBreaker] = CircuitBreaker,
    ) -> None:
        self._endpoint = endpoint_at(url, username, password, ssl_ca, ssl_cert, ssl_key)
        self._ttl_s = ttl_s
        self._set_options = pack_set_options(ttl_s)
        self._timeouts = (connect_timeout_s, operation_timeout_s)
        self._seal = Seal(checksum, mac_key)
        self._window = window
        self._size = max_connections
        self._on_event = on_event
        self._delete_limit = delete_limit_per_minute
        self._new_breaker = breaker
        self._closed = False
        self._begin()
        begin_anew(self._begin)
        self._first_contact(fail_open)

    def __repr__(self) -> str:
        return f"RedisTier({self._endpoint.label}, breaker {self.health().value})"

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        groups = list(takewhile(len, groups))
        if not groups:
            return LookupResult(Outcome.OK)
        found = self._attempt(lambda link: _exists(link, groups))
        if isinstance(found, StoreError):
            return LookupResult(Outcome.ERROR, reason=found.reason, instead=found.instead)
        full = (count == len(group) for count, group in zip(found, groups, strict=True))
        return LookupResult(Outcome.OK, sum(takewhile(bool, full)))

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        return _only(self.read_many([(spec, dest)]))

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        return _only(self.write_many([(spec, payload)]))

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return self._exchange(
            Reading(spec, dest.cast("B"), self._seal) if dest.nbytes == spec.nbytes else _MISFIT
            for spec, dest in items
        )

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return self._exchange(
            Writing(spec, payload.cast("B"), self._seal, self._set_options)
            if payload.nbytes == spec.nbytes
            else _MISFIT
            for spec, payload in items
        )

    def refresh(self, keys: Sequence[str]) -> Result:
        if self._ttl_s is None or not keys:
            return Result(Outcome.OK)
        life_s = refreshed_ttl_s(self._ttl_s)
        commands = [b"".join(pack("EXPIRE", key, life_s) for key in keys)]
        done = self._attempt(lambda link: _all(link, commands, len(keys)))
        if isinstance(done, StoreError):
            return Result(Outcome.ERROR, done.reason, instead=done.instead)
        return Result(Outcome.OK)

    def health(self) -> Health:
        return self._breaker.state

    def ping(self) -> float:
        """Seconds of one PING, connecting first if needed; the breaker is not asked.

        Raises:
            StoreError: no usable answer within the connect timeout.
        """
        deadline = time.monotonic() + self._timeouts[0]
        try:
            with self._pool.link(deadline) as link:
                start = time.monotonic()
                link.send([pack("PING")])
                try:
                    link.reply()
                except ReplyError as error:
                    # An ACL that does not allow PING was still answered by a live server.
                    if not str(error).startswith("NOPERM"):
                        raise
                return time.monotonic() - start
        except (StoreError, ReplyError, OSError) as error:
            raise explain(error) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            prober = self._prober
        self._stop.set()
        self._pool.close()
        if prober is not None and prober is not threading.current_thread():
            prober.join(timeout=sum(self._timeouts))

    # State that a forked child must not share with its parent.

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._prober: threading.Thread | None = None
        self._logged: dict[str, float] = {}
        self._deleted: deque[float] = deque()
        self._breaker = self._new_breaker(on_change=self._changed)
        self._pool = self._new_pool(self._endpoint, self._size, *self._timeouts)
        self._guard = Guard(
            self._admit, self._breaker.succeeded, self._failed, self._endpoint.led_astray
        )

    def _first_contact(self, fail_open: bool) -> None:
        ticket = self._breaker.admit()
        try:
            self.ping()
        except StoreError as failure:
            if not fail_open:
                self.close()
                raise ConfigError(f"remote tier {self._endpoint.label}: {failure}") from None
            self._note(failure)
            self._breaker.failed(ticket or 0)

    # One operation.

    def _exchange(self, todo: Iterator[Exchange | Result]) -> Iterator[Result]:
        batch = Pipeline(self._pool, self._guard, todo, self._window, self._timeouts[1])
        try:
            yield from batch.results()
        finally:
            for key in batch.damaged:
                self._delete(key)

    def _attempt(self, operation: Callable[[Link], T]) -> T | StoreError:
        ticket = self._admit()
        if isinstance(ticket, StoreError):
            return ticket
        try:
            with self._pool.link() as link:
                result = operation(link)
        except Exception as error:  # noqa: BLE001 - the contract: a failing store is data
            failure = explain(error)
            self._failed(ticket, failure)
            return failure
        self._breaker.succeeded(ticket)
        return result

    def _admit(self) -> int | StoreError:
        if self._closed:
            return StoreError("closed", "the tier is closed", down=False)
        ticket = self._breaker.admit()
        if ticket is None:
            return StoreError("breaker", "the server was not answering", down=False)
        return ticket

    def _failed(self, ticket: int, failure: StoreError) -> None:
        self._note(failure)
        lost = failure.down or self._endpoint.led_astray(failure)
        if lost and not self._closed:
            self._breaker.failed(ticket)

    def _delete(self, key: str) -> None:
        """Remove a damaged value, so that a sound one can be written in its place."""
        if not self._may_delete():
            self._emit("delete", "limited")
            return
        done = self._attempt(lambda link: _all(link, [pack("DEL", key)], 1))
        self._emit("delete", "failed" if isinstance(done, StoreError) else "done")

    def _may_delete(self) -> bool:
        now = time.monotonic()
        with self._lock:
            while self._deleted and now - self._deleted[0] > _MINUTE_S:
                self._deleted.popleft()
            if len(self._deleted) >= self._delete_limit:
                return False
            self._deleted.append(now)
            return True

    # The breaker and its background thread.

    def _changed(self, state: Health) -> None:
        if state is Health.OPEN:
            self._pool.drop_idle()
            self._start_prober()
        elif state is Health.CLOSED:
            logger.info("remote tier %s answers again", self._endpoint.label)
        self._emit("breaker", state.value)

    def _start_prober(self) -> None:
        with self._lock:
            if self._prober is not None or self._closed:
                return
            self._prober = threading.Thread(
                target=self._probe_until_closed, name="elora-redis-probe", daemon=True
            )
            self._prober.start()

    def _probe_until_closed(self) -> None:
        while not self._stop.wait(self._breaker.wait_s()):
            if self._breaker.begin_probe():
                self._breaker.end_probe(self._alive())
            with self._lock:
                # Under the lock, or a breaker that opens right now would find this thread
                # registered and start no other.
                if self._breaker.state is Health.CLOSED:
                    self._prober = None
                    return

    def _alive(self) -> bool:
        try:
            self.ping()
        except Exception as error:  # noqa: BLE001 - without its thread the tier stays off for ever
            self._note(explain(error))
            return False
        return True

    # Telling.

    def _note(self, failure: StoreError) -> None:
        self._emit("error", failure.reason)
        now = time.monotonic()
        with self._lock:
            last = self._logged.get(failure.reason)
            if self._closed or (last is not None and now - last < _LOG_INTERVAL_S):
                return
            self._logged[failure.reason] = now
        logger.warning(
            "remote tier %s: %s [%s]; KV is recomputed meanwhile",
            self._endpoint.label,
            failure,
            failure.reason,
        )

    def _emit(self, event: str, detail: str) -> None:
        if self._on_event is not None:
            self._on_event(event, detail)


def _only(results: Iterator[Result]) -> Result:
    (result,) = results
    return result


def _exists(link: Link, groups: Sequence[Sequence[str]]) -> list[Reply]:
    commands = [b"".join(pack("EXISTS", *group) for group in groups)]
    return _all(link, commands, len(groups))


def _all(link: Link, commands: Sequence[bytes], count: int) -> list[Reply]:
    link.send(commands, count)
    return link.replies(count)
