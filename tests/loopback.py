"""A web server on a free port of loopback that takes what is posted to it, for tests that stand at its end."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Loopback:
    """`answer(handler, body)` sees each POST in a thread of its own, and says what is to be said."""

    def __init__(
        self, answer: Callable[[BaseHTTPRequestHandler, bytes], None], *, wait_for_answers: bool = False
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answer(self, self.rfile.read(int(self.headers["content-length"])))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = not wait_for_answers
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
