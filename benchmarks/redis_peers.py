"""Ways to move chunks in and out of a Redis, under one interface.

Each keeps its connections between rounds.  Payloads come from, and go to, the same
slots for all of them; what a client allocates by itself instead is part of its cost.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import redis

from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import Item, Result, ValueSpec
from elora_connector.tiers.codec import encode_header
from elora_connector.tiers.redis import RedisTier

Slots = Sequence[memoryview]
BATCH_BYTES = 16 << 20


class Peer(Protocol):
    """`put` stores slot i under keys[i]; `get` reads it back into slot i (modulo slots)."""

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        """Seconds per chunk; within a batch, from one result to the next."""
        ...

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]: ...


class Laps:
    """Time from one call to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def lap(self, chunks: int = 1) -> None:
        now = time.perf_counter()
        self.seconds += [(now - self._last) / chunks] * chunks
        self._last = now


class BareSocket:
    """The ceiling: RESP by hand, blocking socket, no header, no check, no deadline.

    Args:
        window: commands sent ahead of their replies; 1 is one by one.
    """

    def __init__(self, port: int, window: int = 1) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._window = window
        self._near = memoryview(bytearray(16 * 1024))
        self._start = self._end = 0

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps, answered = Laps(), 0
        for sent, key in enumerate(keys, start=1):
            payload = slots[(sent - 1) % len(slots)]
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
                len(key),
                key.encode(),
                payload.nbytes,
            )
            self._send([head, payload, b"\r\n"])
            while answered < len(keys) and (
                sent - answered >= self._window or sent == len(keys) > answered
            ):
                self._skip(len(b"+OK\r\n"))
                answered += 1
                laps.lap()
        return laps.seconds

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps, asked = Laps(), 0
        head = len(b"$%d\r\n" % slots[0].nbytes)
        for position in range(len(keys)):
            while asked < min(len(keys), position + self._window):
                key = keys[asked].encode()
                self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                asked += 1
            self._skip(head)
            self._fill(slots[position % len(slots)])
            self._skip(2)
            laps.lap()
        return laps.seconds

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        sent = self._sock.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                self._sock.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))

    def _skip(self, size: int) -> None:
        """Past what is known anyway, with one receive for it and what follows."""
        while size:
            if self._start == self._end:
                self._start, self._end = 0, self._sock.recv_into(self._near)
                if not self._end:
                    raise ConnectionError("the server closed the connection")
            step = min(size, self._end - self._start)
            self._start += step
            size -= step

    def _fill(self, dest: memoryview) -> None:
        near = self._near[self._start : self._end][: dest.nbytes]
        dest[: near.nbytes] = near
        self._start += near.nbytes
        rest = dest[near.nbytes :]
        if self._sock.recv_into(rest, 0, socket.MSG_WAITALL) < rest.nbytes:
            raise ConnectionError("the server closed the connection")


class RedisPy:
    """redis-py with hiredis, one command at a time; a bytes object is copied into the slot."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(host="127.0.0.1", port=port)

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps = Laps()
        for position, key in enumerate(keys):
            self._client.set(key, slots[position % len(slots)])
            laps.lap()
        return laps.seconds

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps = Laps()
        for position, key in enumerate(keys):
            slots[position % len(slots)][:] = self._client.get(key)
            laps.lap()
        return laps.seconds


class RedisPyBatched(RedisPy):
    """A pipeline of SETs, and MGET, in batches of 16 MiB."""

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps = Laps()
        for batch in batches(keys, slots):
            with self._client.pipeline(transaction=False) as pipeline:
                for position, key in enumerate(batch):
                    pipeline.set(key, slots[position % len(slots)])
                pipeline.execute()
            laps.lap(len(batch))
        return laps.seconds

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps = Laps()
        for batch in batches(keys, slots):
            for position, value in enumerate(self._client.mget(batch)):
                slots[position % len(slots)][:] = value
            laps.lap(len(batch))
        return laps.seconds


class Ours:
    """`RedisTier`.

    Args:
        batched: through `read_many` and `write_many` instead of one call per chunk.
    """

    def __init__(
        self, port: int, *, batched: bool, checksum: bool, mac_key: bytes | None = None
    ) -> None:
        self._batched = batched
        self._tier = RedisTier(
            f"redis://127.0.0.1:{port}/0",
            ttl_s=3600,
            connect_timeout_s=30.0,
            operation_timeout_s=30.0,
            checksum=checksum,
            mac_key=mac_key,
            fail_open=False,
        )

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        if self._batched:
            return self._batch(self._tier.write_many, keys, slots)
        return self._singly(self._tier.write, keys, slots)

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        if self._batched:
            return self._batch(self._tier.read_many, keys, slots)
        return self._singly(self._tier.read_into, keys, slots)

    def _batch(
        self,
        call: Callable[[Iterable[Item]], Iterable[Result]],
        keys: Sequence[str],
        slots: Slots,
    ) -> list[float]:
        laps = Laps()
        for result in call(self._items(keys, slots)):
            _must(result)
            laps.lap()
        return laps.seconds

    def _singly(
        self, call: Callable[[ValueSpec, memoryview], Result], keys: Sequence[str], slots: Slots
    ) -> list[float]:
        laps = Laps()
        for spec, slot in self._items(keys, slots):
            _must(call(spec, slot))
            laps.lap()
        return laps.seconds

    def _items(self, keys: Sequence[str], slots: Slots) -> Iterable[Item]:
        for position, key in enumerate(keys):
            slot = slots[position % len(slots)]
            yield _spec(key, slot.nbytes), slot


class Several:
    """The same peer on several connections, one thread each, keys dealt out."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        return self._all(keys, slots, lambda peer, k, s: peer.put(k, s))

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        return self._all(keys, slots, lambda peer, k, s: peer.get(k, s))

    def _all(
        self,
        keys: Sequence[str],
        slots: Slots,
        call: Callable[[Peer, Sequence[str], Slots], list[float]],
    ) -> list[float]:
        count = len(self._peers)
        laps: list[list[float]] = [[] for _ in self._peers]

        def work(index: int) -> None:
            laps[index] = call(self._peers[index], keys[index::count], slots[index::count])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [seconds for one in laps for seconds in one]


def seal_seconds(slots: Slots, mac_key: bytes | None, *, checksum: bool) -> float:
    """CPU seconds to make the header of one chunk: its sum and MAC are all that counts."""
    start = time.thread_time()
    for slot in slots:
        encode_header(_spec("chunk:0:0", slot.nbytes), slot, mac_key, checksum=checksum)
    return (time.thread_time() - start) / len(slots)


def batches(keys: Sequence[str], slots: Slots) -> Iterable[Sequence[str]]:
    """The keys in runs of at most `BATCH_BYTES` of payload."""
    size = max(1, BATCH_BYTES // slots[0].nbytes)
    return (keys[start : start + size] for start in range(0, len(keys), size))


def _must(result: Result) -> None:
    if not result.ok or result.reason:
        raise RuntimeError(f"an operation ended as {result}")


def _spec(key: str, nbytes: int) -> ValueSpec:
    return ValueSpec(
        key=key,
        namespace=bytes(32),
        identity=Identity("adapter", bytes(32)),
        chunk=ChunkKey(key.encode().ljust(32, b"\0")[:32]),
        parent=bytes(32),
        rank=Rank(),
        dtype="bfloat16",
        shape=(nbytes,),
        nbytes=nbytes,
    )
