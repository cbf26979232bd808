from __future__ import annotations

from elora_connector.tiers.base import Health
from elora_connector.tiers.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, **kwargs: object) -> tuple[CircuitBreaker, list[Health]]:
    seen: list[Health] = []
    options: dict[str, object] = {"first_backoff_s": 1.0, "max_backoff_s": 5.0, "jitter": 0.0}
    breaker = CircuitBreaker(clock=clock, on_change=seen.append, **(options | kwargs))  # type: ignore[arg-type]
    return breaker, seen


def fail(breaker: CircuitBreaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.failed(ticket)


def test_opens_on_failure_and_closes_after_a_good_probe() -> None:
    clock = Clock()
    breaker, seen = make(clock)
    fail(breaker)
    assert breaker.state is Health.OPEN
    assert breaker.admit() is None
    assert not breaker.begin_probe(), "not due yet"
    assert breaker.wait_s() == 1.0
    clock.now += 1.0
    assert breaker.wait_s() == 0.0
    assert breaker.begin_probe()
    assert breaker.admit() is None, "requests do not probe"
    assert not breaker.begin_probe(), "one probe at a time"
    breaker.end_probe(alive=True)
    assert breaker.admit() is not None
    assert seen == [Health.OPEN, Health.HALF_OPEN, Health.CLOSED]


def test_pauses_double_up_to_the_maximum_and_start_over_after_a_success() -> None:
    clock = Clock()
    breaker, _ = make(clock)
    fail(breaker)
    pauses = []
    for _ in range(5):
        pauses.append(breaker.wait_s())
        clock.now += breaker.wait_s()
        assert breaker.begin_probe()
        breaker.end_probe(alive=False)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    clock.now += breaker.wait_s()
    assert breaker.begin_probe()
    breaker.end_probe(alive=True)
    fail(breaker)
    assert breaker.wait_s() == 5.0, "a server that only answers PING does not reset the pause"
    clock.now += 5.0
    assert breaker.begin_probe()
    breaker.end_probe(alive=True)
    ticket = breaker.admit()
    assert ticket is not None
    breaker.succeeded(ticket)
    fail(breaker)
    assert breaker.wait_s() == 1.0


def test_jitter_shortens_the_pause() -> None:
    breaker, _ = make(Clock(), jitter=0.5, uniform=lambda: 0.5)
    fail(breaker)
    assert breaker.wait_s() == 0.75


def test_counts_consecutive_failures() -> None:
    breaker, seen = make(Clock(), failures=2)
    fail(breaker)
    ticket = breaker.admit()
    assert ticket is not None
    breaker.succeeded(ticket)
    fail(breaker)
    assert seen == []
    fail(breaker)
    assert seen == [Health.OPEN]


def test_outcomes_from_before_an_outage_are_ignored() -> None:
    clock = Clock()
    breaker, seen = make(clock)
    old = breaker.admit()
    assert old is not None
    fail(breaker)
    breaker.failed(old)
    assert breaker.wait_s() == 1.0
    breaker.succeeded(old)
    assert breaker.state is Health.OPEN
    clock.now += 1.0
    assert breaker.begin_probe()
    breaker.end_probe(alive=True)
    breaker.failed(old)
    assert breaker.state is Health.CLOSED
    assert seen == [Health.OPEN, Health.HALF_OPEN, Health.CLOSED]


def test_a_stray_end_of_probe_changes_nothing() -> None:
    breaker, seen = make(Clock())
    breaker.end_probe(alive=False)
    assert breaker.state is Health.CLOSED
    assert seen == []
