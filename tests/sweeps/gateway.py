"""A port before a server, which can hang: it accepts connections and never answers, until it is told to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

PASS, HANG, SLOW = "pass", "hang", "slow"
_SECONDS_OF_AN_ANSWER = 0.3


class Gateway:
    """Passes on what comes to a port of 127.0.0.1; use it as a context manager.

    Args:
      target: the port that it passes on to.

    Attributes:
      port: its own.
      num_held: pieces of requests and answers that it did not pass on, for it hung.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._mode, self._changed = PASS, threading.Condition()
        self.num_held = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._listener.close()

    def be(self, mode: str) -> None:
        """Passes on at once, late, or not at all."""
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(2**16):
                self._wait()
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _wait(self) -> None:
        with self._changed:
            if self._mode == SLOW:
                self._changed.wait(_SECONDS_OF_AN_ANSWER)
            if self._mode == HANG:
                self.num_held += 1
                self._changed.wait_for(lambda: self._mode != HANG)
