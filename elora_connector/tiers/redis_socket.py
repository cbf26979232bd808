"""A connected socket whose every wait ends at one absolute deadline.

A plain socket stays in blocking mode and the kernel keeps the time: one system call
moves a megabyte, and Python's global lock is let go and taken once for it instead of
once for every few packets.  That counts when the other threads of the process compute.
A TLS socket can only be driven with Python's own timeouts.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

_TIMEVAL = struct.Struct("ll")
_AT_LEAST_S: Final = 0.0001
_SLACK: Final = 0.1
"""The kernel's timeout is renewed when it is this far off what is left."""


class Wire(Protocol):
    """What a `Link` needs of a socket.  `TimeoutError` where the deadline passes."""

    deadline: float
    """In `time.monotonic` seconds."""

    def receive(self, dest: memoryview) -> int:
        """At least one byte, at most all of `dest`; 0: the other side closed."""
        ...

    def receive_all(self, dest: memoryview) -> int:
        """As `receive`, but it waits until `dest` is full; less only at the end."""
        ...

    def send(self, pieces: Sequence[Any]) -> None:
        """All pieces, one after the other, without joining them."""
        ...


def wire_for(sock: Any, deadline: float) -> Wire:
    return TlsWire(sock, deadline) if isinstance(sock, ssl.SSLSocket) else PlainWire(sock, deadline)


class PlainWire:
    """TCP or unix socket, blocking; the kernel's send and receive timeouts end a wait."""

    def __init__(self, sock: Any, deadline: float) -> None:
        self.deadline = deadline
        self._sock = sock
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.settimeout(None)

    def receive(self, dest: memoryview) -> int:
        while True:
            self._arm(socket.SO_RCVTIMEO)
            try:
                return int(self._sock.recv_into(dest))
            except BlockingIOError:
                continue

    def receive_all(self, dest: memoryview) -> int:
        done = 0
        while done < dest.nbytes:
            self._arm(socket.SO_RCVTIMEO)
            try:
                got = self._sock.recv_into(dest[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not got:
                break
            done += got
        return done

    def send(self, pieces: Sequence[Any]) -> None:
        left = [memoryview(piece).cast("B") for piece in pieces]
        while left:
            self._arm(socket.SO_SNDTIMEO)
            try:
                sent = self._sock.sendmsg(left)
            except BlockingIOError:
                continue
            left = _after(left, sent)

    def _arm(self, option: int) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        armed = self._armed[option]
        if abs(left - armed) > _SLACK * left:
            seconds = max(_AT_LEAST_S, left)
            value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)
            self._armed[option] = left


class TlsWire:
    """Python's socket timeout, renewed before every call."""

    def __init__(self, sock: Any, deadline: float) -> None:
        self.deadline = deadline
        self._sock = sock

    def receive(self, dest: memoryview) -> int:
        self._arm()
        return int(self._sock.recv_into(dest))

    def receive_all(self, dest: memoryview) -> int:
        done = 0
        while done < dest.nbytes and (got := self.receive(dest[done:])):
            done += got
        return done

    def send(self, pieces: Sequence[Any]) -> None:
        left = [memoryview(piece).cast("B") for piece in pieces]
        while left:
            self._arm()
            left = _after(left, self._sock.send(left[0]))

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        self._sock.settimeout(left)


def _after(pieces: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of the pieces when `sent` bytes of them are gone."""
    while pieces and sent >= pieces[0].nbytes:
        sent -= pieces[0].nbytes
        pieces = pieces[1:]
    return [pieces[0][sent:], *pieces[1:]] if pieces else []
