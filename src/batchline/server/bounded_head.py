"""uvicorn's HTTP protocol with a bound on a request's head: its first line and its headers.

The parser adds piece to piece until the head is whole. One without end, which anybody can send, key or none, would take
memory and, ever slower, the event loop from all others.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHeadProtocol(HttpToolsProtocol):
    """Ends a connection whose request's head is longer than `MAX_HEAD_BYTES` and still not whole."""

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        super().on_headers_complete()
