"""Process queue: order, dependencies, parallelism and failures."""

import os
import signal
import threading
import time
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitrail.recipe.process_queue import ProcessJob, run_jobs


def shell(folder, name, command, *after):
    return ProcessJob(name, ("sh", "-c", command), folder / "logs" / f"{name}.log", after)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
    bad=st.sets(st.integers(0, 5), max_size=2),
    at_once=st.integers(1, 4),
)
def test_jobs_wait_for_their_dependencies(tmp_path, edges, bad, at_once):
    events = tmp_path / "events"
    events.write_text("")
    after = {n: sorted({str(a) for a, b in edges if b == n and a < n}) for n in range(6)}
    queue = [
        shell(
            tmp_path, str(n), f"echo begins {n} >> {events}; echo ends {n} >> {events}; exit {int(n in bad)}", *after[n]
        )
        for n in range(6)
    ]
    failed = run_jobs(queue, at_once, "test")
    lines = events.read_text().splitlines()
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
def test_number_of_parallel_jobs(tmp_path, at_once):
    events = tmp_path / "events"
    events.touch()
    wait = f"until [ $(grep -c + {events}) -ge {at_once} ]; do sleep 0.02; done"  # for the jobs that run beside it
    command = f"echo + >> {events}; {wait}; echo - >> {events}"
    assert not run_jobs([shell(tmp_path, str(n), command) for n in range(4)], at_once, "test")
    running = list(accumulate(1 if line == "+" else -1 for line in events.read_text().split()))
    assert max(running) == at_once and running[-1] == 0


def test_waiting_job_does_not_block_others(tmp_path):
    events = tmp_path / "events"
    events.touch()
    slow = shell(tmp_path, "slow", f"until grep -q free {events}; do sleep 0.02; done; echo slow >> {events}")
    late = shell(tmp_path, "late", f"echo late >> {events}", "slow")
    free = shell(tmp_path, "free", f"echo free >> {events}")
    assert not run_jobs([slow, late, free], 2, "test")
    assert events.read_text().split() == ["free", "slow", "late"]


def test_failure_quotes_the_end_of_the_log(tmp_path):
    lines = "; ".join(f"echo line {n}" for n in range(9))
    failed = run_jobs([shell(tmp_path, "one", f"{lines}; exit 3"), shell(tmp_path, "two", "true", "one")], 2, "test")
    assert failed["one"] == f"end of {tmp_path}/logs/one.log:\n" + "\n".join(f"line {n}" for n in range(4, 9))
    assert failed["two"] == "not started: one failed" and not (tmp_path / "logs" / "two.log").exists()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_terminates_and_awaits_jobs(tmp_path, number, raised):
    saved, before = tmp_path / "saved", signal.getsignal(signal.SIGTERM)
    command = f"trap 'sleep 0.2; touch {saved}; exit 0' TERM; touch {tmp_path / 'begun'}; while :; do sleep 0.05; done"

    def stop():
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    with pytest.raises(raised):
        run_jobs([shell(tmp_path, "one", command)], 2, "test")
    assert saved.exists() and signal.getsignal(signal.SIGTERM) is before


def test_queue_runs_in_a_thread(tmp_path):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(run_jobs([shell(tmp_path, "one", "exit 1")], 1, "test")), daemon=True
    )
    thread.start()
    thread.join(300)
    assert list(found[0]) == ["one"]
