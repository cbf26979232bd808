"""A server that speaks RESP and answers each command as a test says.

For replies that a real server gives only in states which are hard to bring about.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from typing_extensions import Self

Answer = Callable[[list[bytes]], bytes | None]
"""Given a command, its reply in RESP; None closes the connection instead."""

OK = b"+OK\r\n"
NIL = b"$-1\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class FakeRedis:
    """Accepts on 127.0.0.1 until it is left.

    Attributes:
        answer: may be replaced at any time; greetings (CLIENT, PING ...) are answered here.
        commands: GET, SET and whatever else is no greeting, in the order received.
        connections: accepted so far.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            _hang_up(sock)
        self._thread.join(5)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            threading.Thread(target=self._converse, args=(client,), daemon=True).start()

    def _converse(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            while (command := _read_command(stream)) is not None:
                reply = self._reply(command)
                if reply is None:
                    break
                client.sendall(reply)
        _hang_up(client)

    def _reply(self, command: list[bytes]) -> bytes | None:
        if command[0] in {b"CLIENT", b"PING", b"SELECT"}:
            return OK
        self.commands.append(command)
        return self.answer(command)


def _read_command(stream: BinaryIO) -> list[bytes] | None:
    head = stream.readline()
    if not head:
        return None
    command = []
    for _ in range(int(head[1:])):
        size = int(stream.readline()[1:])
        command.append(stream.read(size))
        stream.read(2)
    return command


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
