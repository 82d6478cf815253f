"""Commands side by side: their order, what they wait for, and what is told of those that fail."""

import os
import signal
import threading
import time
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitrail.jobs import Job, side_by_side


def shell(folder, name, command, *after):
    return Job(name, ("sh", "-c", command), folder / "logs" / f"{name}.log", after)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
    bad=st.sets(st.integers(0, 5), max_size=2),
    at_once=st.integers(1, 4),
)
def test_none_begins_before_what_it_needs_and_all_others_are_run(tmp_path, edges, bad, at_once):
    diary = tmp_path / "diary"
    diary.write_text("")
    after = {n: sorted({str(a) for a, b in edges if b == n and a < n}) for n in range(6)}
    queue = [
        shell(
            tmp_path, str(n), f"echo begins {n} >> {diary}; echo ends {n} >> {diary}; exit {int(n in bad)}", *after[n]
        )
        for n in range(6)
    ]
    failed = side_by_side(queue, at_once, "test")
    lines = diary.read_text().splitlines()
    lost = set()
    for n in range(6):
        if n in bad or any(int(a) in lost for a in after[n]):
            lost.add(n)
        runs = not any(int(a) in lost for a in after[n])
        assert (f"begins {n}" in lines) == runs
        if runs:
            assert all(lines.index(f"ends {a}") < lines.index(f"begins {n}") for a in after[n])
    assert set(failed) == {str(n) for n in lost}


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_run_together_than_asked_for_and_no_fewer(tmp_path, at_once):
    diary = tmp_path / "diary"
    command = f"echo + >> {diary}; sleep 0.3; echo - >> {diary}"  # long enough to be seen beside one another
    assert not side_by_side([shell(tmp_path, str(n), command) for n in range(4)], at_once, "test")
    running = list(accumulate(1 if line == "+" else -1 for line in diary.read_text().split()))
    assert max(running) == at_once and running[-1] == 0


def test_the_first_are_begun_first_and_what_waits_holds_up_nobody(tmp_path):
    diary = tmp_path / "diary"
    slow = shell(tmp_path, "slow", f"sleep 0.4; echo slow >> {diary}")
    late = shell(tmp_path, "late", f"echo late >> {diary}", "slow")
    free = shell(tmp_path, "free", f"echo free >> {diary}")
    assert not side_by_side([slow, late, free], 2, "test")
    assert diary.read_text().split() == ["free", "slow", "late"]


def test_the_end_of_a_log_says_why(tmp_path):
    lines = "; ".join(f"echo line {n}" for n in range(9))
    failed = side_by_side(
        [shell(tmp_path, "one", f"{lines}; exit 3"), shell(tmp_path, "two", "true", "one")], 2, "test"
    )
    assert failed["one"] == f"{tmp_path}/logs/one.log ends with:\n" + "\n".join(f"line {n}" for n in range(4, 9))
    assert failed["two"] == "not run, since one failed" and not (tmp_path / "logs" / "two.log").exists()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_who_stops_it_stops_them_and_waits_until_they_have_saved(tmp_path, number, raised):
    saved, before = tmp_path / "saved", signal.getsignal(signal.SIGTERM)
    command = f"trap 'sleep 0.2; touch {saved}; exit 0' TERM; touch {tmp_path / 'begun'}; while :; do sleep 0.05; done"

    def stop():
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    with pytest.raises(raised):
        side_by_side([shell(tmp_path, "one", command)], 2, "test")
    assert saved.exists() and signal.getsignal(signal.SIGTERM) is before


def test_it_runs_in_a_thread_too(tmp_path):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(side_by_side([shell(tmp_path, "one", "exit 1")], 1, "test")), daemon=True
    )
    thread.start()
    thread.join(10)
    assert list(found[0]) == ["one"]
