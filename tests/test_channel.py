"""Channels: how they end, what they bound, and that nothing is lost while threads and coroutines share them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe.channel import Channel
from dflash_pipe.errors import BrokenChannel, Cancelled, EndOfChannel
from dflash_pipe.message import ELSEWHERE, Message, Stamp
from dflash_pipe.stats import BLOCKED, STARVED
from tests.pipeline import Beside, message, until


def opened(capacity: int = 2, nbytes: int | None = None) -> tuple[Channel, Any, Any]:
    channel = Channel("c", capacity, nbytes)
    return channel, channel.sender(), channel.receiver()


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


# --- how it ends


def test_what_was_sent_is_drained_before_the_end() -> None:
    channel, sender, receiver = opened()
    sender.send(message(0))
    sender.send(message(1))
    sender.close()
    assert [receiver.receive().payload for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(EndOfChannel, match="'c' has ended"):
            receiver.receive()
    assert channel.counts == (2, 2, 0)


def test_only_the_last_sender_ends_it() -> None:
    channel, first, receiver = opened()
    second = channel.sender()
    first.close()
    first.close()  # closing twice counts once
    second.send(message(0))
    assert receiver.receive().payload == 0
    second.close()
    with pytest.raises(EndOfChannel):
        receiver.receive()


def test_the_last_receiver_breaks_it() -> None:
    channel, sender, first = opened()
    second = channel.receiver()
    first.close()
    sender.send(message(0))
    second.close()
    with pytest.raises(BrokenChannel, match="every receiver has left"):
        sender.send(message(1))
    assert channel.counts == (1, 0, 1)


@pytest.mark.parametrize("end", ["EndOfChannel", "BrokenChannel", "Cancelled"])
def test_who_waits_learns_of_the_end(end: str) -> None:
    channel, sender, receiver = opened(1)
    if end == "BrokenChannel":
        sender.send(message(0))
        waiting = Beside(lambda: channel.sender().send(message(1))).waits()
        assert waiting.activity.state is BLOCKED and waiting.activity.waits_for == "room in 'c'"
        receiver.close()
    else:
        waiting = Beside(receiver.receive).waits()
        assert waiting.activity.state is STARVED and waiting.activity.waits_for == "input from 'c'"
        (sender.close if end == "EndOfChannel" else channel.cancel)()
    assert type(waiting.ended().error).__name__ == end


@pytest.mark.parametrize("before", ["nothing", "ended", "broken"])
def test_cancelled_overrides_every_other_end(before: str) -> None:
    channel, sender, receiver = opened()
    other = channel.receiver()
    sender.send(message(0))
    if before == "ended":
        sender.close()
    if before == "broken":
        receiver.close()
        other.close()
        receiver = channel.receiver()
    channel.cancel()
    with pytest.raises(Cancelled):
        receiver.receive()
    if before != "ended":
        with pytest.raises(Cancelled):
            sender.send(message(1))
        sender.close()
        with pytest.raises(Cancelled):
            receiver.receive()
    assert channel.counts == (1, 0, 1)


def test_an_end_does_not_repair_a_broken_channel() -> None:
    channel, sender, receiver = opened()
    other = channel.sender()
    receiver.close()
    sender.close()
    with pytest.raises(BrokenChannel):
        other.send(message(0))


def test_a_closed_end_is_not_used() -> None:
    _, sender, receiver = opened()
    sender.send(message(0))
    receiver.receive()
    sender.close()
    receiver.close()
    with pytest.raises(ValueError, match="send after close"):
        sender.send(message(1))
    with pytest.raises(ValueError, match="receive after close"):
        receiver.receive()


# --- what it bounds


@pytest.mark.parametrize(("capacity", "nbytes"), [(0, None), (-1, None), (1, 0)])
def test_a_capacity_is_at_least_one(capacity: int, nbytes: int | None) -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        Channel("c", capacity, nbytes)


def test_messages_are_bounded() -> None:
    channel, sender, receiver = opened(2)
    sender.send(message(0))
    sender.send(message(1))
    third = Beside(lambda: channel.sender().send(message(2))).waits()
    assert channel.load.depth == 2
    receiver.receive()
    third.ended()
    assert (channel.load.depth, channel.load.sent) == (2, 3)


def test_bytes_are_bounded_and_a_large_message_is_admitted_when_it_is_alone() -> None:
    channel, sender, receiver = opened(8, 100)
    sender.send(message(0, Sized(60)))
    sender.send(message(1, (Sized(20), Sized(20))))  # 60 + 40 fit exactly
    assert channel.load.nbytes == 100
    large = Beside(lambda: channel.sender().send(message(2, Sized(1000)))).waits()
    receiver.receive()
    assert large.waits().activity.state is BLOCKED  # not empty yet
    receiver.receive()
    large.ended()
    assert channel.load.nbytes == 1000
    small = Beside(lambda: channel.sender().send(message(3, Sized(1)))).waits()
    receiver.receive()
    small.ended()


def test_what_was_dealt_elsewhere_takes_no_room() -> None:
    channel, sender, receiver = opened(1)
    for index in range(5):
        sender.send(Message(Stamp(index, 0, index, False), None, ELSEWHERE))
    sender.send(message(5))
    assert channel.load.depth == 1
    waiting = Beside(lambda: channel.sender().send(message(7))).waits()
    assert [receiver.receive().stamp.index for _ in range(6)] == list(range(6))
    waiting.ended()


# --- nothing is lost


@settings(max_examples=30, deadline=None)
@given(
    capacity=st.integers(1, 4),
    senders=st.integers(1, 3),
    receivers=st.integers(1, 3),
    count=st.integers(0, 30),
    limit=st.sampled_from([None, 1, 5]),
    leave=st.none() | st.integers(0, 10),
)
def test_threads_lose_nothing(
    capacity: int, senders: int, receivers: int, count: int, limit: int | None, leave: int | None
) -> None:
    channel = Channel("c", capacity, limit)
    outs, ins = [channel.sender() for _ in range(senders)], [channel.receiver() for _ in range(receivers)]
    got: list[list[tuple[int, int]]] = [[] for _ in ins]

    def send(number: int) -> int:
        try:
            for i in range(count):
                outs[number].send(message(i, (number, i)))
        except BrokenChannel:
            return i
        finally:
            outs[number].close()
        return count

    def receive(number: int) -> None:
        try:
            while leave is None or len(got[number]) < leave:
                got[number].append(ins[number].receive().payload)
        except EndOfChannel:
            pass
        finally:
            ins[number].close()

    threads = [Beside(lambda n=n: send(n)) for n in range(senders)]
    threads += [Beside(lambda n=n: receive(n)) for n in range(receivers)]
    for thread in threads:
        assert thread.ended().error is None
    sent, received, dropped = channel.counts
    assert (sent, received) == (sum(t.result for t in threads[:senders]), sum(map(len, got)))
    assert sent == received + dropped and channel.load.depth == 0
    if leave is None:
        assert sorted(item for part in got for item in part) == [(n, i) for n in range(senders) for i in range(count)]
    for part in got:  # each sender's messages stay in order
        for number in range(senders):
            mine = [i for n, i in part if n == number]
            assert mine == sorted(mine)


def test_a_receive_is_atomic_under_cancel() -> None:
    """Whenever the cancel comes, a message is delivered or dropped, and counted as what happened to it."""
    for _ in range(200):
        channel, sender, receiver = opened(4)
        got: list[Any] = []

        def receive(receiver: Any = receiver, got: list[Any] = got) -> None:
            while True:
                got.append(receiver.receive())

        thread = Beside(receive)
        for index in range(4):
            sender.send(message(index))
        channel.cancel()
        assert isinstance(thread.ended().error, Cancelled)
        assert channel.counts == (4, len(got), 4 - len(got))


def test_thread_and_coroutine_share_a_channel() -> None:
    there, out, received = opened(1)
    back, answering, answers = opened(1)

    async def echo() -> None:
        try:
            while True:
                await answering.asend(await received.areceive())
        except EndOfChannel:
            answering.close()

    thread = Beside(lambda: asyncio.run(echo()))
    feeding = Beside(lambda: ([out.send(message(i)) for i in range(100)], out.close()))
    assert [answers.receive().payload for _ in range(100)] == list(range(100))
    with pytest.raises(EndOfChannel):
        answers.receive()
    assert thread.ended().error is None and feeding.ended().error is None
    assert there.counts == back.counts == (100, 100, 0)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_waiting_coroutine_is_released(end: str) -> None:
    async def both() -> list[type[BaseException]]:
        full, sender, taker = opened(1)
        empty, other, receiver = opened(1)
        await sender.asend(message(0))
        waiting = [asyncio.ensure_future(sender.asend(message(1))), asyncio.ensure_future(receiver.areceive())]
        await asyncio.sleep(0)
        if end == "cancel":
            full.cancel()
            empty.cancel()
        else:
            taker.close()
            other.close()
        return [type(e) for e in await asyncio.gather(*waiting, return_exceptions=True)]

    expected = [Cancelled, Cancelled] if end == "cancel" else [BrokenChannel, EndOfChannel]
    assert asyncio.run(both()) == expected


# --- what it keeps


def test_a_dropped_payload_is_freed_outside_the_lock() -> None:
    """A payload whose deletion uses the channel again (a log that is a stage, say) must not block."""
    channel, sender, _ = opened(2)
    seen = []

    class Nosy:
        def __del__(self) -> None:
            seen.append(channel.load.depth)
            with pytest.raises(Cancelled):
                sender.send(message(9))

    sender.send(message(0, Nosy()))
    assert Beside(channel.cancel).ended().error is None
    gc.collect()
    assert seen == [0]


def test_no_end_keeps_a_payload() -> None:
    _, sender, receiver = opened(1)
    payload = Sized(1)
    gone = weakref.ref(payload)
    sender.send(message(0, payload))
    del payload
    assert receiver.receive().payload.nbytes == 1
    assert gone() is None


def test_the_clock_runs_on_over_a_wake_up_for_nothing() -> None:
    channel, sender, receiver = opened(1)
    first, second = Beside(receiver.receive).waits(), Beside(channel.receiver().receive).waits()
    since = {id(t): t.activity.since for t in (first, second)}
    sender.send(message(0))
    until(lambda: first.result is not None or second.result is not None)
    left = second if first.result is not None else first
    assert left.activity.since == since[id(left)] and left.activity.changes == 0
    sender.close()
    assert isinstance(left.ended().error, EndOfChannel)
