"""Bad networks on 127.0.0.1: slow, cut, trickling, silent, or never accepting."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class SlowProxy:
    """Forwards TCP to a local port; the faults can be changed while it runs.

    Attributes:
        latency_ms: added to every chunk that goes back to the client.
        cut_after: break each connection after this many bytes to the client, or None.
        blackhole: accept and read, but answer nothing.
        trickle: send the answer one byte at a time with `latency_ms` between.
        connections: accepted so far.
        turns: times the client spoke after it had been answered, over all connections:
            the round trips of a client that does one thing at a time and sends each
            request in one segment.
    """

    def __init__(self, port: int, *, latency_ms: float = 0.0, cut_after: int | None = None) -> None:
        self.latency_ms = latency_ms
        self.cut_after = cut_after
        self.blackhole = False
        self.trickle = False
        self.connections = 0
        self.turns = 0
        self._answered = True
        self._target = port
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._listeners: list[socket.socket] = []
        self.port = 0
        self.listen_on("127.0.0.1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def listen_on(self, host: str) -> None:
        """Accept on a further address, on the same port."""
        listener = socket.create_server((host, self.port))
        self.port = int(listener.getsockname()[1])
        self._listeners.append(listener)
        self._spawn(self._accept, listener)

    def stop(self) -> None:
        self._stopped.set()
        for sock in (*self._listeners, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            try:
                client = self._receive(client)
                server = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            self._spawn(self._forward, client, server)
            self._spawn(self._answer, server, client)

    def _receive(self, client: socket.socket) -> socket.socket:
        return client

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with _ends(client, server):
            while data := client.recv(65536):
                if not self.blackhole:
                    self.turns += self._answered
                    self._answered = False
                    server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        left = self.cut_after
        with _ends(client, server):
            while data := server.recv(65536):
                self._answered = True
                for piece in self._pieces(data):
                    if self._stopped.wait(self.latency_ms / 1000.0):
                        return
                    if left is None:
                        client.sendall(piece)
                        continue
                    client.sendall(piece[:left])
                    left -= len(piece)
                    if left <= 0:
                        return

    def _pieces(self, data: bytes) -> list[bytes]:
        return [data[i : i + 1] for i in range(len(data))] if self.trickle else [data]


@contextlib.contextmanager
def _ends(*sockets: socket.socket) -> Iterator[None]:
    """Whatever ends one direction ends the connection."""
    try:
        yield
    except OSError:
        return
    finally:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class ScriptedServer:
    """Answers whatever arrives with the same bytes; no Redis behind it.

    Attributes:
        answer: sent for each chunk received.
        hang_up: close instead of answering.
    """

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.hang_up = False
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._converse, args=(client,), daemon=True).start()

    def _converse(self, client: socket.socket) -> None:
        with _ends(client):
            while client.recv(65536) and not self.hang_up:
                client.sendall(self.answer)


class TlsProxy(SlowProxy):
    """Speaks TLS to the client and plain TCP to the server behind."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(port)

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    def _receive(self, client: socket.socket) -> socket.socket:
        client.settimeout(5)
        wrapped = self._context.wrap_socket(client, server_side=True)
        wrapped.settimeout(None)
        return wrapped


class EitherProxy(TlsProxy):
    """Also lets clients through that speak no TLS: the servers' own, behind it."""

    def _receive(self, client: socket.socket) -> socket.socket:
        client.settimeout(5)
        hello = client.recv(1, socket.MSG_PEEK)
        client.settimeout(None)
        return super()._receive(client) if hello == b"\x16" else client


@contextlib.contextmanager
def blackhole_port() -> Iterator[int]:
    """A port that drops SYNs: its accept queue is full and nobody empties it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.05)
        yield port
