"""A loop in a thread of its own, and scripts that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import selectors
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import anyio
import pytest

from forged.errors import RequestRefused, Unavailable
from forged.loop_thread import LoopThread
from tests.worker.process.test_forks import in_a_child

PATIENCE_S = 20.0
ROUNDS = 300
SHORTEST_S = 1e-5
LONGER_S = 3e-6
NAME = "a loop"
WORD: contextvars.ContextVar[str] = contextvars.ContextVar("WORD")


class Interrupted(BaseException):
    """What a signal's handler raises."""


def a_loop() -> LoopThread:
    return LoopThread(NAME, Unavailable("gone", "it is gone"))


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with a_loop() as loop:
        yield loop


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def refuse(error: BaseException) -> None:
    raise error


async def fail_in_a_group(error: BaseException) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail, error)


class Endless:
    """Something that does not end, unless it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    async def last(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def begin(self, loop: LoopThread, threads: ThreadPoolExecutor) -> Future[None]:
        """Have another thread wait for it."""
        asked = threads.submit(loop.run, self.last)
        assert self.begun.wait(PATIENCE_S)
        return asked


class Room:
    """Something that is held; it breaks when it is told to."""

    def __init__(self) -> None:
        self.tasks: list[object] = []
        self.is_open = False
        self.breaks = asyncio.Event()
        self.error: BaseException | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Room]:
        self.tasks.append(asyncio.current_task())
        self.is_open = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._break)
                yield self
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)
            self.is_open = False
            self.tasks.append(asyncio.current_task())

    def break_by(self, error: BaseException | None) -> None:
        self.error = error
        self.breaks.set()

    async def _break(self) -> None:
        await self.breaks.wait()
        if self.error is not None:
            raise self.error


@contextmanager
def alarms(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        # In this order: a handler that is about to run could set the timer again.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupting() -> AbstractContextManager[None]:
    """Have the alarm raise where the script is just then."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    return alarms(interrupt)


def ring_soon(number: int) -> None:
    """Let the alarm come at another moment than the last one."""
    signal.setitimer(signal.ITIMER_REAL, SHORTEST_S + number % 100 * LONGER_S)


def frames_of(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in(call: Callable[..., object], thread: int | None) -> bool:
    """Whether that is what a thread does just now."""
    assert thread is not None
    return any(frame.f_code is call.__code__ for frame in frames_of(thread))


@contextmanager
def interrupted_when_it_waits() -> Iterator[None]:
    """Interrupt this thread when it waits for the loop."""

    def ring() -> None:
        while not is_in(LoopThread._result_of, script):
            pass
        signal.pthread_kill(script, signal.SIGALRM)

    script = threading.get_ident()
    thread = threading.Thread(target=ring)
    thread.start()
    with interrupting(), pytest.raises(Interrupted):
        yield
    thread.join()


class TestAsking:
    def test_what_is_awaited_there_is_returned_here(self, loop: LoopThread) -> None:
        assert loop.run(echo, value=5) == 5

    def test_what_is_called_there_is_returned_here(self, loop: LoopThread) -> None:
        assert loop.call(threading.get_ident) != threading.get_ident()

    def test_in_the_thread_of_the_loop_it_is_called_at_once(self, loop: LoopThread) -> None:
        assert loop.call(lambda: (loop.is_own_thread, loop.call(int, "5"))) == (True, 5)
        assert not loop.is_own_thread

    def test_what_is_told_is_done_in_the_order_in_which_it_was_told(self, loop: LoopThread) -> None:
        heard: list[int] = []
        for number in range(3):
            loop.tell(heard.append, number)
        assert loop.call(heard.copy) == [0, 1, 2]

    def test_the_context_is_that_of_who_asks(self, loop: LoopThread) -> None:
        WORD.set("mine")
        assert loop.call(WORD.get) == "mine"

    def test_many_threads_may_ask_at_once(self, loop: LoopThread) -> None:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda number: loop.run(echo, number), range(200))) == list(range(200))

    def test_the_loops_own_thread_cannot_wait_for_itself(self, loop: LoopThread) -> None:
        with pytest.raises(RequestRefused) as raised:
            loop.call(lambda: loop.run(echo, 1))
        assert raised.value.code == "loop_waits_for_itself"

    def test_it_does_not_keep_the_process(self, loop: LoopThread) -> None:
        (thread,) = (thread for thread in threading.enumerate() if thread.name == NAME)
        assert thread.daemon


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
    @pytest.mark.parametrize("how", ["awaited", "called"])
    def test_what_fails_there_fails_here_and_the_loop_goes_on(
        self, error: BaseException, how: str, loop: LoopThread
    ) -> None:
        with pytest.raises(type(error)) as raised:
            loop.run(fail, error) if how == "awaited" else loop.call(refuse, error)
        assert raised.value is error
        assert loop.run(echo, 5) == 5

    def test_an_exit_in_a_task_comes_out_with_its_code_and_the_loop_goes_on(self, loop: LoopThread) -> None:
        with pytest.raises(SystemExit) as raised:
            loop.run(fail_in_a_group, SystemExit(3))
        assert raised.value.code == 3
        assert loop.run(echo, 5) == 5

    def test_other_errors_of_tasks_come_out_as_they_are(self, loop: LoopThread) -> None:
        with pytest.raises(ExceptionGroup) as raised:
            loop.run(fail_in_a_group, ValueError("no"))
        assert [str(error) for error in raised.value.exceptions] == ["no"]


class TestHolding:
    def test_it_is_entered_and_left_in_one_task(self, loop: LoopThread) -> None:
        room = Room()
        with loop.holding(room.open()) as held:
            assert held is room
            assert loop.call(lambda: room.is_open)
        assert not room.is_open
        entered, left = room.tasks
        assert entered is left

    def test_what_the_block_raises_leaves_it_as_it_is(self, loop: LoopThread) -> None:
        room = Room()
        with pytest.raises(KeyError, match="mine"), loop.holding(room.open()):
            raise KeyError("mine")
        assert not room.is_open

    def test_what_cannot_be_entered_fails_here_and_the_loop_goes_on(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def closed() -> AsyncIterator[None]:
            raise ValueError("closed")
            yield

        with pytest.raises(ValueError, match="closed"), loop.holding(closed()):
            pass
        assert loop.run(echo, 5) == 5

    def test_what_fails_when_it_is_left_fails_here(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def sticky() -> AsyncIterator[None]:
            yield
            raise ValueError("it sticks")

        with pytest.raises(ValueError, match="it sticks"), loop.holding(sticky()):
            pass
        assert loop.run(echo, 5) == 5

    def test_when_it_breaks_whoever_waits_is_told_and_whoever_comes_later(self, loop: LoopThread) -> None:
        room = Room()
        with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as stack:
            stack.enter_context(loop.holding(room.open()))
            waiting = Endless().begin(loop, threads)
            loop.tell(room.break_by, ValueError("it broke"))
            failure = waiting.exception(PATIENCE_S)
            assert isinstance(failure, ExceptionGroup)
            assert [str(error) for error in failure.exceptions] == ["it broke"]
            for later in (lambda: loop.run(echo, 5), stack.close):
                with pytest.raises(ExceptionGroup) as raised:
                    later()
                assert raised.value is failure

    def test_an_exit_of_what_is_held_comes_out_with_its_code(self, loop: LoopThread) -> None:
        def train() -> None:
            with loop.holding(room.open()):
                loop.tell(room.break_by, SystemExit(3))
                loop.run(Endless().last)

        room = Room()
        with pytest.raises(SystemExit) as raised:
            train()
        assert raised.value.code == 3
        assert not room.is_open

    def test_when_it_ends_without_a_failure_whoever_waits_is_told_that_it_is_gone(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def ends() -> AsyncIterator[None]:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                yield

        scopes: list[anyio.CancelScope] = []
        with loop.holding(ends()):
            loop.tell(lambda: scopes[0].cancel())
            with pytest.raises(Unavailable, match="it is gone"):
                loop.run(Endless().last)


class TestTheEnd:
    def test_what_waits_is_cancelled_and_told(self) -> None:
        endless = Endless()
        with ThreadPoolExecutor(1) as threads:
            with a_loop() as loop:
                waiting = endless.begin(loop, threads)
            assert endless.cancelled.is_set()
            with pytest.raises(Unavailable, match="it is gone"):
                waiting.result(PATIENCE_S)

    def test_what_is_held_by_another_thread_is_left(self) -> None:
        room, held, may_go = Room(), threading.Event(), threading.Event()

        def hold(loop: LoopThread) -> None:
            with loop.holding(room.open()):
                held.set()
                may_go.wait(PATIENCE_S)

        with ThreadPoolExecutor(1) as threads:
            with a_loop() as loop:
                holding = threads.submit(hold, loop)
                assert held.wait(PATIENCE_S)
            assert not room.is_open
            may_go.set()
            assert holding.exception(PATIENCE_S) is None

    def test_afterwards_it_says_so_and_there_is_no_thread(self) -> None:
        with a_loop() as loop:
            pass
        uses: list[Callable[[], Any]] = [
            lambda: loop.run(echo, 1),
            lambda: loop.call(int),
            lambda: loop.tell(int),
            lambda: loop.holding(Room().open()).__enter__(),
        ]
        for use in uses:
            with pytest.raises(Unavailable, match="it is gone"):
                use()
        assert NAME not in {thread.name for thread in threading.enumerate()}

    def test_no_call_is_lost_that_comes_in_that_moment(self) -> None:
        def ask(loop: LoopThread) -> None:
            begun.release()
            while True:
                loop.run(echo, 1)

        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as threads:
            for _ in range(10):
                with a_loop() as loop:
                    asking = [threads.submit(ask, loop) for _ in range(4)]
                    for _ in asking:
                        begun.acquire()
                assert {type(one.exception(PATIENCE_S)) for one in asking} == {Unavailable}

    def test_one_that_comes_when_the_loop_turns_no_more_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with a_loop() as loop:
            pass
        # As if it came right before the loop was closed.
        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", lambda *told: None)
        with pytest.raises(Unavailable, match="it is gone"):
            loop.run(echo, 1)

    def test_it_may_be_ended_in_its_own_thread_which_does_not_wait_for_itself(self) -> None:
        loop = a_loop().__enter__()
        loop.call(loop.__exit__, None, None, None)
        loop.__exit__(None, None, None)
        assert NAME not in {thread.name for thread in threading.enumerate()}

    def test_a_forked_child_has_none(self, loop: LoopThread) -> None:
        def asks() -> None:
            with pytest.raises(Unavailable, match="it is gone"):
                loop.run(echo, 1)
            loop.__exit__(None, None, None)

        in_a_child(asks)
        assert loop.run(echo, 5) == 5


class TestSignals:
    def test_whoever_is_interrupted_anywhere_may_go_on_asking(self, loop: LoopThread) -> None:
        room = Room()
        with loop.holding(room.open()), interrupting():
            for number in range(ROUNDS):
                with pytest.raises(Interrupted):
                    self._ask_until_interrupted(loop, number)
        assert not room.is_open

    def _ask_until_interrupted(self, loop: LoopThread, number: int) -> None:
        ring_soon(number)
        while True:
            assert loop.run(echo, number) == number

    def test_a_handler_may_ask_at_any_moment(self, loop: LoopThread) -> None:
        asked: list[int] = []
        told: list[int] = []

        def ask(number: int, frame: FrameType | None) -> None:
            asked.append(loop.run(echo, len(asked)))
            loop.tell(told.append, asked[-1])
            ring_soon(len(asked))

        with alarms(ask):
            ring_soon(0)
            while len(asked) < ROUNDS:
                assert loop.run(echo, 5) == 5
        assert asked == loop.call(told.copy) == list(range(len(asked)))

    def test_what_is_interrupted_is_cancelled(self, loop: LoopThread) -> None:
        endless = Endless()
        with interrupted_when_it_waits():
            loop.run(endless.last)
        assert not endless.begun.is_set() or endless.cancelled.wait(PATIENCE_S)
        assert loop.run(echo, 5) == 5

    def test_what_is_entered_when_it_is_interrupted_is_not_entered(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def far() -> AsyncIterator[None]:
            await endless.last()
            yield

        endless = Endless()
        with interrupted_when_it_waits(), loop.holding(far()):
            raise AssertionError("it is not entered")
        assert not endless.begun.is_set() or endless.cancelled.wait(PATIENCE_S)
        assert loop.run(echo, 5) == 5

    def test_what_is_left_when_it_is_interrupted_is_left_all_the_same(self) -> None:
        @asynccontextmanager
        async def polite() -> AsyncIterator[None]:
            yield
            await said.wait()
            goodbyes.append("goodbye")

        said, goodbyes = asyncio.Event(), list[str]()
        with a_loop() as loop:
            stack = contextlib.ExitStack()
            stack.enter_context(loop.holding(polite()))
            with interrupted_when_it_waits():
                stack.close()
            loop.tell(said.set)
        assert goodbyes == ["goodbye"]

    def test_a_loop_that_was_told_something_and_not_woken_wakes_up_by_itself(
        self, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        while not is_in(selectors.EpollSelector.select, loop._thread.ident):
            pass
        # As if who tells it were interrupted right behind.
        monkeypatch.setattr(loop._loop, "_write_to_self", lambda: None)
        assert loop.run(echo, 5) == 5

    def test_one_that_could_not_be_told_that_it_is_to_end_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*told: object) -> None:
            monkeypatch.undo()
            raise Interrupted

        loop = a_loop().__enter__()
        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupt)
        with pytest.raises(Interrupted):
            loop.__exit__(None, None, None)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == NAME)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
