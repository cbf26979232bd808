"""Weights change, and change back, around the end of a request: no mixed KV stays a hit."""

from __future__ import annotations

import pytest

from tests.support.scheduler_rig import CHUNK, VARIANTS, Rig, Variant, id_of, path_of, prompt

TEXT = prompt(4 * CHUNK)


def until(rig: Rig, request: str, tokens: int) -> None:
    while rig.scheduler.requests[request].num_computed_tokens < tokens:
        rig.step()


@pytest.mark.parametrize("new", ["a", "b"])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_request_that_ends_in_the_step_that_changed_its_weights(
    variant: Variant, delay: int, new: str
) -> None:
    """It is no user any more when the ranks report the change, and nobody asks for the new.

    `new`: the name that its id has then.
    """
    # Only vLLM's own cache can be hit: the rig compares what a request sees byte by byte.
    options = {"max_tokens_per_step": CHUNK, "remote": False}
    rig = Rig(variant, delay, 2, {"elora.retrieve": False}, **options)
    rig.run(rig.submit("a", prompt(3, 9), 1))
    mixed = rig.submit("a", TEXT, 1)
    until(rig, mixed, 3 * CHUNK)
    old = rig.disk.read(path_of("a"))
    rig.change(new)
    rig.add_lora(new, load_inplace=True, lora_id=id_of("a"))
    rig.run(mixed)
    assert len(rig.answers[mixed].weights) == 2, "its last chunk was computed with the new ones"
    rig.disk.put_back(path_of("a"), old)
    rig.add_lora("a", load_inplace=True)
    (after,) = rig.run(rig.submit("a", [*TEXT, 5, 6], 4))
    assert after.weights == {old}
    rig.drain()
