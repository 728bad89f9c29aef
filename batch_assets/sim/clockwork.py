"""Virtual time, processes that can be stopped and killed, and the threads of each: everything runs in one real thread, in an order that
follows from the seed alone.

A thread of a simulated process is a greenlet, so that real code, deep inside a call, can be put aside in the middle of a put or between
a commit and its acknowledgement while all others go on. Nothing here knows what the processes do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from greenlet import getcurrent, greenlet

THREADS_MAX = 5_000  # in one history; more means that somebody starts processes without end


class CrashedError(BaseException):
    """Raised inside a process that is no more, wherever it is: no `except Exception` sees it, and no clean-up of it has an effect."""


class OvertimeError(Exception):
    """Virtual time has come to its limit; reaction: the history made no progress."""


@dataclass(eq=False, slots=True)
class Process:
    """One process of the simulated world. `rate` and `offset_s` are how its own clock goes."""

    name: str
    pid: int
    rate: float = 1.0
    offset_s: float = 0.0
    alive: bool = True
    exit_code: int | None = None
    stopped_until_s: float = 0.0
    on_notice: Callable[[], None] | None = None  # what SIGTERM does; None: it kills
    threads: "list[Thread]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Thread:
    """One thread of control; `wake` numbers its sleeps, so that an outdated alarm wakes nobody."""

    process: Process
    body: greenlet
    is_main: bool
    wake: int = 0


class Clockwork:
    """Runs threads in the order of their alarms. `failed` gets whatever a thread raises that is not a crash."""

    def __init__(self, *, failed: Callable[[Process, Exception], None]) -> None:
        self.now_s = 0.0
        self._failed = failed
        self._alarms: list[tuple[float, int, Thread | Callable[[], None], int]] = []
        self._numbers = count()
        self._pids = count(100)
        self._threads: dict[greenlet, Thread] = {}
        self._hub = getcurrent()

    # --- what processes see -------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Process | None:
        """Whose code runs; None for what nobody's does (a put that arrives late)."""
        thread = self._threads.get(getcurrent())
        return thread.process if thread is not None else None

    def clock_of(self, process: Process) -> Callable[[], float]:
        """The process's own monotonic clock."""
        return lambda: process.offset_s + self.now_s * process.rate

    def sleep(self, seconds: float) -> None:
        """Of the calling thread, by its process's clock."""
        thread = self._threads[getcurrent()]
        self.require_alive()
        self._alarm(thread, self.now_s + max(0.0, seconds) / thread.process.rate)
        self._hub.switch()

    def require_alive(self) -> None:
        """Raises CrashedError in a process that was killed: nothing that it still does on its way out may have an effect."""
        process = self.current
        if process is not None and not process.alive:
            raise CrashedError(process.name)

    # --- what happens to processes ------------------------------------------------------------------------------------------------

    def start(self, name: str, body: Callable[[Process], None], *, rate: float = 1.0, offset_s: float = 0.0) -> Process:
        """A process; it ends when `body` does, and its other threads with it."""
        process = Process(name, next(self._pids), rate=rate, offset_s=offset_s)
        self._spawn(process, lambda: body(process), is_main=True)
        return process

    def thread(self, process: Process, body: Callable[[], None]) -> None:
        """One more thread of a process."""
        self._spawn(process, body, is_main=False)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Something that happens in nobody's name; it does not sleep."""
        heappush(self._alarms, (self.now_s + seconds, next(self._numbers), act, 0))

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long: none of its threads runs, and time goes on without it."""
        process.stopped_until_s = max(process.stopped_until_s, self.now_s + seconds)

    def kill(self, process: Process, *, exit_code: int = -9) -> None:
        """SIGKILL. The caller's own process is killed by raising CrashedError."""
        if not process.alive:
            return
        process.alive, process.exit_code, process.stopped_until_s = False, exit_code, 0.0
        current = self._threads.get(getcurrent())
        for thread in process.threads:
            if thread is not current:
                self._alarm(thread, self.now_s)
        if current is not None and current.process is process:
            raise CrashedError(process.name)

    def notice(self, process: Process) -> None:
        """SIGTERM."""
        if process.on_notice is None:
            self.kill(process, exit_code=-15)
        elif process.alive:
            process.on_notice()

    # --- time ---------------------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], *, limit_s: float) -> None:
        """Lets time go on until the condition holds. Raises OvertimeError at `limit_s`, or when nobody has anything left to do."""
        while not until():
            if not self._alarms or self._alarms[0][0] > limit_s:
                raise OvertimeError(f"{self.now_s:.1f} s")
            self._step()

    def close(self) -> None:
        """Kills everybody that is left."""
        for process in {id(thread.process): thread.process for thread in self._threads.values()}.values():
            self.kill(process)
        while self._threads:
            self._step()

    def _step(self) -> None:
        at_s, _, who, wake = heappop(self._alarms)
        self.now_s = max(self.now_s, at_s)
        if not isinstance(who, Thread):
            who()
        elif who.wake != wake or who.body.dead:
            return
        elif who.process.stopped_until_s > self.now_s:
            self._alarm(who, who.process.stopped_until_s)
        elif who.process.alive:
            who.body.switch()
        elif who.body:
            who.body.throw(CrashedError(who.process.name))
        else:
            self._forget(who)  # killed before it ran

    def _alarm(self, thread: Thread, at_s: float) -> None:
        thread.wake += 1
        heappush(self._alarms, (at_s, next(self._numbers), thread, thread.wake))

    def _spawn(self, process: Process, body: Callable[[], None], *, is_main: bool) -> None:
        assert len(self._threads) < THREADS_MAX, "processes are started without end"
        thread = Thread(process, greenlet(lambda: self._live(thread, body), self._hub), is_main)
        process.threads.append(thread)
        self._threads[thread.body] = thread
        self._alarm(thread, self.now_s)

    def _live(self, thread: Thread, body: Callable[[], None]) -> None:
        exit_code = 0
        try:
            body()
        except CrashedError:
            pass
        except Exception as error:  # noqa: BLE001  the end of the process; who watches decides whether it may end so
            exit_code = 1
            self._failed(thread.process, error)
        finally:
            self._forget(thread)
        if thread.process.alive and (thread.is_main or exit_code):
            self._end(thread.process, exit_code)

    def _end(self, process: Process, exit_code: int) -> None:
        process.alive, process.exit_code = False, exit_code
        for thread in process.threads:
            self._alarm(thread, self.now_s)

    def _forget(self, thread: Thread) -> None:
        thread.process.threads.remove(thread)
        del self._threads[thread.body]
