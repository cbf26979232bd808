"""A few daemon threads that run callables: a stuck read must never keep a process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DaemonPool:
    """Like `ThreadPoolExecutor`, which joins its threads at exit; this one does not."""

    def __init__(self, threads: int, name: str, setup: Callable[[], None] | None = None) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._setup = setup
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on a thread; its result or exception goes into the future."""
        future: Future[T] = Future()
        self._work.put(lambda: _fulfil(future, call))
        return future

    def close(self) -> None:
        """Let the threads end after what they are doing; does not wait."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        if self._setup is not None:
            self._setup()
        while (work := self._work.get()) is not None:
            work()


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  (handed to whoever asks for the result)
        future.set_exception(error)
    else:
        future.set_result(result)
