"""The one table of settings: name, kind, default, unit and meaning.

Reading, checking, suggestions, environment variable names and the table in
docs/configuration.md all follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elora_connector.config.redact import redact_url
from elora_connector.config.values import (
    AlwaysFalse,
    Choice,
    Flag,
    Kind,
    Maybe,
    Number,
    Secret,
    Section,
    Text,
    Url,
    Variable,
    Whole,
)
from elora_connector.errors import ConfigError

OWN = "elora."
"""Prefix of our own settings; in a file they are the section `extra_config.elora`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        key: full name; our own start with `elora.`, the others are LMCache's.
        kind: what is accepted and how it is read.
        default: value when no source names it.
        meaning: one line for the documentation.
        unit: unit of the value, empty for none.
        shown_default: text for the documentation where the default is derived.
        secret: the value never appears in a message, log line or repr.
        extra_key: name under LMCache's `extra_config` that also sets it.
        extra_env: variable outside the naming scheme that also sets it.
    """

    key: str
    kind: Kind
    default: Any
    meaning: str
    unit: str = ""
    shown_default: str = field(default="", kw_only=True)
    secret: bool = field(default=False, kw_only=True)
    extra_key: str = field(default="", kw_only=True)
    extra_env: str = field(default="", kw_only=True)

    @property
    def path(self) -> str:
        """Attribute path in `EloraConfig`, for example `remote.ttl_s`."""
        return self.key.removeprefix(OWN)

    @property
    def own(self) -> bool:
        """True for a setting LMCache does not have."""
        return self.key.startswith(OWN)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables, the one that wins last."""
        suffix = self.path.upper().replace(".", "_")
        ours = "ELORA_" + suffix
        return (ours,) if self.own else ("LMCACHE_" + suffix, ours)

    @property
    def connector_entry(self) -> str:
        """Name in vLLM's `kv_connector_extra_config`."""
        return self.key if self.own else "lmcache." + self.key

    def show(self, value: object) -> str:
        """The value for people, without secrets."""
        if value is None:
            return "null"
        if self._hides(value):
            return "***"
        if isinstance(value, Mapping):
            return "{" + ", ".join(sorted(map(str, value))) + "}"
        if isinstance(value, bool):
            return str(value).lower()
        return redact_url(str(value)) if self.kind == Maybe(Url()) else str(value)

    def _hides(self, value: object) -> bool:
        """A secret, or what may be one because it is not what belongs here."""
        if isinstance(self.kind, Section):
            return not isinstance(value, Mapping)
        return self.secret or (self.kind == Maybe(Variable()) and not _accepted(self.kind, value))

    def parse(self, raw: object, origin: str) -> Any:
        """Read one raw value; ConfigError names key, value, origin and expectation."""
        try:
            return self.kind.parse(raw)
        except ValueError:
            shown = self.show(raw)
            if isinstance(raw, str) and shown != "***":
                shown = repr(shown)
            raise ConfigError(
                f"{self.key} = {shown} (from {origin}): expected {self.kind.expects}"
            ) from None


def _accepted(kind: Kind, value: object) -> bool:
    try:
        kind.parse(value)
    except ValueError:
        return False
    return True


_GB = "GB (1024^3 bytes)"
_MB = "MB (1024^2 bytes)"

_LMCACHE_SETTINGS = (
    Setting(
        "chunk_size",
        Whole(1),
        256,
        "unit of storage; a multiple of vLLM's block size. Smaller chunks hit shorter prefixes",
        "tokens",
    ),
    Setting(
        "local_cpu",
        Flag(),
        True,
        "keep KV in host memory; false (needs `remote_url`) keeps it there only while in use",
    ),
    Setting(
        "max_local_cpu_size",
        Number(),
        5.0,
        "host memory of each worker rank, for KV and adapter weights together",
        _GB,
    ),
    Setting(
        "remote_url",
        Maybe(Url()),
        None,
        "store shared by several instances: one server (`redis://`, `rediss://` with TLS, "
        "`unix://`), `redis-sentinel://` or `redis-cluster://`, see operations.md. null: host only",
    ),
    Setting(
        "remote_serde",
        Maybe(Choice(("naive",))),
        "naive",
        "form of the bytes in the remote store; only the exact one",
    ),
    Setting(
        "save_decode_cache",
        Flag(),
        True,
        "store generated tokens too (LMCache's own default is false)",
    ),
    Setting(
        "save_unfull_chunk",
        AlwaysFalse("only full chunks have a key"),
        False,
        "store the last, partly filled chunk; cannot be turned on",
    ),
    Setting(
        "min_retrieve_tokens",
        Whole(0),
        0,
        "with fewer tokens than this to load, recompute instead",
        "tokens",
    ),
    Setting(
        "blocking_timeout_secs",
        Number(),
        10.0,
        "upper bound of any wait for the remote store",
        "s",
    ),
    Setting(
        "cache_policy",
        Choice(("ELORA", "LRU", "LFU", "FIFO", "MRU")),
        "ELORA",
        "what memory gives up first; ELORA is the cost model of docs/cost_model.md",
    ),
    Setting(
        "pre_caching_hash_algorithm",
        Text("the name of a hash algorithm"),
        "sha256",
        "accepted and ignored: keys are always SHA-256 chains, the same in every process",
    ),
    Setting(
        "extra_config",
        Section(),
        {},
        "our own settings under `elora`, and whatever LMCache's remote connectors read. "
        "A source that sets it replaces it whole",
    ),
)

_OWN_SETTINGS = (
    Setting(
        "elora.sync_load_ms",
        Number(zero=True),
        5.0,
        "loads that take no longer than this are done within the step, longer ones beside it",
        "ms",
    ),
    Setting(
        "elora.shutdown_flush_s",
        Number(zero=True),
        5.0,
        "longest time to write queued chunks to the remote store at shutdown",
        "s",
    ),
    Setting(
        "elora.residency",
        Choice(("gpu", "host")),
        "gpu",
        "where an adapter's weights must be for its KV to be used",
    ),
    Setting(
        "elora.adapter_deadline_s",
        Number(),
        60.0,
        "a request whose adapter is not loaded by then fails with a message",
        "s",
    ),
    Setting(
        "elora.adapter_prefetch",
        Flag(),
        True,
        "bring adapters that are likely to be used into free GPU slots and free host memory",
    ),
    Setting(
        "elora.fetch_deadline_ms",
        Maybe(Number(zero=True)),
        None,
        "a request waits at most this long for the remote store, then it is recomputed",
        "ms",
        shown_default="blocking_timeout_secs * 1000",
    ),
    Setting(
        "elora.model_id",
        Maybe(Text("a name for the exact base weights")),
        None,
        "says which base weights KV belongs to, in place of a digest of the files",
    ),
    Setting(
        "elora.reset_remote",
        Choice(("new_epoch", "keep")),
        "new_epoch",
        "effect of a cache reset on the remote store: stop using what is there, or keep it",
    ),
    Setting(
        "elora.pin_share",
        Number(high=1.0),
        0.5,
        "part of the host slots that fetches for waiting requests may pin",
    ),
    Setting(
        "elora.store_block_share",
        Number(high=1.0),
        0.25,
        "part of vLLM's GPU blocks that stores in flight may pin",
    ),
    Setting(
        "elora.prefetch",
        Flag(),
        True,
        "while the GPU is idle, bring the most valuable KV of loaded adapters back into it",
    ),
    Setting(
        "elora.gpu_share",
        Number(high=1.0),
        0.25,
        "part of vLLM's GPU blocks that prefetched KV may fill before it is used",
    ),
    Setting(
        "elora.check_invariants",
        Flag(),
        False,
        "check the dependency tree after every change; slow, for debugging",
    ),
    Setting(
        "elora.engines",
        Whole(1),
        1,
        "vLLM engines on this host, for the check of the memory budget",
    ),
    Setting(
        "elora.dependency_rule",
        Flag(),
        True,
        "evict leaves of the dependency tree only; false (for experiments) lets chunks be "
        "stranded behind a gap, where they take room but cannot be used",
    ),
    Setting(
        "elora.cost_model.lora_term",
        Flag(),
        True,
        "factor of the cost model: adapters on the GPU against those the batches need",
    ),
    Setting("elora.cost_model.cost_term", Flag(), True, "its factor: seconds to bring back"),
    Setting("elora.cost_model.visit_term", Flag(), True, "its factor: how often it is used"),
    Setting("elora.cost_model.recency_term", Flag(), True, "its factor: how long it was idle"),
    Setting("elora.cost_model.tau_s", Number(), 60.0, "unit of idle time", "s"),
    Setting(
        "elora.cost_model.visit_half_life_s",
        Maybe(Number()),
        300.0,
        "a visit this long ago counts half; null: visits never fade",
        "s",
    ),
    Setting(
        "elora.cost_model.visit_turnovers",
        Maybe(Number()),
        0.5,
        "half-life of visits while memory is short, in times that the host tier's chunks are "
        "replaced; never above `visit_half_life_s`. null: only that one",
    ),
    Setting(
        "elora.cost_model.visit_prior",
        Number(zero=True),
        1.0,
        "visits that new KV is taken to have had",
    ),
    Setting(
        "elora.cost_model.swap_out",
        Choice(("kept", "literal")),
        "kept",
        "how the adapters on the GPU are counted when one is about to leave: with it and with "
        "a floor, or without it as the paper's text says",
    ),
    Setting(
        "elora.load_or_recompute.enabled",
        Flag(),
        True,
        "do not load what is recomputed faster, nor wait for a look-up that takes longer than "
        "what it may find would save; by measured speeds",
    ),
    Setting(
        "elora.load_or_recompute.margin",
        Number(),
        2.0,
        "load unless it would take longer than recomputing by more than this factor",
    ),
    Setting("elora.store", Flag(), True, "put computed chunks into the host and remote tiers"),
    Setting("elora.retrieve", Flag(), True, "take chunks from the host and remote tiers"),
    Setting(
        "elora.remote.ttl_s",
        Maybe(Whole(1)),
        86400,
        "a value not used for this long is dropped by the store (one that was used lives up to a "
        "quarter longer); null: never",
        "s",
    ),
    Setting("elora.remote.io_threads", Whole(1, 256), 4, "threads (and connections) per rank"),
    Setting("elora.remote.connect_timeout_ms", Number(), 1000.0, "longest time to connect", "ms"),
    Setting(
        "elora.remote.operation_timeout_ms",
        Number(),
        2000.0,
        "longest time of one command; never above `blocking_timeout_secs`",
        "ms",
    ),
    Setting(
        "elora.remote.lookup_timeout_ms",
        Number(),
        100.0,
        "a look-up that takes longer is not waited for, nor is any until one is in time again",
        "ms",
    ),
    Setting(
        "elora.remote.write_queue_mb",
        Whole(1),
        256,
        "chunks waiting to be written, per rank; when full, new ones are not written",
        _MB,
    ),
    Setting("elora.remote.checksum", Flag(), True, "check the payload of every value that is read"),
    Setting(
        "elora.remote.mac_key_env",
        Maybe(Variable()),
        None,
        "variable holding a key (16 bytes or more); values are then signed, unsigned ones refused",
    ),
    Setting(
        "elora.remote.fail_open",
        Flag(),
        True,
        "start without the remote store when it cannot be reached; false: fail the start",
    ),
    Setting(
        "elora.remote.username",
        Maybe(Text("a user name")),
        None,
        "user at the remote store; also `extra_config.username`",
        extra_key="username",
        extra_env="LMCACHE_RESP_USERNAME",
    ),
    Setting(
        "elora.remote.password",
        Maybe(Secret(), words=frozenset({""})),
        None,
        "password at the remote store, wins over one in `remote_url`; also "
        "`extra_config.password`. Better: `password_env`",
        secret=True,
        extra_key="password",
        extra_env="LMCACHE_RESP_PASSWORD",
    ),
    Setting(
        "elora.remote.password_env",
        Maybe(Variable()),
        None,
        "variable holding the password",
    ),
    Setting(
        "elora.remote.ca_file",
        Maybe(Text("a file path")),
        None,
        "certificates that the store's own is checked against (TLS)",
    ),
    Setting("elora.remote.cert_file", Maybe(Text("a file path")), None, "our certificate (TLS)"),
    Setting("elora.remote.key_file", Maybe(Text("a file path")), None, "its private key (TLS)"),
    Setting(
        "elora.remote.max_value_mb",
        Whole(1),
        512,
        "larger values are neither written nor read",
        _MB,
    ),
)

SETTINGS: dict[str, Setting] = {s.key: s for s in _LMCACHE_SETTINGS + _OWN_SETTINGS}
"""Every setting by its key, in the order of the documentation."""


def defaults() -> dict[str, Any]:
    """Fresh default values by key."""
    return {
        key: dict(s.default) if key == "extra_config" else s.default for key, s in SETTINGS.items()
    }


def markdown_table(settings: Iterable[Setting] = tuple(SETTINGS.values())) -> str:
    """The settings as a markdown table, as in docs/configuration.md."""
    lines = ["| setting | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for s in settings:
        default = s.shown_default or s.show(s.default)
        meaning = s.meaning
        if isinstance(s.kind, Choice):
            meaning += f" ({s.kind.expects})"
        lines.append(f"| `{s.key}` | {s.kind.name} | `{default}` | {s.unit} | {meaning} |")
    return "\n".join(lines) + "\n"
