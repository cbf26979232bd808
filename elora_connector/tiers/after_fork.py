"""Objects with threads, locks or sockets begin anew in a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def begin_anew(begin: Callable[[], None]) -> None:
    """Call the bound method `begin` in every forked child; its object may be collected."""
    method = weakref.WeakMethod(begin)

    def reset() -> None:
        alive = method()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=reset)
