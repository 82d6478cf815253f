"""Shares of clients: equal for clients with many and with few requests, and forgotten afterwards."""

import asyncio
import contextlib
import time

import pytest

from serve.test_engine import DECODERS
from vitrail.serve.client_fairness import ClientCounters, FairTurns, QueueFullError
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig


def test_counters_are_lifted_and_forgotten():
    clients = ClientCounters()
    clients.enter("a")
    clients.add("a", 10)
    clients.enter("b")
    assert clients["b"] == 10  # as the lowest active one
    clients.add("b", 5)
    clients.leave("b")
    clients.enter("b")
    assert clients["b"] == 15  # a new request does not erase what the client received
    clients.leave("b")
    clients.add("a", 20)
    clients.enter("c")
    clients.leave("c")
    assert len(clients) == 1  # b would be lifted to 30
    clients.leave("a")
    assert not clients


def test_clients_with_one_request_at_a_time_do_not_starve_one_with_many():
    """Two clients that always have a request, and one with many, for one slot: each gets a third."""
    engine = Engine(DECODERS["llama"](), EngineConfig(max_num_seqs=1, page_size=4))
    ended: list[str] = []

    def send(client: str) -> None:
        def receive(events) -> None:
            if events[-1].end == "length":
                ended.append(client)
                if client != "many" and len(ended) < 30:
                    send(client)

        engine.submit(EnginePrompt([1, 2]), SamplingParams(max_new_tokens=4), receive, client=client)

    for client in ["many"] * 20 + ["first", "second"]:
        send(client)
    while len(ended) < 18:
        engine.step()
    counts = [ended[:18].count(client) for client in ("many", "first", "second")]
    assert min(counts) >= 5, counts


async def take_turns(turns: FairTurns, client: str, order: list[str], seconds: float = 0.01) -> None:
    async with turns.take(client):
        order.append(client)
        await asyncio.to_thread(time.sleep, seconds)


def test_turns_alternate_between_clients():
    async def run() -> list[str]:
        turns, order = FairTurns(9), []
        tasks = [take_turns(turns, client, order) for client in "aaaaaabbb"]
        await asyncio.gather(*tasks)
        assert not turns._is_taken and not turns._clients and not turns.num_waiting
        return order

    order = asyncio.run(run())
    assert sorted(order) == list("aaaaaabbb")
    assert order[:6].count("b") >= 2  # b does not wait for all requests of a


def test_a_cancelled_wait_passes_its_turn_on():
    async def run() -> None:
        turns, order = FairTurns(2), []
        first = asyncio.ensure_future(take_turns(turns, "a", order, 0.05))
        waiting = [asyncio.ensure_future(take_turns(turns, client, order)) for client in "bc"]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            turns.check_queue()
        waiting[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting[0]
        await asyncio.gather(first, waiting[1])
        assert order == ["a", "c"] and not turns._is_taken and not turns._clients

    asyncio.run(run())
