"""Keys: pinned format, injectivity, incremental hashing, store key strings."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elora_connector.core.keys import (
    MAX_NAME_CHARS,
    ChunkHasher,
    FieldValue,
    RemoteKeys,
    digest_fields,
    encode_fields,
    encode_name,
    identity_tag,
    namespace_digest,
    root_key,
)
from elora_connector.core.types import BASE, ChunkKey, Identity, Rank

NAMESPACE = hashlib.sha256(b"namespace").digest()
ADAPTER = Identity("sql-lora", hashlib.sha256(b"weights").digest())
ROOT = root_key(NAMESPACE, ADAPTER, None)

FIELDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def _canonical(value: object) -> object:
    """A value whose Python equality is the equality that keys must have."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, (list, tuple)):
        return ("list", tuple(_canonical(item) for item in value))
    if isinstance(value, dict):
        return ("map", frozenset((k, _canonical(v)) for k, v in value.items()))
    return (type(value).__name__, value)


class TestPinnedFormat:
    """A change of any of these strands every stored value: raise the schema with it."""

    def test_encoding_by_hand(self) -> None:
        def part(tag: bytes, payload: bytes) -> bytes:
            return tag + len(payload).to_bytes(8, "little") + payload

        expected = part(b"d", b"dom") + part(
            b"l",
            part(b"i", b"-7")
            + part(b"s", "ü".encode())
            + part(b"b", b"\x00")
            + part(b"n", b"")
            + part(b"t", b"\x01")
            + part(b"f", struct.pack("<d", 0.5))
            + part(b"l", part(b"i", b"1"))
            + part(b"m", part(b"s", b"k") + part(b"i", b"2")),
        )
        fields: list[FieldValue] = [-7, "ü", b"\x00", None, True, 0.5, [1], {"k": 2}]
        assert encode_fields("dom", fields) == expected
        assert digest_fields("dom", fields) == hashlib.sha256(expected).digest()

    def test_chunk_key_by_hand(self) -> None:
        def part(tag: bytes, payload: bytes) -> bytes:
            return tag + len(payload).to_bytes(8, "little") + payload

        message = (
            part(b"d", b"elora/chunk/1")
            + part(b"b", ROOT)
            + part(b"v", struct.pack("<4i", 0, 1, 70000, 2**31 - 1))
            + part(b"b", b"image-1")
        )
        keys = ChunkHasher(ROOT, 4).extend([0, 1, 70000, 2**31 - 1], lambda a, b: b"image-1")
        assert keys == [hashlib.sha256(message).digest()]

    def test_known_answers(self) -> None:
        fields: dict[str, FieldValue] = {
            "layers": 32,
            "dtype": "bfloat16",
            "rope": {"factor": 8.0, "kind": None},
        }
        chunks = ChunkHasher(ROOT, 16).extend(range(40))
        found = {
            "namespace": namespace_digest(fields).hex(),
            "root": ROOT.hex(),
            "root salted": root_key(NAMESPACE, ADAPTER, "s1").hex(),
            "root base": root_key(NAMESPACE, BASE, None).hex(),
            "chunk 0": chunks[0].hex(),
            "chunk 1": chunks[1].hex(),
            "store": RemoteKeys(1, NAMESPACE).of(chunks[1], ADAPTER, Rank(tp=1, pp=0)),
        }
        assert found == KNOWN_ANSWERS

    def test_hash_seed_does_not_matter(self) -> None:
        program = (
            "from elora_connector.core.keys import *\n"
            "from elora_connector.core.types import *\n"
            "n = namespace_digest({'b': 1, 'a': {'y': (1, 2), 'x': 's'}, 'c': None})\n"
            "k = ChunkHasher(root_key(n, BASE, 'salt'), 8).extend(range(64))\n"
            "print(RemoteKeys(3, n).of(k[-1], Identity('ä/b', bytes(32)), Rank(1, 2)))\n"
        )
        package_parent = str(Path(__file__).resolve().parents[2])
        outputs = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": package_parent},
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for seed in ("0", "1", "4242")
        }
        assert len(outputs) == 1
        assert outputs.pop().startswith("elora:3:")


class TestFields:
    @given(FIELDS, FIELDS)
    @example(1, "1")
    @example(1, True)
    @example(1, 1.0)
    @example(0.0, -0.0)
    @example(None, "")
    @example("", b"")
    @example([], {})
    @example(["a", "bc"], ["ab", "c"])
    @example([["a"], "b"], [["a", "b"]])
    def test_injective(self, one: Any, other: Any) -> None:
        same = _canonical(one) == _canonical(other)
        assert (encode_fields("d", [one]) == encode_fields("d", [other])) == same

    @given(st.text(max_size=5), st.text(max_size=5), st.lists(FIELDS, max_size=3))
    def test_domains_are_separate(self, one: str, other: str, fields: list[Any]) -> None:
        assume(one != other)
        assert digest_fields(one, fields) != digest_fields(other, fields)

    def test_number_of_fields_counts(self) -> None:
        assert encode_fields("d", ["a", "b"]) != encode_fields("d", [["a", "b"]])
        assert encode_fields("d", []) != encode_fields("d", [None])

    def test_mapping_order_does_not_matter(self) -> None:
        assert namespace_digest({"a": 1, "b": 2}) == namespace_digest({"b": 2, "a": 1})

    @pytest.mark.parametrize("value", [{1, 2}, object(), np.arange(2), range(3)])
    def test_unstable_types_are_refused(self, value: Any) -> None:
        with pytest.raises(TypeError, match="key field"):
            encode_fields("d", [value])


class TestRoot:
    def test_each_part_separates(self) -> None:
        other_digest = Identity(ADAPTER.name, hashlib.sha256(b"other").digest())
        other_name = Identity("sql-lor", ADAPTER.digest)
        roots = [
            root_key(NAMESPACE, identity, salt)
            for identity in (ADAPTER, other_digest, other_name, BASE)
            for salt in (None, "", "s1", "s2", ADAPTER.name)
        ]
        roots.append(root_key(hashlib.sha256(b"other").digest(), ADAPTER, None))
        assert len(set(roots)) == len(roots)

    def test_name_and_salt_do_not_run_together(self) -> None:
        digest = bytes(32)
        assert root_key(NAMESPACE, Identity("a", digest), "bc") != root_key(
            NAMESPACE, Identity("ab", digest), "c"
        )


class TestChunkHasher:
    @given(
        st.lists(st.integers(0, 2**31 - 1), max_size=60),
        st.integers(1, 7),
        st.lists(st.integers(0, 60), max_size=6),
        st.booleans(),
    )
    def test_incremental_is_one_shot(
        self, tokens: list[int], chunk_size: int, cuts: list[int], extra: bool
    ) -> None:
        extras = (lambda a, b: f"{a}-{b}".encode()) if extra else None
        whole = ChunkHasher(ROOT, chunk_size).extend(tokens, extras)
        hasher = ChunkHasher(ROOT, chunk_size)
        for cut in sorted(min(c, len(tokens)) for c in cuts):
            assert hasher.extend(tokens[:cut], extras) == whole[: cut // chunk_size]
        assert hasher.extend(tokens, extras) == whole
        assert hasher.keys is hasher.extend(tokens, extras)
        assert len(whole) == len(tokens) // chunk_size
        assert hasher.num_tokens == len(whole) * chunk_size

    @given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
    def test_a_change_changes_all_that_follows_and_nothing_before(
        self, tokens: list[int], place: int
    ) -> None:
        changed = [*tokens]
        changed[place] += 1
        before = ChunkHasher(ROOT, 2).extend(tokens)
        after = ChunkHasher(ROOT, 2).extend(changed)
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            assert (one == other) == (i < place // 2)

    @given(st.integers(0, 20), st.integers(-3, 25))
    def test_truncate_rewinds(self, length: int, keep: int) -> None:
        tokens = list(range(length))
        hasher = ChunkHasher(ROOT, 3)
        hasher.extend(tokens)
        hasher.truncate(keep)
        assert len(hasher.keys) == max(0, min(length, keep)) // 3
        rewritten = tokens[: max(0, keep) // 3 * 3] + [99] * 9
        assert hasher.extend(rewritten) == ChunkHasher(ROOT, 3).extend(rewritten)

    def test_chunk_size_changes_keys(self) -> None:
        assert ChunkHasher(ROOT, 4).extend([1] * 4)[0] != ChunkHasher(ROOT, 2).extend([1] * 4)[1]

    def test_empty_extra_is_no_extra(self) -> None:
        tokens = list(range(8))
        plain = ChunkHasher(ROOT, 4).extend(tokens)
        assert ChunkHasher(ROOT, 4).extend(tokens, lambda a, b: b"") == plain
        marked = ChunkHasher(ROOT, 4).extend(tokens, lambda a, b: b"x" if a == 4 else b"")
        assert marked[0] == plain[0]
        assert marked[1] != plain[1]

    def test_extras_see_only_new_chunks(self) -> None:
        asked: list[tuple[int, int]] = []

        def extras(start: int, end: int) -> bytes:
            asked.append((start, end))
            return b""

        hasher = ChunkHasher(ROOT, 4)
        hasher.extend(range(9), extras)
        hasher.extend(range(13), extras)
        assert asked == [(0, 4), (4, 8), (8, 12)]

    @pytest.mark.parametrize("kind", [list, tuple, np.array, lambda t: array("q", t)])
    def test_any_sequence_gives_the_same_keys(self, kind: Any) -> None:
        tokens = [5, 0, 2**31 - 1, 70000]
        assert ChunkHasher(ROOT, 2).extend(kind(tokens)) == ChunkHasher(ROOT, 2).extend(tokens)

    @pytest.mark.parametrize("bad", [-1, -(2**31), 2**31, 2**40, -(2**40)])
    def test_token_out_of_range(self, bad: int) -> None:
        hasher = ChunkHasher(ROOT, 2)
        hasher.extend([1, 2])
        with pytest.raises(ValueError, match="token ids"):
            hasher.extend([1, 2, 3, bad])
        assert len(hasher.keys) == 1

    def test_floats_are_not_truncated_to_tokens(self) -> None:
        with pytest.raises(TypeError):
            ChunkHasher(ROOT, 2).extend([1.0, 2.5])  # type: ignore[list-item]

    def test_shorter_list_is_refused(self) -> None:
        hasher = ChunkHasher(ROOT, 2)
        hasher.extend([1, 2, 3, 4])
        with pytest.raises(ValueError, match="already hashed"):
            hasher.extend([1, 2, 3])

    @pytest.mark.parametrize(("root", "size"), [(b"short", 4), (ROOT, 0), (ROOT, -1)])
    def test_bad_arguments(self, root: bytes, size: int) -> None:
        with pytest.raises(ValueError, match=r"root|chunk_size"):
            ChunkHasher(root, size)


NAMES = st.text(
    alphabet=st.sampled_from("aB9_.-~@%:/{}* äß€😀\ud800\x00%4"), max_size=120
) | st.text(max_size=120)
NASTY = [
    "",
    "a",
    "a@b",
    "a%40b",
    "a:b",
    "a/b",
    "{a}",
    "a*",
    "a b",
    "a~b",
    "ünï",
    "模型",
    "😀" * 30,
    "x" * 80,
    "x" * 81,
    "x" * 300,
    "x" * 299 + "y",
    "/" * 300,
    "é" * 300,
    "x" * 62 + "é" * 20,
    "x" * 61 + "é" * 20,
    "x" * 60 + "é" * 20,
    "\ud800",
]


class TestRemoteKeys:
    keys = RemoteKeys(1, NAMESPACE)
    chunk = ChunkKey(hashlib.sha256(b"chunk").digest())

    @given(NAMES, st.binary(min_size=32, max_size=32), st.integers(0, 99), st.integers(0, 9))
    def test_round_trip(self, name: str, digest: bytes, tp: int, pp: int) -> None:
        identity = Identity(name, digest)
        key = self.keys.of(self.chunk, identity, Rank(tp, pp))
        parts = RemoteKeys.parse(key)
        assert parts is not None
        assert (parts.schema, parts.namespace_hex) == (1, NAMESPACE.hex()[:32])
        assert (parts.chunk, parts.rank) == (self.chunk, Rank(tp, pp))
        assert (parts.tag, parts.digest_hex) == (identity_tag(identity), digest.hex()[:12])
        assert parts.name == (None if "~" in parts.tag else name)

    @given(NAMES)
    def test_alphabet_and_bound(self, name: str) -> None:
        encoded = encode_name(name)
        assert len(encoded) <= MAX_NAME_CHARS
        assert re.fullmatch(r"([A-Za-z0-9_.-]|%[0-9A-F]{2})*(~[0-9a-f]{16})?", encoded)

    @given(NAMES, NAMES)
    def test_names_do_not_collide(self, one: str, other: str) -> None:
        assert (encode_name(one) == encode_name(other)) == (one == other)

    def test_nasty_names_do_not_collide_and_parse(self) -> None:
        made = {self.keys.of(self.chunk, Identity(n, bytes(32)), Rank()) for n in NASTY}
        assert len(made) == len(NASTY)
        parsed = [RemoteKeys.parse(key) for key in made]
        assert None not in parsed
        whole = {parts.name for parts in parsed if parts is not None and parts.name is not None}
        short = {name for name in NASTY if "~" not in encode_name(name)}
        assert whole == short
        assert "x" * 80 in short
        assert "x" * 81 not in short

    def test_a_name_cannot_imitate_a_cut_one(self) -> None:
        cut = encode_name("x" * 300)
        assert encode_name(cut) != cut
        assert "%7E" in encode_name("a~b")

    def test_hash_tag_is_the_chunk(self) -> None:
        key = self.keys.of(self.chunk, Identity("{evil}", bytes(32)), Rank())
        assert key[key.index("{") + 1 : key.index("}")] == self.chunk.hex()
        assert key.count("{") == key.count("}") == 1
        assert key.count(":") == 5

    def test_ranks_and_namespaces_are_separate(self) -> None:
        made = {
            RemoteKeys(schema, hashlib.sha256(ns).digest()).of(self.chunk, ADAPTER, Rank(tp, pp))
            for schema in (1, 2)
            for ns in (b"a", b"b")
            for tp in (0, 1)
            for pp in (0, 1)
        }
        assert len(made) == 16

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("elora:", "other:"),
            ("elora:1", "elora:01"),
            ("{", "<"),
            (":tp0", ":tp00"),
            ("pp0", "pp0\n"),
            ("@", ""),
            ("sql-lora", "sql lora"),
            ("sql-lora", "sql%2dlora"),
            ("sql-lora", "sql%2Dlora"),
            ("sql-lora", "%FF"),
            ("sql-lora", "x" * 81),
            ("sql-lora", "sql-lora~0123456789abcdef"),
        ],
    )
    def test_what_it_cannot_have_made_is_refused(self, old: str, new: str) -> None:
        key = self.keys.of(self.chunk, ADAPTER, Rank())
        assert RemoteKeys.parse(key) is not None
        assert RemoteKeys.parse(key.replace(old, new)) is None

    @given(st.text())
    def test_parse_takes_any_text(self, text: str) -> None:
        assert RemoteKeys.parse(text) is None

    @pytest.mark.parametrize(("schema", "namespace"), [(-1, NAMESPACE), (1, b"short")])
    def test_bad_arguments(self, schema: int, namespace: bytes) -> None:
        with pytest.raises(ValueError, match=r"schema|namespace"):
            RemoteKeys(schema, namespace)


KNOWN_ANSWERS = {
    "namespace": "2397503cd0d331ff7343e78afdb0ea1cd3eaaa7c5531d0bbdc39578948e0f5bf",
    "root": "82c93515d2466c100e962c5760a96c69645b0bbc63b46b797be8d09079a8b77b",
    "root salted": "98b3bc6ef14ae3bfcba43ed68f55c7d73495e42c0c261fc70d39a0dc87df46a5",
    "root base": "f5d7672cd9e66fc33d7ba76236fb0e429b4159221678c1846ce5da5a88599719",
    "chunk 0": "2f3927f5f1d6913a8a256e61df382c77fa13853f5ea722f90ba0b0b082d44d2b",
    "chunk 1": "604f87ae70d27f5cd167b972842b801f5d62973babca73c3981e3104817f8ef3",
    "store": (
        "elora:1:9359f3bb2efa7aabd0264fb67fb1d99f:"
        "{604f87ae70d27f5cd167b972842b801f5d62973babca73c3981e3104817f8ef3}"
        ":sql-lora@9a129038d9a0:tp1pp0"
    ),
}
