"""A TCP proxy before Redis that delays, cuts, or swallows replies, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading


class Proxy:
    """Listens on a free loopback port and forwards to ``target_port``.

    ``drop``: the probability that a reply is swallowed (its connection is then cut: the bytes behind it would answer the wrong command).
    ``delay``: seconds that each reply is held back, at most. ``refuse``: connections are accepted and cut at once.
    """

    def __init__(self, target_port: int, seed: int) -> None:
        self.target_port = target_port
        self.drop = 0.0
        self.delay = 0.0
        self.refuse = False
        self.dropped = 0
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="chaos-proxy", daemon=True)
        self._thread.start()
        self._up.wait()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._up.set()
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        both = (writer, up_writer)
        self._writers.update(both)
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, replies=False), self._pump(up_reader, writer, replies=True)
            )
        except (OSError, _CutError):
            pass
        finally:
            for one in both:
                self._writers.discard(one)
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            if replies and self.drop and self._random.random() < self.drop:
                self.dropped += 1
                raise _CutError
            if replies and self.delay:
                await asyncio.sleep(self._random.random() * self.delay)
            writer.write(data)
            await writer.drain()
        raise _CutError

    def cut(self, share: float = 1.0) -> None:
        """Cut that share of all connections."""

        def cut() -> None:
            for writer in [*self._writers]:
                if self._random.random() < share:
                    writer.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def close(self) -> None:
        """End the proxy and its thread."""

        async def end() -> None:
            self._server.close()
            for writer in [*self._writers]:
                writer.transport.abort()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(10)
        self._loop.close()


class _CutError(Exception):
    """The connection ends here."""
