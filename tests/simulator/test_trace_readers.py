"""Readers of traces: what they find, and one clear error for what they cannot read."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from elora_connector.errors import TraceError
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.popularity import popularity
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.traces import FORMATS, RawTrace, TraceRow, read_rows, write_trace
from elora_connector.simulator.traces.servegen import read_lengths, read_rates
from elora_connector.simulator.traces.taskmaster import read_dialogues

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 5, "hash_ids": [0]}\n'
)
COMPACT_MOONCAKE = "[0,1100,10,[0,1,2]]\n[1500,512,5,[0]]\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
)
AZURE_ZONE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 02:00:01.017335+02:00,2399,6\n"
)
AZURE_COMPACT = "t_s,input_tokens,output_tokens\n0.000,4808,10\n0.052,3180,8\n"
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,s1,2.5,ChatGPT,472,18,490,Conversation log\n"
    "45,s1,0,ChatGPT,1087,0,1087,Conversation log\n"
    "118,,3,GPT-4,417,276,693,API log\n"
)
BURST_OLD = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
)
BAILIAN = (
    '{"chat_id":159,"parent_chat_id":-1,"timestamp":61.114,"input_length":35,'
    '"output_length":10,"type":"text","turn":1,"hash_ids":[1,2,3]}\n'
    '{"chat_id":160,"parent_chat_id":159,"timestamp":70.5,"input_length":64,'
    '"output_length":8,"type":"text","turn":2,"hash_ids":[1,2,4,5]}\n'
    '{"chat_id":161,"parent_chat_id":7,"timestamp":70.5,"input_length":20,'
    '"output_length":8,"type":"text","turn":3,"hash_ids":[9,10]}\n'
)
OWN = (
    '{"format":"elora-trace","version":1,"name":"mine","chunk_tokens":64}\n'
    '{"at":0.0,"adapter":"a","session":0,"prompt_tokens":150,"output_tokens":60,"chunks":[0,1,2]}\n'
    '{"at":2.5,"adapter":"","session":"x","prompt_tokens":70,"output_tokens":1,"think_s":1.5}\n'
)
GOOD = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "azure-compact": AZURE_COMPACT,
    "burstgpt": BURST,
    "bailian": BAILIAN,
    "elora": OWN,
}


def put(folder: Path, text: str | bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(folder: Path, text: str) -> RawTrace:
    return read_rows(put(folder, text))


def test_mooncake_in_both_forms(tmp_path: Path) -> None:
    expected = (
        TraceRow(0.0, 1100, 10, blocks=(0, 1, 2)),
        TraceRow(1.5, 512, 5, blocks=(0,)),
    )
    for text in (MOONCAKE, COMPACT_MOONCAKE, "\ufeff\n" + MOONCAKE.replace("\n", "\r\n\r\n")):
        raw = rows(tmp_path, text)
        assert (raw.format, raw.block_tokens, raw.name) == ("mooncake", 512, "trace")
        assert raw.rows == expected


def test_azure_in_three_forms(tmp_path: Path) -> None:
    raw = rows(tmp_path, AZURE)
    assert raw.format == "azure"
    assert raw.rows == (TraceRow(0.0, 4808, 10), TraceRow(0.052, 3180, 8))
    assert rows(tmp_path, AZURE_COMPACT).rows == raw.rows
    zone = rows(tmp_path, AZURE_ZONE).rows
    assert [row.at for row in zone] == [0.0, pytest.approx(1.007405, abs=1e-5)]


def test_burstgpt_leaves_out_failed_requests(tmp_path: Path) -> None:
    raw = rows(tmp_path, BURST)
    assert (raw.format, raw.skipped) == ("burstgpt", 1)
    assert raw.rows == (TraceRow(5.0, 472, 18, session="s1"), TraceRow(118.0, 417, 276))
    assert rows(tmp_path, BURST_OLD).rows == (TraceRow(5.0, 472, 18),)


def test_bailian_sessions_follow_the_parents(tmp_path: Path) -> None:
    raw = rows(tmp_path, BAILIAN)
    assert (raw.format, raw.block_tokens) == ("bailian", 16)
    assert [row.session for row in raw.rows] == ["159", "159", "161"]
    assert raw.rows[1] == TraceRow(70.5, 64, 8, session="159", blocks=(1, 2, 4, 5))
    trace = to_trace(raw, 16)
    assert [(r.session, r.turn) for r in trace.requests] == [(0, 0), (0, 1), (1, 0)]
    assert trace.requests[0].labels == trace.requests[1].labels[:2]


def test_our_own_rows(tmp_path: Path) -> None:
    raw = rows(tmp_path, OWN)
    assert (raw.format, raw.name, raw.block_tokens, raw.covers_answer) == (
        "elora",
        "mine",
        64,
        True,
    )
    assert raw.rows == (
        TraceRow(0.0, 150, 60, adapter="a", session="0", blocks=(0, 1, 2)),
        TraceRow(2.5, 70, 1, adapter="", session="x", think_s=1.5),
    )


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        raw = read_rows(put(tmp_path, gzip.compress(text.encode()), "t"))
        assert raw.format == name
        assert raw.rows == read_rows(put(tmp_path, text), name).rows


def sample() -> Trace:
    """Two adapters, a shared prefix, a second turn, labels of 64 bits."""
    big = (1 << 64) - 1
    return Trace(
        "made",
        64,
        (
            SimRequest(0.0, "a/\u00e9 \u2028", 5, 0, 0.0, (big, 17, 3), 150, 60),
            SimRequest(0.25, "", 6, 0, 0.0, (), 40, 2),
            SimRequest(1.5, "a/\u00e9 \u2028", 5, 1, 0.5, (big, 17, 3, 9), 240, 20),
            SimRequest(1.5, "b", 7, 0, 0.0, (8,), 64, 1),
        ),
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_we_write_reads_back(tmp_path: Path, name: str) -> None:
    trace = sample()
    write_trace(trace, tmp_path / name)
    back = to_trace(read_rows(tmp_path / name), 64)
    assert (back.name, back.chunk_tokens) == ("made", 64)
    renamed = {5: 0, 6: 1, 7: 2}
    labels: dict[int, int] = {}
    for old, new in zip(trace.requests, back.requests, strict=True):
        assert (old.at, old.adapter, old.turn, old.think_s) == (
            new.at,
            new.adapter,
            new.turn,
            new.think_s,
        )
        assert (old.prompt_tokens, old.output_tokens) == (new.prompt_tokens, new.output_tokens)
        assert renamed[old.session] == new.session
        assert len(old.labels) == len(new.labels)
        for a, b in zip(old.labels, new.labels, strict=True):
            assert labels.setdefault(a, b) == b
    assert len(set(labels.values())) == len(labels) == 5
    write_trace(back, tmp_path / ("2" + name))
    assert (tmp_path / ("2" + name)).read_bytes() == (tmp_path / name).read_bytes()
    assert to_trace(read_rows(tmp_path / ("2" + name)), 64) == back


BAD = [
    ("", 0, "the file is empty"),
    ("\n \n", 0, "the file is empty"),
    ("hello\n", 1, "not a trace of a known format"),
    ("a,b\n1,2\n", 1, "not a trace of a known format"),
    ("TIMESTAMP,ContextTokens\n", 1, "no column GeneratedTokens"),
    ("Timestamp,Request tokens\n", 1, "no column Response tokens"),
    (AZURE_COMPACT + "1.0,5\n", 4, "expected 3 cells, found 2"),
    (AZURE_COMPACT + "0.051,5,5\n", 4, "times are not sorted"),
    (AZURE + "2023-11-16 18:17:03.9,1,1\n", 4, "times are not sorted"),
    (AZURE + "2023-13-16 18:17:03.9,1,1\n", 4, "TIMESTAMP"),
    (AZURE + "yesterday,1,1\n", 4, "TIMESTAMP: expected YYYY"),
    (AZURE_COMPACT + "1,-5,5\n", 4, "input_tokens: '-5' is negative"),
    (AZURE_COMPACT + "1,5,nan\n", 4, "expected a finite number"),
    (AZURE_COMPACT + "1,5,many\n", 4, "output_tokens: expected a number, found 'many'"),
    (AZURE_COMPACT + "1,5.5,1\n", 4, "input_tokens: expected a whole number"),
    (AZURE_COMPACT + "1,1e30,1\n", 4, "is more than 16777216 tokens"),
    (AZURE_COMPACT + "-1,5,1\n", 4, "t_s: '-1' is negative"),
    (AZURE_COMPACT + "inf,5,1\n", 4, "t_s: expected a finite number"),
    ("t_s,input_tokens,output_tokens\n", 0, "no requests in this file"),
    (AZURE_COMPACT + '1,"5,1\n', 4, "not a line of a table"),
    (MOONCAKE + "{", 3, "not valid JSON"),
    (MOONCAKE + "[" * 100_000, 3, "not valid JSON"),
    (MOONCAKE + "7\n", 3, "expected an object with timestamp"),
    (MOONCAKE + "[1,2]\n", 3, "expected an object with timestamp"),
    (MOONCAKE + '{"timestamp": 2000, "input_length": 3}\n', 3, "no field output_length"),
    (MOONCAKE + "[2000,3,4,7]\n", 3, "hash_ids: expected a list of whole numbers"),
    (
        MOONCAKE + "[2000,3,4,[true]]\n",
        3,
        "hash_ids: expected whole numbers of 64 bits, found True",
    ),
    (MOONCAKE + f"[2000,3,4,[{1 << 64}]]\n", 3, "hash_ids: expected whole numbers of 64 bits"),
    (MOONCAKE + "[2000,512,4,[0,1]]\n", 3, "hash_ids: 2 ids, but the tokens fill only 1"),
    (MOONCAKE + "[2000,NaN,4,[0]]\n", 3, "NaN is not a number"),
    (MOONCAKE + "[2000,true,4,[0]]\n", 3, "input_length: expected a number, found True"),
    (MOONCAKE + "[1499,1,4,[0]]\n", 3, "times are not sorted"),
    (BAILIAN + '{"chat_id": 5}\n', 4, "no field input_length"),
    (BAILIAN + "[1]\n", 4, "expected a JSON object, found list"),
    (OWN.replace('"version":1', '"version":2'), 1, '"version": 1'),
    (OWN.replace('"chunk_tokens":64', '"chunk_tokens":0'), 1, "expected at least 1"),
    (OWN.split("\n", 1)[1], 1, "chunks need a first line with chunk_tokens"),
    (OWN + OWN, 4, "the header must be the first line"),
    (OWN.replace("[0,1,2]", "[0,1,2,3]"), 2, "chunks: 4 ids, but the tokens fill only 3"),
    (OWN.replace('"session":0', '"session":[]'), 2, "session: expected a whole number or a string"),
    (OWN.replace('"adapter":"a"', '"adapter":3'), 2, "adapter: expected a string, found 3"),
    (OWN.replace('"prompt_tokens":70,', ""), 3, "no field prompt_tokens"),
    (OWN.replace("1.5}", "-1.5}"), 3, "think_s: -1.5 is negative"),
]


@pytest.mark.parametrize(("text", "line", "message"), BAD)
def test_a_bad_trace_is_one_error_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = put(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_rows(path)
    shown = str(caught.value)
    assert caught.value.line == line
    assert shown.startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert message in shown
    assert len(shown) < 600


def test_files_that_are_no_text(tmp_path: Path) -> None:
    packed = gzip.compress(
        AZURE_COMPACT.encode() + b"".join(b"%d,1,1\n" % i for i in range(1, 5001))
    )
    cut = put(tmp_path, packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="damaged or truncated gzip after this line") as caught:
        read_rows(cut)
    assert caught.value.line > 3
    with pytest.raises(TraceError, match="damaged or truncated gzip"):
        read_rows(put(tmp_path, packed[:-8] + b"\0" * 8))
    with pytest.raises(TraceError, match="binary data"):
        read_rows(put(tmp_path, b"\x7fELF\0\0\0\n"))
    with pytest.raises(TraceError, match="not UTF-8"):
        read_rows(put(tmp_path, AZURE_COMPACT.encode() + b"\xff,1,1\n"))
    with pytest.raises(TraceError, match="longer than 16 MiB") as caught:
        read_rows(put(tmp_path, AZURE_COMPACT + "9" * (17 << 20)))
    assert caught.value.line == 4
    with pytest.raises(TraceError, match="No such file"):
        read_rows(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="Is a directory"):
        read_rows(tmp_path)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """`data` with one kind of damage."""
    at = rng.randrange(len(data))
    values = [b"-1", b"nan", b"1e999", b"", b"x", b"[]", b"{}", b"null", b'"', b"\0", b"\xff"]
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.choice(values) + data[at + rng.randrange(1, 4) :]
        case 3:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            return b"\n".join(lines)
        case _:
            lines = data.split(b"\n")
            del lines[rng.randrange(len(lines))]
            return b"\n".join(lines)


def test_damaged_traces_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but a `TraceError`, and what is read keeps its promises."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    refused = 0
    for _ in range(1000):
        name = rng.choice(list(GOOD))
        data = GOOD[name].encode()
        data = gzip.compress(data, 1) if rng.random() < 0.3 else data
        path = put(tmp_path, damaged(rng, data))
        try:
            raw = read_rows(path, rng.choice([None, name]))
        except TraceError as error:
            refused += 1
            assert str(error).startswith(str(path))  # noqa: PT017 - often there is none
            continue
        assert [row.at for row in raw.rows] == sorted(row.at for row in raw.rows)
        assert all(row.input_tokens > 0 and row.output_tokens > 0 for row in raw.rows)
        if sum(row.input_tokens + row.output_tokens for row in raw.rows) < 1_000_000:
            trace = to_trace(raw, 64, popularity("uniform", 3))
            for request in trace.requests:
                tokens = request.prompt_tokens + request.output_tokens
                assert len(request.labels) == tokens // 64
    assert 300 < refused < 990


def test_the_format_can_be_named(tmp_path: Path) -> None:
    assert set(FORMATS) == set(GOOD)
    with pytest.raises(TraceError, match="no column Timestamp"):
        read_rows(put(tmp_path, AZURE_COMPACT), "burstgpt")


CLIENTS = (
    "rank,client,in_p5,in_p25,in_p50,in_p75,in_p95,out_p5,out_p25,out_p50,out_p75,out_p95\n"
    "0,61,73,75,80,850,1538,79,163,428,463,814\n1,142,,,,,,,,,,\n"
)


def test_clients_and_dialogues(tmp_path: Path) -> None:
    path = put(tmp_path, "rank,t_s,rate,cv,dist\n0,0,87.203,2.09,G\n0,600,93.5,1.04,W\n1,0,1,1,G\n")
    windows = read_rates(path)
    assert [tuple(w) for w in windows[:2]] == [
        (0, 0.0, 87.203, 2.09, "G"),
        (0, 600.0, 93.5, 1.04, "W"),
    ]
    lengths = read_lengths(put(tmp_path, CLIENTS))
    assert [tuple(x) for x in lengths] == [(0, (73, 75, 80, 850, 1538), (79, 163, 428, 463, 814))]
    found = read_dialogues(put(tmp_path, "[18,7,[5,-15,1,-16]]\n[3,9,[4,2,-1,8]]\n"))
    assert [tuple(d) for d in found] == [(18, 7, (5, -15, 1, -16)), (3, 9, (4, 2, -1, 8))]
    assert [d.exchanges for d in found] == [[(5, 15), (1, 16)], [(6, 1)]]


@pytest.mark.parametrize(
    ("read", "text", "line", "message"),
    [
        (read_rates, "rank,t_s,rate,cv,dist\n0,0,1,1,X\n", 2, "dist: expected one of G, W"),
        (read_rates, "rank,t_s,rate,cv,dist\n0,600,1,1,G\n0,0,1,1,G\n", 3, "not sorted by rank"),
        (read_rates, "rank,t_s,rate,cv,dist\n0,0,-1,1,G\n", 2, "rate: '-1' is negative"),
        (read_rates, "rank,t_s,rate,cv\n", 1, "no column dist"),
        (read_rates, "rank,t_s,rate,cv,dist\n", 0, "no windows in this file"),
        (read_lengths, CLIENTS.replace("73,75", "76,75"), 2, "quantiles must be >= 0 and rise"),
        (read_lengths, CLIENTS.split("\n", maxsplit=1)[0] + "\n", 0, "no lengths in this file"),
        (read_dialogues, "[1,2]\n", 1, "expected [scenario"),
        (read_dialogues, '[1,2,["x"]]\n', 1, "turn: expected a number"),
        (read_dialogues, "", 0, "no dialogues in this file"),
    ],
)
def test_bad_clients_and_dialogues(
    tmp_path: Path, read: object, text: str, line: int, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read(put(tmp_path, text))  # type: ignore[operator]
    assert caught.value.line == line
    assert message in str(caught.value)
