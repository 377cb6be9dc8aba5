"""An event loop in a thread, and threads that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from forged.blocking.loop_thread import LoopThread
from forged.errors import RequestRefused, Unavailable
from tests.worker.process.test_forks import in_a_child

ROOT = Path(__file__).parents[2]
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
        # First another handler, because this one could set the timer again. Not SIG_IGN: Python reports an alarm that
        # comes just then as ignored due to a race.
        signal.signal(signal.SIGALRM, lambda number, frame: None)
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
    def test_run_returns_the_result(self, loop: LoopThread) -> None:
        assert loop.run(echo, value=5) == 5

    def test_call_returns_the_result(self, loop: LoopThread) -> None:
        assert loop.call(threading.get_ident) != threading.get_ident()

    def test_call_in_the_loop_thread_is_direct(self, loop: LoopThread) -> None:
        assert loop.call(lambda: (loop.is_own_thread, loop.call(int, "5"))) == (True, 5)
        assert not loop.is_own_thread

    def test_tell_keeps_the_order(self, loop: LoopThread) -> None:
        heard: list[int] = []
        for number in range(3):
            loop.tell(heard.append, number)
        assert loop.call(heard.copy) == [0, 1, 2]

    def test_a_call_has_the_context_of_its_caller(self, loop: LoopThread) -> None:
        WORD.set("mine")
        assert loop.call(WORD.get) == "mine"

    def test_many_threads_may_call_at_once(self, loop: LoopThread) -> None:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda number: loop.run(echo, number), range(200))) == list(range(200))

    def test_run_in_the_loop_thread_is_refused(self, loop: LoopThread) -> None:
        with pytest.raises(RequestRefused) as raised:
            loop.call(lambda: loop.run(echo, 1))
        assert raised.value.code == "loop_waits_for_itself"

    def test_the_thread_does_not_keep_the_process_alive(self, loop: LoopThread) -> None:
        (thread,) = (thread for thread in threading.enumerate() if thread.name == NAME)
        assert thread.daemon


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
    @pytest.mark.parametrize("how", ["awaited", "called"])
    def test_an_error_on_the_loop_is_raised_in_the_caller(
        self, error: BaseException, how: str, loop: LoopThread
    ) -> None:
        with pytest.raises(type(error)) as raised:
            loop.run(fail, error) if how == "awaited" else loop.call(refuse, error)
        assert raised.value is error
        assert loop.run(echo, 5) == 5

    def test_an_exit_in_a_task_keeps_its_code(self, loop: LoopThread) -> None:
        with pytest.raises(SystemExit) as raised:
            loop.run(fail_in_a_group, SystemExit(3))
        assert raised.value.code == 3
        assert loop.run(echo, 5) == 5

    def test_other_errors_of_tasks_stay_groups(self, loop: LoopThread) -> None:
        with pytest.raises(ExceptionGroup) as raised:
            loop.run(fail_in_a_group, ValueError("no"))
        assert [str(error) for error in raised.value.exceptions] == ["no"]


class TestHolding:
    def test_holding_enters_and_exits_in_one_task(self, loop: LoopThread) -> None:
        room = Room()
        with loop.holding(room.open()) as held:
            assert held is room
            assert loop.call(lambda: room.is_open)
        assert not room.is_open
        entered, left = room.tasks
        assert entered is left

    def test_an_error_of_the_block_is_unchanged(self, loop: LoopThread) -> None:
        room = Room()
        with pytest.raises(KeyError, match="mine"), loop.holding(room.open()):
            raise KeyError("mine")
        assert not room.is_open

    def test_an_error_while_entering_is_raised(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def closed() -> AsyncIterator[None]:
            raise ValueError("closed")
            yield

        with pytest.raises(ValueError, match="closed"), loop.holding(closed()):
            pass
        assert loop.run(echo, 5) == 5

    def test_an_error_while_exiting_is_raised(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def sticky() -> AsyncIterator[None]:
            yield
            raise ValueError("it sticks")

        with pytest.raises(ValueError, match="it sticks"), loop.holding(sticky()):
            pass
        assert loop.run(echo, 5) == 5

    def test_a_failure_of_the_held_manager_fails_pending_and_later_calls(self, loop: LoopThread) -> None:
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

    def test_an_exit_of_the_held_manager_keeps_its_code(self, loop: LoopThread) -> None:
        def train() -> None:
            with loop.holding(room.open()):
                loop.tell(room.break_by, SystemExit(3))
                loop.run(Endless().last)

        room = Room()
        with pytest.raises(SystemExit) as raised:
            train()
        assert raised.value.code == 3
        assert not room.is_open

    def test_an_early_end_of_the_held_manager_closes_the_loop(self, loop: LoopThread) -> None:
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
    def test_pending_calls_are_cancelled_at_the_end(self) -> None:
        endless = Endless()
        with ThreadPoolExecutor(1) as threads:
            with a_loop() as loop:
                waiting = endless.begin(loop, threads)
            assert endless.cancelled.is_set()
            with pytest.raises(Unavailable, match="it is gone"):
                waiting.result(PATIENCE_S)

    def test_a_manager_held_by_another_thread_is_exited_at_the_end(self) -> None:
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

    def test_calls_after_the_end_are_refused(self) -> None:
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

    def test_no_call_at_the_moment_of_the_end_hangs(self) -> None:
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

    def test_a_call_scheduled_on_a_stopped_loop_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with a_loop() as loop:
            pass
        # As if it came right before the loop was closed.
        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", lambda *told: None)
        with pytest.raises(Unavailable, match="it is gone"):
            loop.run(echo, 1)

    def test_the_loop_may_be_ended_in_its_own_thread(self) -> None:
        loop = a_loop().__enter__()
        loop.call(loop.__exit__, None, None, None)
        loop.__exit__(None, None, None)
        assert NAME not in {thread.name for thread in threading.enumerate()}

    def test_calls_in_a_forked_child_fail(self, loop: LoopThread) -> None:
        def asks() -> None:
            with pytest.raises(Unavailable, match="it is gone"):
                loop.run(echo, 1)
            loop.__exit__(None, None, None)

        in_a_child(asks)
        assert loop.run(echo, 5) == 5


class TestSignals:
    def test_calls_work_after_an_interrupt_anywhere(self, loop: LoopThread) -> None:
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

    def test_a_signal_handler_may_call_at_any_moment(self, loop: LoopThread) -> None:
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

    def test_an_interrupted_call_is_cancelled(self, loop: LoopThread) -> None:
        endless = Endless()
        with interrupted_when_it_waits():
            loop.run(endless.last)
        assert not endless.begun.is_set() or endless.cancelled.wait(PATIENCE_S)
        assert loop.run(echo, 5) == 5

    def test_an_interrupted_enter_is_cancelled(self, loop: LoopThread) -> None:
        @asynccontextmanager
        async def far() -> AsyncIterator[None]:
            await endless.last()
            yield

        endless = Endless()
        with interrupted_when_it_waits(), loop.holding(far()):
            raise AssertionError("it is not entered")
        assert not endless.begun.is_set() or endless.cancelled.wait(PATIENCE_S)
        assert loop.run(echo, 5) == 5

    def test_an_interrupted_exit_completes(self) -> None:
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

    def test_a_loop_that_was_not_woken_runs_the_call_soon(
        self, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        while not is_in(selectors.EpollSelector.select, loop._thread.ident):
            pass
        # As if the calling thread were interrupted right after it scheduled the call.
        monkeypatch.setattr(loop._loop, "_write_to_self", lambda: None)
        assert loop.run(echo, 5) == 5

    def test_an_interrupted_exit_of_the_loop_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
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


SNIFFIO = """
import asyncio, contextvars, threading
class AsyncLibraryNotFoundError(RuntimeError): pass
class ThreadLocal(threading.local): name = None
thread_local = ThreadLocal()
current_async_library_cvar = contextvars.ContextVar("library", default=None)
def current_async_library():
    if thread_local.name is not None:
        return thread_local.name
    try:
        if asyncio.current_task() is not None:
            return "asyncio"
    except RuntimeError: pass
    raise AsyncLibraryNotFoundError
"""
CALL = """
from forged.blocking.loop_thread import LoopThread
from forged.errors import Unavailable
async def echo(): return "answered"
with LoopThread("a loop", Unavailable("gone", "it is gone")) as loop:
    print(loop.run(echo))
"""


def test_calls_are_answered_where_sniffio_is_installed(tmp_path: Path) -> None:
    # It sees asyncio in tasks only, and anyio asks it.
    (tmp_path / "sniffio.py").write_text(SNIFFIO)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "answered\n", done.stderr
