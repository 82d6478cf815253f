import pytest
import torch

from vitrail.train.ahead import Ready, ahead, one_early

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_every_step_comes_once_and_in_order(device, steps):
    read = [[{"x": torch.full((3,), float(step))}, {"x": torch.zeros(2)}] for step in range(steps)]

    def make(micro):
        return [{"made": batch["x"].to(device) * 2 + 1} for batch in micro]

    found = list(ahead(iter(read), make, torch.device(device)))
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

    read = [[{"at": torch.full((100_000,), step)}] for step in range(6)]
    for step, ready in enumerate(ahead(iter(read), make, torch.device("cuda"))):
        y = x
        for _ in range(20):
            y = y @ x / 64
        assert bool((ready.made[0]["at"] == step + 200).all())


@pytest.mark.parametrize("step", [0, 1, 3])
def test_what_fails_ahead_of_time_fails_in_its_own_turn(step):
    def items():
        for i in range(5):
            if i == step:
                raise OSError(f"step {i} cannot be read")
            yield i

    given = []
    with pytest.raises(OSError, match=f"step {step}"):
        for item in one_early(items()):
            given.append(item)
    assert given == list(range(step))


def test_one_is_begun_before_the_one_ahead_of_it_is_given():
    begun = []
    items = one_early(begun.append(i) or i for i in range(3))
    assert next(items) == 0 and begun == [0, 1]
    assert [*items] == [1, 2] and not list(one_early(iter(())))


def test_waiting_is_for_what_is_read_and_not_for_what_is_made(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("vitrail.train.ahead.time.perf_counter", lambda: clock[0])

    def read():
        for _ in range(3):
            clock[0] += 2.0
            yield [{"x": torch.zeros(1)}]

    def make(micro):
        clock[0] += 50.0
        return micro

    assert [ready.waited for ready in ahead(read(), make, torch.device("cpu"))] == [2.0] * 3
