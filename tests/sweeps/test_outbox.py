"""The queue before MLflow: it blocks nobody, tells once that the server fails, and sends everything once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest

from dpgcl_core.errors import TrackingError
from sweeps.service.running import outbox
from sweeps.service.running.outbox import Outbox, Patience, patiently
from trainers.tracking.mlflow_server import NoAnswer, server_errors

PATIENT = Patience(tries=3, seconds=300.0)


class Server:
    """Takes names while it is up, and can hang."""

    def __init__(self) -> None:
        self.is_up, self.taken, self.num_refused = True, list[str](), 0
        self.answers, self.refused = threading.Event(), threading.Event()
        self.answers.set()

    def send(self, name: str) -> None:
        self.answers.wait()
        if not self.is_up:
            self.num_refused += 1
            self.refused.set()
            raise TrackingError("MLflow at http://user:secret@host is away")
        self.taken.append(name)


@pytest.fixture
def server() -> Server:
    return Server()


def test_everything_is_sent_in_order_and_once(server: Server) -> None:
    said = list[str]()
    with Outbox(server.send, said.append, "here") as box:
        for name in "abcb":
            box.put(name)
        assert box.finish(PATIENT) == []
    assert server.taken in (["a", "b", "c"], ["a", "b", "c", "b"])  # the last, where it had been sent by then
    assert said == []


def test_server_that_comes_back_gets_everything_and_two_lines_say_so(server: Server) -> None:
    said, server.is_up = list[str](), False
    with Outbox(server.send, said.append, "here") as box:
        for name in "abc":
            box.put(name)
        server.refused.wait()
        server.is_up = True
        assert box.finish(PATIENT) == []
    assert server.taken == ["a", "b", "c"]
    assert said[0] == ("warning: MLflow at http://***@host is away; results are kept in here and sent later")
    assert said[-1] == "MLflow answers again, and has received the 3 results that waited"
    assert len([line for line in said if not line.startswith("waiting up to")]) == 2


def test_server_that_stays_away_is_told_once_and_given_up_after_the_tries(server: Server) -> None:
    said, server.is_up = list[str](), False
    with Outbox(server.send, said.append, "here") as box:
        box.put("a")
        box.put("b")
        assert box.finish(PATIENT) == ["a", "b"]
    assert server.num_refused >= PATIENT.tries
    assert sum(line.startswith("warning: ") for line in said) == 1


def test_server_that_hangs_blocks_neither_put_nor_the_end(server: Server) -> None:
    server.answers.clear()
    with Outbox(server.send, print, "here") as box:
        box.put("a")
        box.put("b")
        assert box.finish(Patience(tries=3, seconds=0.01)) == ["a", "b"]
    server.answers.set()


def test_server_that_is_slow_is_waited_for_as_long_as_it_takes_some() -> None:
    taken = list[str]()
    steps = threading.Semaphore(0)

    def send(name: str) -> None:
        steps.acquire()
        taken.append(name)

    with Outbox(send, print, "here") as box:
        for number in range(20):
            box.put(str(number))
        threading.Thread(target=lambda: [steps.release() for _ in range(20)]).start()
        assert box.finish(PATIENT) == []
    assert len(taken) == 20


@pytest.mark.parametrize("error", [KeyError("half a page"), ValueError("no JSON"), OSError(28, "no space")])
def test_no_error_ends_the_thread(error: Exception) -> None:
    calls, said = count(), list[str]()

    def send(name: str) -> None:
        if next(calls) == 0:
            raise error

    with Outbox(send, said.append, "here") as box:
        box.put("a")
        assert box.finish(PATIENT) == []
    assert said[0].startswith(f"warning: {type(error).__name__}: ")


def test_pauses_grow_while_the_server_fails_and_start_anew_after_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    waited = list[float]()
    box = Outbox(server.send, print, "here")

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        server.is_up = len(waited) % 4 == 0
        return False

    monkeypatch.setattr(box._retry_now, "wait", wait)
    with box:
        for name in "ab":
            server.is_up = False
            box.put(name)
            assert box.finish(PATIENT) == []
    assert waited == [1.0, 2.0, 4.0, 8.0] * 2


def test_start_is_tried_again_only_where_the_server_does_not_answer() -> None:
    said, slept, answers = list[str](), list[float](), iter([1, 1, 0])

    def call() -> str:
        if next(answers):
            error = NoAnswer("MLflow at http://host failed while connecting: Connection refused; try …")
            error.reason = "Connection refused"
            raise error
        return "connected"

    assert patiently(call, said.append, sleep=slept.append) == "connected"
    assert said == ["MLflow does not answer yet (Connection refused); trying again for a minute …"]
    assert len(slept) == 2

    def refuse() -> str:
        raise TrackingError("401")

    with pytest.raises(TrackingError, match="401"):
        patiently(refuse, said.append, sleep=lambda _: pytest.fail("tried again"))


def test_start_is_given_up_after_about_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    slept = list[float]()

    def refuse() -> None:
        raise NoAnswer("away")

    with pytest.raises(NoAnswer):
        patiently(refuse, print, sleep=slept.append)
    assert (len(slept), sum(slept)) == (outbox._START_TRIES - 1, 63.0)


@pytest.mark.parametrize(
    ("text", "later"),
    [
        ("HTTPConnectionPool(host='h', port=1): Read timed out. (read timeout=30)", True),
        ("[Errno 111] Connection refused", True),
        (
            "('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
            True,
        ),
        ("API request to endpoint /api failed with error code 503 != 200", True),
        ("FATAL:  the database system is starting up", True),
        ("API request to endpoint /api failed with error code 401 != 200", False),
        ("[Errno -2] Name or service not known", False),
    ],
)
def test_what_may_answer_later_is_told_from_what_refuses(text: str, later: bool) -> None:
    raised: Callable[[], None] = lambda: (_ for _ in ()).throw(OSError(text))  # noqa: E731
    with pytest.raises(TrackingError) as caught, server_errors("http://host", "asking"):
        raised()
    assert isinstance(caught.value, NoAnswer) == later
