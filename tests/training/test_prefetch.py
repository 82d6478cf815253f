"""Prefetching of prepared batches."""

import pytest
import torch

from vitrail.training.prefetch import PrefetchIterator, PreparedStep

WAYS = [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]


def run(steps, make, device="cpu", early=None, pass_over=lambda ready: None):
    """Iterate as the trainer does: a step, a pass over it, and prefetching of the next step."""
    batches, found = PrefetchIterator(iter(steps), make, torch.device(device), early=early), []
    for ready in batches:
        found.append(ready)
        pass_over(ready)
        batches.prefetch()
        batches.prefetch()  # the second call does nothing
    return found


@pytest.mark.parametrize(("device", "early"), WAYS)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_steps_come_once_and_in_order(device, early, steps):
    read = [[{"x": torch.full((3,), float(step))}, {"x": torch.zeros(2)}] for step in range(steps)]

    def make(micro):
        return [{"made": batch["x"].to(device) * 2 + 1} for batch in micro]

    found = run(read, make, device, early)
    assert [ready.raw_batches for ready in found] == read
    for step, ready in enumerate(found):
        assert isinstance(ready, PreparedStep)
        assert (
            ready.batches[0]["made"].tolist() == [2.0 * step + 1] * 3 and ready.batches[1]["made"].tolist() == [1.0] * 2
        )


@pytest.mark.gpu
def test_batch_prepared_during_a_long_pass_is_complete():
    """The next batch is prepared while the pass over the current one runs."""
    x = torch.randn(4096, 4096, device="cuda")

    def make(micro):
        at = micro[0]["at"].cuda(non_blocking=True)
        for _ in range(200):
            at = at + 1
        return [{"at": at}]

    def pass_over(ready):
        y = x
        for _ in range(20):
            y = y @ x / 64
        sums.append((ready.batches[0]["at"].sum(), y.sum()))

    read, sums = [[{"at": torch.full((100_000,), step)}] for step in range(6)], []
    run(read, make, "cuda", None, pass_over)
    assert [int(total) for total, _ in sums] == [100_000 * (step + 200) for step in range(6)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_error_is_raised_at_its_own_step(step, early):
    def items():
        for i in range(5):
            if i == step:
                raise OSError(f"step {i} cannot be read")
            yield [{"x": torch.full((1,), i)}]

    given = []
    with pytest.raises(OSError, match=f"step {step}"):
        run(items(), lambda micro: micro, "cpu", early, given.append)
    assert [int(ready.raw_batches[0]["x"]) for ready in given] == list(range(step))


def test_next_step_is_prepared_by_prefetch():
    made = []
    batches = PrefetchIterator(
        iter([[{}], [{}], [{}]]), lambda micro: made.append(1) or micro, torch.device("cpu"), early=True
    )
    next(batches)
    assert len(made) == 1
    batches.prefetch()
    assert len(made) == 2
    next(batches)
    assert len(made) == 2


@pytest.mark.parametrize("early", [False, True])
def test_wait_seconds_exclude_preparation(monkeypatch, early):
    clock = [0.0]
    monkeypatch.setattr("vitrail.training.prefetch.time.perf_counter", lambda: clock[0])

    def read():
        for _ in range(3):
            clock[0] += 2.0
            yield [{"x": torch.zeros(1)}]

    def make(micro):
        clock[0] += 50.0
        return micro

    assert [ready.wait_seconds for ready in run(read(), make, "cpu", early)] == [2.0] * 3
