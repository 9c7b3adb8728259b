"""Routes: dealing, merging, gathering, grouping, and the gates at which workers wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipe.channel import Channel
from dflash_pipe.errors import BrokenChannel, Cancelled, EndOfChannel
from dflash_pipe.gate import CreditGate, Gate, GroupGate, Lane, ReorderGate, TurnGate
from dflash_pipe.message import ELSEWHERE, Message, Stamp
from dflash_pipe.route import Blocking, Gather, Inlet, Local, Merge, Outlet, Restamp, Suspending
from dflash_pipe.worker import drive
from tests.pipeline import Beside, message


def now(coroutine: Any) -> Any:
    """What a coroutine that does not suspend returns."""
    results: list[Any] = []

    async def keep() -> None:
        results.append(await coroutine)

    drive(keep())
    return results[0]


def passes(gate: Gate, key: Any) -> bool:
    """Whether the key may pass now; it takes its place if so."""
    with gate._lock:
        return gate._attempt(key)


def stamped(index: int, window: int = 4, payload: Any = None) -> Message:
    w, slot = divmod(index, window)
    return Message(Stamp(index, w, slot, slot == window - 1), index, index if payload is None else payload)


def filled(messages: list[Message], capacity: int = 64) -> Channel:
    """A channel that holds these and has ended."""
    channel = Channel("c", capacity)
    sender = channel.sender()
    for each in messages:
        sender.send(each)
    sender.close()
    return channel


def drained(inlet: Inlet) -> list[Message]:
    """All messages of an inlet until its end."""
    got: list[Message] = []
    with pytest.raises(EndOfChannel):
        while True:
            got.append(now(inlet.receive(Blocking())))
    return got


# --- inlets


@given(st.integers(0, 20), st.integers(0, 12).flatmap(lambda n: st.permutations(range(n))), st.integers(1, 4))
def test_a_merge_restores_the_order_from_where_the_run_begins(start: int, order: list[int], group: int) -> None:
    merge = Merge(filled([message(start + i) for i in order]).receiver(), start, group)
    assert [m.stamp.index for m in drained(merge)] == list(range(start, start + len(order)))


def test_a_merge_hands_on_whole_groups_only_and_takes_later_ones_meanwhile() -> None:
    channel = Channel("c", 1)
    sender, merge = channel.sender(), Merge(channel.receiver(), 0, group=2)
    taken = Beside(lambda: now(merge.receive(Blocking())))
    for index in (0, 2, 3, 4, 5):  # a merge that waits for 1 with 0 in its hands must not leave them in the channel
        sender.send(message(index))
    taken.waits()
    sender.send(message(1))
    assert taken.ended().result.payload == 0
    sender.close()
    merge.receivers[0]._activity = None  # from here on this thread owns it
    assert [m.payload for m in drained(merge)] == [1, 2, 3, 4, 5]


def test_a_merge_hands_on_the_rest_of_a_group_without_the_next() -> None:
    channel = Channel("c", 4)
    sender, merge = channel.sender(), Merge(channel.receiver(), 0, group=2)
    sender.send(message(0))
    sender.send(message(1))
    assert Beside(lambda: [now(merge.receive(Blocking())).payload for _ in range(2)]).ended().result == [0, 1]


def test_a_merge_keeps_the_empty_places() -> None:
    messages = [stamped(1), stamped(0).carrying(None), stamped(2, payload=ELSEWHERE)]
    assert [m.empty for m in drained(Merge(filled(messages).receiver(), 0))] == [True, False, True]


def test_a_gather_makes_one_message_in_replica_order() -> None:
    first, second = filled([stamped(3, payload="a"), stamped(7)]), filled([stamped(3, payload="b"), stamped(7)])
    got = drained(Gather([first.receiver(), second.receiver()]))
    assert [m.payload for m in got] == [("a", "b"), (7, 7)]
    empty = Gather([filled([stamped(3).carrying(None)]).receiver(), filled([stamped(3, payload="b")]).receiver()])
    assert [m.payload for m in drained(empty)] == [("b",)]


@given(st.integers(1, 4), st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))), st.integers(1, 3))
def test_a_restamp_numbers_by_arrival_and_ends_what_was_ended(window: int, order: list[int], group: int) -> None:
    last = len(order) - 1
    stamps = [Stamp(8 + i, 2 + i // window, i % window, i % window == window - 1 or i == last) for i in range(last + 1)]
    arrived = [Message(stamps[i], None, i) for i in order]
    got = drained(Restamp(filled(arrived).receiver(), (8, 2), window, group))
    assert [m.payload for m in got] == order
    assert [m.stamp for m in got] == stamps


def test_a_local_route_is_both_ends() -> None:
    local = Local(gather=True)
    now(local.send(Blocking(), stamped(0, payload="a")))
    now(local.send(Blocking(), stamped(1).carrying(None)))
    assert [now(local.receive(Blocking())).payload for _ in range(1)] == [("a",)]
    assert now(local.receive(Blocking())).empty


# --- outlets


def test_dealing_goes_by_slot_and_tells_the_others() -> None:
    channels = [Channel(f"c[{i}]", 8) for i in range(2)]
    receivers = [channel.receiver() for channel in channels]
    outlet = Outlet([channel.sender() for channel in channels], deal=True)
    for index in range(4):
        now(outlet.send(Blocking(), stamped(index)))
    outlet.close()
    got = [[m.payload for m in drained(Inlet([receiver]))] for receiver in receivers]
    assert got == [[0, ELSEWHERE, 2, ELSEWHERE], [ELSEWHERE, 1, ELSEWHERE, 3]]
    assert [channel.load.depth for channel in channels] == [0, 0]


def test_what_went_elsewhere_is_sent_by_whom_it_went_to() -> None:
    channel = Channel("c", 1)
    channel.receiver()
    now(Outlet([channel.sender()]).send(Blocking(), stamped(0, payload=ELSEWHERE)))
    assert channel.load.sent == 0


@pytest.mark.parametrize("feedback", [False, True])
def test_who_is_still_there_is_served_before_the_break_is_told(feedback: bool) -> None:
    gone, here = Channel("gone", 1), Channel("here", 1)
    gone.receiver().close()
    receiver = here.receiver()
    outlet = Outlet([gone.sender(), here.sender()], feedback=feedback)
    if feedback:
        now(outlet.send(Blocking(), stamped(0)))
    else:
        with pytest.raises(BrokenChannel, match="gone"):
            now(outlet.send(Blocking(), stamped(0)))
    assert receiver.receive().payload == 0 and outlet.unsent == 1


# --- gates


def test_a_reorder_gate_admits_what_is_near_the_slowest_merge() -> None:
    gate = ReorderGate("target", 3, merges=2, start=10)
    assert [passes(gate, index) for index in (10, 12, 13)] == [True, True, False]
    waiting = Beside(lambda: gate.wait(13)).waits()
    assert waiting.activity.waits_for == "the merge behind 'target'"
    gate.delivered(0, 10)
    waiting.waits()
    gate.delivered(1, 10)
    assert waiting.ended().error is None
    far = Beside(lambda: gate.wait(99)).waits()
    gate.merge_left(0)
    gate.merge_left(1)
    assert far.ended().error is None


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 12))
def test_a_group_gate_opens_for_whole_groups_and_for_the_rest_at_the_end(start: int, size: int, count: int) -> None:
    gate = GroupGate("c", size, start)
    for done in range(count):
        gate.arrived(start + done)
        whole = (done + 1) // size * size
        assert [passes(gate, start + i) for i in range(done + 1)] == [i < whole for i in range(done + 1)]
    gate.sender_left()
    assert all(passes(gate, start + i) for i in range(count))


def test_credits_of_messages_wait_for_all_who_end_the_stream_and_at_a_windows_end_for_the_step() -> None:
    gate = CreditGate("message", 1, message_enders=2, window_enders=1, window=2)
    first, last = Stamp(0, 0, 0, False), Stamp(1, 0, 1, True)
    assert passes(gate, 0) and not passes(gate, 1)
    gate.done(first)
    assert not passes(gate, 1)
    gate.done(first)
    assert passes(gate, 1)
    gate.done(last)
    gate.done(last)
    assert not passes(gate, 2)
    gate.done(last)
    assert passes(gate, 2)


def test_credits_of_windows_wait_for_the_whole_window_in_whatever_order() -> None:
    gate = CreditGate("window", 1, message_enders=1, window_enders=0, window=3)
    assert passes(gate, 0)
    for slot in (2, 0, 1):  # replicas may finish the last one first
        assert not passes(gate, 1)
        gate.done(Stamp(slot, 0, slot, slot == 2))
    assert passes(gate, 1)


def test_a_credit_is_not_waited_for_when_who_gives_it_back_has_left() -> None:
    gate = CreditGate("message", 1, 1, 0, 1)
    gate.wait(0)
    waiting = Beside(lambda: gate.wait(1)).waits()
    assert waiting.activity.waits_for == "a credit (messages)"
    gate.ender_left()
    assert waiting.ended().error is None


def test_a_turn_is_one_at_a_time_and_in_input_order() -> None:
    gate = TurnGate("gpu", start=5)
    assert not passes(gate, Lane("target", 6))
    assert passes(gate, Lane("target", 5))
    assert not passes(gate, Lane("drafter", None))
    gate.give_back(Lane("target", 5))
    assert passes(gate, Lane("drafter", None))
    gate.give_back(Lane("drafter", None))
    gate.skip(Lane("target", 7))  # nothing to compute there
    assert passes(gate, Lane("target", 6))
    gate.give_back(Lane("target", 6))
    assert passes(gate, Lane("target", 8))
    gate.give_back(Lane("target", 8))
    assert not passes(gate, Lane("target", 10))
    gate.replica_left("target")
    assert passes(gate, Lane("target", 10))


def test_waiting_at_a_gate_ends_with_a_cancel() -> None:
    gate = CreditGate("message", 1, 1, 0, 1)
    gate.wait(0)
    waiting = Beside(lambda: gate.wait(1)).waits()

    async def suspended() -> None:
        await Suspending().at(gate, 2)

    other = Beside(lambda: asyncio.run(suspended())).waits()
    gate.cancel()
    assert isinstance(waiting.ended().error, Cancelled) and isinstance(other.ended().error, Cancelled)
    with pytest.raises(Cancelled):
        gate.wait(3)


def test_a_coroutine_waits_at_a_gate_and_a_thread_lets_it_in() -> None:
    gate = CreditGate("message", 1, 1, 0, 1)
    gate.wait(0)

    async def suspended() -> str:
        await Suspending().at(gate, 1)
        return "in"

    waiting = Beside(lambda: asyncio.run(suspended())).waits()
    gate.done(Stamp(0, 0, 0, True))
    assert waiting.ended().result == "in"


def test_what_suspends_on_a_thread_fails_where_it_does() -> None:
    places: list[str] = []

    async def wrong() -> None:
        try:
            await asyncio.sleep(0)
        except RuntimeError:
            places.append("here")
            raise

    with pytest.raises(RuntimeError, match="kind: async"):
        drive(wrong())
    assert places == ["here"]
