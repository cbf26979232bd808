"""Make the small traces that the simulator brings along from the larger ones they stem from.

Usage: python scripts/thin_traces.py SOURCE_FOLDER [TARGET_FOLDER]

The source folder holds the compact files named in `main`; elora_connector/simulator/data/
README.md says where each comes from and under which licence.  The same input gives the
same bytes.  What is dropped:

* Mooncake: nothing.  Ids of new blocks are consecutive, and every block has one parent, so
  a request is told by its time, its lengths and the last block that it shares with
  requests before it (-1: none).
* Azure conversations: requests after 1,800 s.  Azure code: nothing.
* ServeGen: all windows but 24 h: the first, for m-mid those after 12 h, whose beginning is not
  like the rest of it; times start at 0.  Lengths of clients: nothing.
* Taskmaster: nothing.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "elora_connector" / "simulator" / "data"


def lines_of(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield line.rstrip("\n")


def mooncake(lines: Iterable[str]) -> Iterator[str]:
    """Rows of `ms,input,output,last shared block`."""
    yield "t_ms,input_tokens,output_tokens,shared"
    parent: dict[int, int] = {}
    for line in lines:
        at, prompt, answer, ids = json.loads(line)
        known = len(parent)
        shared = next((n for n, item in enumerate(ids) if item >= known), len(ids))
        assert ids[shared:] == list(range(known, known + len(ids) - shared)), line[:80]
        assert len(ids) == -(-prompt // 512), line[:80]
        for before, item in zip([-1, *ids], ids, strict=False):
            assert parent.setdefault(item, before) == before, line[:80]
        yield f"{at},{prompt},{answer},{ids[shared - 1] if shared else -1}"


def before(lines: Iterable[str], column: int, limit: float) -> Iterator[str]:
    """The header and the rows whose `column` is below `limit`."""
    for number, line in enumerate(lines):
        if number == 0 or float(line.split(",")[column]) < limit:
            yield line


def day(lines: Iterable[str], first: int) -> Iterator[str]:
    """The header and the windows of 24 h from `first` s on, with times from there."""
    for number, line in enumerate(lines):
        if number == 0:
            yield line
            continue
        rank, at, rest = line.split(",", 2)
        if first <= int(at) < first + 86400:
            yield f"{rank},{int(at) - first},{rest}"


def write(path: Path, lines: Iterable[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(text.encode())
    print(f"{path.stat().st_size:8d} {path.name}")


def main(source: Path, target: Path) -> None:
    for name in ("conversation", "synthetic"):
        rows = lines_of(source / f"mooncake_fast25_{name}.jsonl.gz")
        write(target / f"mooncake_{name}.csv.gz", mooncake(rows))
    for name, limit in (("code", 1e9), ("conv", 1800)):
        rows = lines_of(source / f"azure_llm2023_{name}.csv.gz")
        write(target / f"azure_{name}.csv.gz", before(rows, 0, limit))
    for name, first in (("large", 0), ("mid", 43200), ("small", 0)):
        rows = lines_of(source / f"servegen_m-{name}_rates.csv.gz")
        write(target / f"servegen_{name}_rates.csv.gz", day(rows, first))
        rows = lines_of(source / f"servegen_m-{name}_clients.csv.gz")
        write(target / f"servegen_{name}_clients.csv.gz", rows)
    write(target / "taskmaster.jsonl.gz", lines_of(source / "taskmaster4_dialogs.jsonl.gz"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else DATA)
