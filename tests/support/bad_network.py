"""A TCP proxy in a process of its own whose faults change while it runs.

`BadNetwork` is the handle, `python -m tests.support.bad_network PORT SEED` the process:
the engine under test shares neither its interpreter lock nor its file descriptors, so
what is measured of the engine is the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_ROOT = Path(__file__).resolve().parents[2]
_PIECE = 65536
_IN_VALUE = 4096
"""Only payloads come in pieces as large as this: such a piece lies inside a value."""


@dataclass
class Weather:
    """Faults of the moment; the default is a good network.

    Attributes:
        latency_ms: delay of each piece that goes back to the client.
        bytes_per_s: limit of each direction of each connection, 0 for none.
        blackhole: read and drop everything, in both directions.
        refuse: end new connections before the first byte.
        hold: after so many bytes inside values for the server pass on one half of the
            next piece and nothing more, until the weather changes; 0 for never.
        cut, flip, garble, repeat: chance for each piece to be cut in two and the
            connection reset (inside a value only), to have bits turned (both
            directions), to be replaced by bytes of no protocol, to be sent twice.
    """

    latency_ms: float = 0.0
    bytes_per_s: float = 0.0
    blackhole: bool = False
    refuse: bool = False
    hold: int = 0
    cut: float = 0.0
    flip: float = 0.0
    garble: float = 0.0
    repeat: float = 0.0


class BadNetwork:
    """Handle of the proxy process; `url` is what clients of the proxied Redis get."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bad_network", str(port), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )
        self.port = int(self._answer()["port"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextlib.contextmanager
    def weather(self, **faults: Any) -> Iterator[None]:
        """Bad weather for a while; what is not named is fine."""
        self._ask(asdict(Weather(**faults)))
        try:
            yield
        finally:
            self._ask(asdict(Weather()))

    def counts(self) -> Counter[str]:
        """How often each fault struck, and `connections`, since the start."""
        counts: dict[str, int] = self._ask({})["counts"]
        return Counter(counts)

    def _ask(self, change: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(change) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended ({self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer


# ---- the process -----------------------------------------------------------------------


def _end(*writers: asyncio.StreamWriter, abruptly: bool) -> None:
    """Close politely after what was sent, or by a reset that may overtake it."""
    for writer in writers:
        if abruptly:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        writer.close()


class _Proxy:
    def __init__(self, port: int, seed: int) -> None:
        self._target = port
        self._rng = random.Random(seed)
        self._changed = asyncio.Event()
        self._in_values = 0
        self.weather = Weather()
        self.counts: Counter[str] = Counter()

    def change(self, weather: Weather) -> None:
        self.weather = weather
        self._in_values = 0
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        if self.weather.refuse:
            self.counts["refused"] += 1
            writer.close()
            return
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(self._carry(reader, forth, to_server=True)),
            asyncio.ensure_future(self._carry(back, writer, to_server=False)),
        ]
        # Whatever ends one direction ends the connection.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        _end(writer, forth, abruptly=self._rng.random() < 0.5)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE):
                if self.weather.blackhole:
                    self.counts["swallowed"] += 1
                    continue
                if not to_server:
                    await self._delay()
                    data = self._garbled(data)
                data, cut = self._cut(self._flipped(data))
                held = to_server and self._holds(data)
                data = data[: len(data) // 2] if held else data
                async for piece in self._slowly(data):
                    sink.write(piece)
                    await sink.drain()
                if held:
                    self.counts["held"] += 1
                    await self._changed.wait()
                if cut or held:
                    return

    def _holds(self, data: bytes) -> bool:
        if len(data) < _IN_VALUE:
            return False
        self._in_values += len(data)
        return 0 < self.weather.hold < self._in_values

    async def _delay(self) -> None:
        if self.weather.latency_ms:
            self.counts["delayed"] += 1
            await asyncio.sleep(self.weather.latency_ms / 1000)

    async def _slowly(self, data: bytes) -> Any:
        step = 8192 if self.weather.bytes_per_s else len(data)
        for start in range(0, len(data), step):
            rate = self.weather.bytes_per_s
            if rate and len(data) > step:
                self.counts["throttled"] += 1
                await asyncio.sleep(step / rate)
            yield data[start : start + step]

    def _struck(self, fault: str, chance: float) -> bool:
        if self._rng.random() >= chance:
            return False
        self.counts[fault] += 1
        return True

    def _garbled(self, data: bytes) -> bytes:
        if self._struck("garbled", self.weather.garble):
            return self._rng.choice(
                [
                    b"HTTP/1.1 502 Bad Gateway\r\n\r\n",
                    b"\x15\x03\x01\x00\x02\x02\x46",
                    b"$99999999999999\r\n",
                    self._rng.randbytes(64),
                ]
            )
        if self._struck("repeated", self.weather.repeat):
            return data + data
        return data

    def _flipped(self, data: bytes) -> bytes:
        if not self._struck("flipped", self.weather.flip):
            return data
        start, length = self._rng.randrange(len(data)), self._rng.choice([1, 2000])
        turned = bytes(byte ^ 0x40 for byte in data[start : start + length])
        return data[:start] + turned + data[start + length :]

    def _cut(self, data: bytes) -> tuple[bytes, bool]:
        if len(data) < _IN_VALUE or not self._struck("cut", self.weather.cut):
            return data, False
        return data[: self._rng.randrange(1, len(data))], True


async def _main(port: int, seed: int) -> None:
    proxy = _Proxy(port, seed)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_PIECE)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while line := await orders.readline():
        change = json.loads(line)
        if change:
            proxy.change(Weather(**change))
        print(json.dumps({"counts": proxy.counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
