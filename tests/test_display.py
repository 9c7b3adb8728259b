"""What a person sees of a run: the live picture, plain lines, the closing table; drawing cannot hurt the run."""

import errno
import io
import threading
from collections import deque
from dataclasses import replace

import pytest
from rich.console import Console

from dflash_pipe.display import Display
from dflash_pipe.picture import BAR, closing_table, live_view, plain_line
from dflash_pipe.stats import ChannelLoad, View, WorkerShares

TARGET = WorkerShares("target", ("target",), 0.75, 0.2, 0.05, 128, 16.0, "forward of message 127")
OPTIM = WorkerShares("optim", ("optimizer", "track"), 0.1, 0.9, 0.0, 16, 16.0, "waits for input of 'grads'")
FEATURES = ChannelLoad("features", 1, 2, 3 * 2**20, 1280)
METRICS = {"loss": 2.34567, "tokens_per_second": 15321.4, "step": 16, "per_slot": [0.5, 0.4], "note": "warm-up"}
VIEW = View("demo", 16.4, 16, (TARGET, OPTIM), (FEATURES,), METRICS)


def drawn(what, width=100):
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(what)
    return console.export_text()


def rows(text):
    """First word of each line -> the line."""
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


def cells(line):
    """How many cells of the bar each share has, in the order in which they are stacked, by their colours."""
    console = Console(file=io.StringIO(), record=True, width=100, force_terminal=True, color_system="standard")
    console.print(line)
    segments = [s for s in console.render(line) if "█" in s.text]
    return [(s.style.color.name, len(s.text)) for s in segments]


def test_the_live_view_shows_workers_channels_and_metrics():
    shown = rows(drawn(live_view(VIEW)))
    assert "demo · 16 windows in 0:16" in shown["demo"]
    assert "75 %" in shown["target"] and shown["target"].rstrip().endswith("forward of message 127")
    assert shown["optim"].rstrip().endswith("waits for input of 'grads'")
    assert all(part in shown["features"] for part in ("▮▮▮▮▯▯▯▯", "1/2", "3 MiB", "1,280"))
    assert "2.346" in shown["loss"] and "15,321" in shown["tokens_per_second"]
    assert shown.keys().isdisjoint({"per_slot", "note", "step"})  # only plain numbers; steps are in the headline


def test_a_bar_is_stacked_and_always_full():
    for busy, starved in [(1.0, 0.0), (0.0, 1.0), (1 / 3, 1 / 3), (0.015, 0.97), (0.0, 0.0), (0.5, 0.4999)]:
        worker = replace(TARGET, busy=busy, starved=starved, blocked=max(0.0, 1 - busy - starved))
        bar = cells(live_view(replace(VIEW, workers=(worker,), channels=(), metrics={})))
        assert sum(width for _, width in bar) == BAR
        assert dict(bar).get("green", 0) == round(busy * BAR)


def test_curves_show_the_course_of_a_metric_and_skip_what_is_not_finite():
    shown = rows(drawn(live_view(VIEW, {"loss": [3.0, float("nan"), 2.0, float("inf"), 1.0]})))
    assert "█▅▁" in shown["loss"]


@pytest.mark.parametrize("width", [52, 80, 200])
def test_on_a_narrow_terminal_only_what_each_worker_does_now_is_cut(width):
    lines = drawn(live_view(VIEW), width).splitlines()
    assert len(lines) == len(drawn(live_view(VIEW), 300).splitlines())
    assert rows("\n".join(lines)).keys() == rows(drawn(live_view(VIEW), 300)).keys()


def test_an_empty_run_is_drawn():
    empty = View("empty", 0.0, 0, (), ())
    assert "empty" in drawn(live_view(empty)) and "empty" in drawn(closing_table(empty))
    assert plain_line(empty) == "0:00"


def test_the_plain_line_is_one_line():
    assert plain_line(replace(VIEW, elapsed=3725.0)) == (
        "1:02:05 · window 16 · loss 2.346 · busy: target 75%, optim 10%"
    )


def test_the_closing_table_gives_every_workers_shares():
    shown = rows(drawn(closing_table(VIEW)))
    assert all(part in shown["target"] for part in ("75.0 %", "20.0 %", "5.0 %", "128"))
    assert "optimizer → track" in shown["optim"]
    assert "loss 2.346" in drawn(closing_table(VIEW))


class Run:
    """A view that tells when it was read `reads` times, and fails from read number `fails` on."""

    def __init__(self, reads=1, fails=None):
        self.left, self.fails, self.calls, self.enough = reads, fails, 0, threading.Event()

    def __call__(self):
        self.calls += 1
        if self.calls >= self.left:
            self.enough.set()
        if self.fails is not None and self.calls >= self.fails:
            raise ValueError("cannot look")
        return replace(VIEW, window=self.calls, metrics={"loss": 1 / self.calls})

    def wait(self):
        assert self.enough.wait(30)


def drawing():
    return [thread for thread in threading.enumerate() if thread.name == "display"]


def console(terminal):
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)


def test_on_a_terminal_the_picture_is_redrawn_and_then_replaced_by_the_table():
    run, screen = Run(reads=4), console(terminal=True)
    with Display(run, screen, every=0.001):
        run.wait()
    text = screen.file.getvalue()
    assert text.count("busy starved blocked") >= 3
    assert text.rindex("messages") > text.rindex("busy starved blocked")
    assert not drawing()


def test_without_a_terminal_there_are_plain_lines_and_no_control_codes(monkeypatch):
    monkeypatch.setattr("dflash_pipe.display.PLAIN_EVERY", 0.001)
    run, screen = Run(), console(terminal=False)
    with Display(run, screen):
        run.wait()
    first, *table = screen.file.getvalue().splitlines()
    assert first.startswith("0:16 · window 1 · loss 1") and "messages" in "".join(table)
    assert "\x1b" not in screen.file.getvalue()
    assert not drawing()


def test_a_run_that_is_over_before_the_first_plain_line_has_none():
    screen = console(terminal=False)
    with Display(lambda: VIEW, screen):
        pass
    first, *_ = screen.file.getvalue().splitlines()
    assert first.startswith("demo · 16 windows in")


def test_a_plain_line_comes_only_when_something_moved():
    screen = console(terminal=False)
    display = Display(lambda: VIEW, screen)
    for _ in range(3):
        display._draw()
    assert len(screen.file.getvalue().splitlines()) == 1


def test_a_curve_grows_by_one_point_a_window():
    display = Display(lambda: VIEW, console(terminal=True))
    for _ in range(3):
        display._draw()
    assert display._curves["loss"] == deque([2.34567])


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_in_drawing_leaves_the_run_alone_and_surfaces_at_the_end(terminal, monkeypatch):
    monkeypatch.setattr("dflash_pipe.display.PLAIN_EVERY", 0.001)
    run = Run(fails=1)
    finished = False
    with pytest.raises(ValueError, match="cannot look"), Display(run, console(terminal), every=0.001):
        run.wait()
        finished = True
    assert finished and run.calls == 1
    assert not drawing()


def test_a_terminal_that_is_gone_ends_the_drawing_only():
    """Whenever it goes: at the first picture, at a later one, or before the table."""
    for goes in (1, 10, 10**9):
        screen, seen, written = console(terminal=True), threading.Event(), []
        gone = threading.Event()

        def write(text, goes=goes, written=written, gone=gone):
            written.append(text)
            if gone.is_set() or len(written) >= goes:
                raise OSError(errno.EIO, "Input/output error")
            return len(text)

        def look(seen=seen, looks=iter(range(10**9))):  # noqa: B008 (one for each round)
            if next(looks) > 20:
                seen.set()
            return VIEW

        screen.file.write = write
        with Display(look, screen, every=0.001):
            assert seen.wait(30)
            gone.set()
        assert len(written) > 20 or goes < 20


def test_the_runs_own_error_comes_first():
    run = Run(fails=1)
    with pytest.raises(KeyError) as caught, Display(run, console(terminal=True), every=0.001):
        run.wait()
        raise KeyError("the run")
    assert "cannot look" in caught.value.__notes__[0]


def test_the_table_is_printed_when_the_run_fails():
    screen = console(terminal=False)
    with pytest.raises(KeyError), Display(Run(), screen):
        raise KeyError("the run")
    assert "messages" in screen.file.getvalue()


def test_what_is_kept_in_a_file_has_no_blanks_at_the_ends_of_lines():
    file = io.StringIO()
    with Display(lambda: VIEW, Console(file=file, width=100)):
        pass
    lines = file.getvalue().splitlines()
    assert any("target" in line and "75" in line for line in lines)
    assert lines == [line.rstrip() for line in lines]
