"""An adapter directory whose content changes during a test."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from elora_connector.integration.vllm.identity import is_settled, stat_key

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class AdapterDir:
    """A copy of an adapter at a place of its own; `path` is what a LoRARequest gets."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.put(source)

    def put(self, source: Path) -> None:
        """Replace the files by those of another adapter, as a deployment would."""
        self.path.mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            fresh = self.path / f"{name}.new"
            shutil.copyfile(source / name, fresh)
            fresh.replace(self.path / name)
        self.wait_settled()

    def put_unseen(self, source: Path) -> None:
        """Other content in the same files: size, mtime and inode stay as they were."""
        for name in (CONFIG, WEIGHTS):
            file = self.path / name
            before = file.stat()
            content = (source / name).read_bytes()
            assert len(content) == before.st_size
            with open(file, "r+b") as stream:
                stream.write(content)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            after = file.stat()
            assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
                before.st_ino,
                before.st_size,
                before.st_mtime_ns,
            )
        self.wait_settled()

    def damage(self) -> None:
        """Cut the weight file short, as a full disk would."""
        weights = self.path / WEIGHTS
        content = weights.read_bytes()
        weights.write_bytes(content[: len(content) // 2])

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def wait_settled(self) -> None:
        """Until a further write is sure to show in the files' times."""
        end = time.monotonic() + 10
        while not is_settled(stat_key(self.path), time.time_ns()):
            assert time.monotonic() < end, "the files never came to rest"
            time.sleep(0.005)
