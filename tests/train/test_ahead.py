import pytest
import torch

from vitrail.train.ahead import Ahead, Ready

WAYS = [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]


def run(steps, make, device="cpu", early=None, pass_over=lambda ready: None):
    """What a trainer does: a step's samples, a pass over them, the next step's begun."""
    batches, found = Ahead(iter(steps), make, torch.device(device), early=early), []
    for ready in batches:
        found.append(ready)
        pass_over(ready)
        batches.begin()
        batches.begin()  # of the second micro-batch: nothing is left to begin
    return found


@pytest.mark.parametrize(("device", "early"), WAYS)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_every_step_comes_once_and_in_order(device, early, steps):
    read = [[{"x": torch.full((3,), float(step))}, {"x": torch.zeros(2)}] for step in range(steps)]

    def make(micro):
        return [{"made": batch["x"].to(device) * 2 + 1} for batch in micro]

    found = run(read, make, device, early)
    assert [ready.read for ready in found] == read
    for step, ready in enumerate(found):
        assert isinstance(ready, Ready)
        assert ready.made[0]["made"].tolist() == [2.0 * step + 1] * 3 and ready.made[1]["made"].tolist() == [1.0] * 2


@pytest.mark.gpu
def test_what_is_made_beside_a_long_pass_is_whole():
    """The next step's numbers are made while a pass over this one's is still running."""
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
        sums.append((ready.made[0]["at"].sum(), y.sum()))

    read, sums = [[{"at": torch.full((100_000,), step)}] for step in range(6)], []
    run(read, make, "cuda", None, pass_over)
    assert [int(total) for total, _ in sums] == [100_000 * (step + 200) for step in range(6)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_what_fails_ahead_of_time_fails_in_its_own_turn(step, early):
    def items():
        for i in range(5):
            if i == step:
                raise OSError(f"step {i} cannot be read")
            yield [{"x": torch.full((1,), i)}]

    given = []
    with pytest.raises(OSError, match=f"step {step}"):
        run(items(), lambda micro: micro, "cpu", early, given.append)
    assert [int(ready.read[0]["x"]) for ready in given] == list(range(step))


def test_the_next_is_made_when_it_is_begun():
    made = []
    batches = Ahead(iter([[{}], [{}], [{}]]), lambda micro: made.append(1) or micro, torch.device("cpu"), early=True)
    next(batches)
    assert len(made) == 1
    batches.begin()
    assert len(made) == 2
    next(batches)
    assert len(made) == 2


@pytest.mark.parametrize("early", [False, True])
def test_waiting_is_for_what_is_read_and_not_for_what_is_made(monkeypatch, early):
    clock = [0.0]
    monkeypatch.setattr("vitrail.train.ahead.time.perf_counter", lambda: clock[0])

    def read():
        for _ in range(3):
            clock[0] += 2.0
            yield [{"x": torch.zeros(1)}]

    def make(micro):
        clock[0] += 50.0
        return micro

    assert [ready.waited for ready in run(read(), make, "cpu", early)] == [2.0] * 3
