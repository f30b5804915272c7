"""The allowance of batch work follows the measured length of steps, and only while there are clients."""

from __future__ import annotations

from batchline.engine.allowance import FEWEST_TOKENS, LATELY_S, BatchAllowance
from batchline.engine.request import GenerationRequest, SamplingParams
from batchline.engine.sequence import Sequence
from batchline.engine.step import Chunk, Step

MOST = 512


def chunk(num_tokens: int, priority: int) -> Chunk:
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1,) * num_tokens, sampling=SamplingParams(max_tokens=1), priority=priority
    )
    return Chunk(Sequence(request, seed=0), 0, num_tokens)


class Machine:
    """Steps cost 10 ms and half a millisecond for each token."""

    def __init__(self, max_delay: float | None = 0.5) -> None:
        self.now = 0.0
        self.allowance = BatchAllowance(max_delay, MOST, lambda: self.now)

    def step(self, *, batch: int | None = None, client: int = 0) -> float:
        """batch: its tokens; None for as many as may be. Returns how long the step took."""
        batch = (self.allowance.limit or MOST) if batch is None else batch
        seconds = 0.01 + 0.0005 * (batch + client)
        self.now += seconds
        chunks = [chunk(client, 0)] if client else []
        chunks += [chunk(batch, 2 << 32)] if batch else []
        self.allowance.note_step(Step(tuple(chunks), (), {}), seconds)
        return seconds

    def answer_client(self) -> None:
        """A prompt that takes 0.1 s alone."""
        self.allowance.note_first_token(self.step(batch=0, client=180))


def test_steps_become_as_short_as_the_share_of_a_clients_wait() -> None:
    machine = Machine()
    machine.answer_client()
    lengths = [machine.step() for _ in range(12)]
    assert 0.045 < lengths[-1] <= 0.05
    machine.answer_client()
    assert 0.045 < machine.step() <= 0.05, "a client's own step changes nothing"


def test_without_clients_for_a_while_steps_grow_again() -> None:
    machine = Machine()
    machine.answer_client()
    for _ in range(12):
        machine.step()
    machine.now += LATELY_S
    for _ in range(12):
        machine.step()
    assert machine.allowance.limit == MOST


def test_a_single_slow_step_is_soon_forgotten() -> None:
    machine = Machine()
    machine.answer_client()
    for _ in range(12):
        machine.step()
    usual = machine.allowance.limit
    assert usual is not None
    machine.allowance.note_step(Step((chunk(usual, 2 << 32),), (), {}), 3.0)
    assert machine.allowance.limit == round(usual / 2)
    for _ in range(5):
        machine.step()
    assert machine.allowance.limit == usual


def test_batch_work_never_stops_on_a_slow_machine() -> None:
    machine = Machine(max_delay=0.01)
    machine.answer_client()
    for _ in range(20):
        machine.step()
    assert machine.allowance.limit == FEWEST_TOKENS


def test_little_batch_work_does_not_change_what_more_may_have() -> None:
    machine = Machine()
    machine.answer_client()
    for _ in range(12):
        machine.step()
    usual = machine.allowance.limit
    for _ in range(20):
        machine.step(batch=3)
    assert machine.allowance.limit == usual


def test_without_a_set_share_nothing_is_limited() -> None:
    machine = Machine(max_delay=None)
    machine.answer_client()
    machine.step()
    assert machine.allowance.limit is None
