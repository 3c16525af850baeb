"""Feed the dashboard from sequences that grow, share and end, without an engine.

A tick changes about as many blocks as it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import zlib

import numpy as np
from support.server.block_cells import pack_cell

from appliance.events import (
    NO_OWNER,
    BlockRun,
    Delta,
    Event,
    Info,
    Machine,
    Quantiles,
    Sequences,
    Snapshot,
    Stats,
    encode_event,
)
from appliance.stats import EngineStats, SequenceView, StepView

FREE = pack_cell(0, 0, 0, NO_OWNER)
CACHED = pack_cell(1, 0, 0, NO_OWNER)
BLOCK_SIZE = 16


class SyntheticEngine:
    """Blocks and sequences of an engine that is never idle.

    Args:
        num_blocks: physical blocks.
        num_sequences: that run at any time.
        changes: blocks that change in a tick, on average.
        seed: of everything random.
    """

    def __init__(self, num_blocks: int, num_sequences: int, changes: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._num_sequences = num_sequences
        self._changes = changes
        self.cells = np.full(num_blocks, FREE, dtype=np.uint32)
        self._told = self.cells.copy()
        self._blocks: dict[int, list[int]] = {}  # of a slot
        self._born: dict[int, tuple[str, float]] = {}  # request id and time of a slot
        self._next_request = 0
        self._tokens = [0, 0]  # prompt, generated
        self._shared = list(range(num_blocks // 32))  # a prefix that many use
        for slot in range(1, num_sequences + 1):
            self._begin(slot)
        for _ in range(60):
            self.tick()

    def tick(self) -> Delta:
        """Advance by a fifth of a second; return the changes."""
        quota = self._changes
        while quota > 0:
            slot = self._random.randint(1, self._num_sequences)
            blocks = self._blocks[slot]
            if len(blocks) > 1.5 * self.cells.size / self._num_sequences:
                quota -= len(blocks) // 8
                self._end(slot)
                self._begin(slot)
                continue
            grown = min(quota, self._random.choice((1, 2, 4, 16, 32)))
            self._take(slot, grown)
            quota -= grown
        return self._delta()

    def snapshot(self) -> Snapshot:
        """Return the whole map."""
        return Snapshot.of(1, BLOCK_SIZE, self.cells.astype("<u4").tobytes())

    def sequences(self) -> Sequences:
        now = time.time()
        return Sequences(
            sequences=tuple(
                SequenceView(
                    request_id=self._born[slot][0],
                    index=0,
                    slot=slot,
                    owner=("anna", "codex", "home-assistant")[slot % 3],
                    status="running",
                    prompt_tokens=900 + 37 * slot,
                    cached_tokens=16 * (slot % 5) * 8,
                    output_tokens=BLOCK_SIZE * len(blocks),
                    blocks=len(blocks),
                    computed_tokens=BLOCK_SIZE * len(blocks),
                    tokens_per_second=30 + slot + self._random.random(),
                    age_seconds=now - self._born[slot][1],
                )
                for slot, blocks in sorted(self._blocks.items())
            )
        )

    def info(self) -> Info:
        return Info(
            version="0.1.0", model="Synthetic-8B", state="ready", device="cpu", backend="none",
            weight_format="4-bit packed (g32)", kv_format="int8", context_length=32768,
            block_size=BLOCK_SIZE, num_blocks=self.cells.size, max_num_seqs=32,
            weight_bytes=5 * 2**30, kv_bytes=8 * 2**30, memory_bytes=24 * 2**30,
            precisions=("int8",),
        )  # fmt: skip

    def stats(self) -> Stats:
        """Return numbers that wander."""
        states = self.cells & np.uint32(0xF)
        active = int(np.count_nonzero(states == 2))
        around = self._random.uniform
        return Stats(
            time=time.time(),
            uptime_seconds=time.monotonic(),
            engine=EngineStats(
                steps_total=int(time.monotonic() * 40),
                running=self._num_sequences,
                prefix_queries_total=100_000,
                prefix_hits_total=int(71_000 * around(0.99, 1.01)),
                blocks_total=self.cells.size,
                blocks_active=active,
                blocks_cached=int(np.count_nonzero(states == 1)),
                blocks_free=int(np.count_nonzero(states == 0)),
                blocks_shared=len(self._shared),
                block_size=BLOCK_SIZE,
                kv_host_blocks=self._random.randint(400, 500),
                kv_host_swapped=self._random.randint(300, 400),
                kv_host_capacity=4096,
                kv_tokens=int(active * BLOCK_SIZE * 0.97),
                step_prefill_tokens=self._random.choice((0, 128, 384, 512)),
                step_decode_tokens=self._num_sequences,
                step_seconds=around(0.02, 0.03),
                model_seconds=around(0.015, 0.02),
            ),
            requests_running=self._num_sequences,
            requests_waiting=self._random.randint(0, 4),
            requests_finished=self._next_request,
            requests_failed=0,
            prompt_tokens_per_second=around(800, 1600),
            generation_tokens_per_second=around(500, 800),
            time_to_first_token=Quantiles(p50=around(0.1, 0.2), p90=0.4, p99=0.9, count=50),
            inter_token_latency=Quantiles(p50=around(0.02, 0.03), p90=0.04, p99=0.06, count=900),
            end_to_end=Quantiles(p50=around(8, 10), p90=14.0, p99=20.0, count=40),
            queue_wait=Quantiles(p50=around(0.0, 0.01), p90=0.2, p99=0.5, count=50),
            steps=tuple(
                StepView(at, self._random.choice((0, 128, 384)), self._num_sequences, 24, 0.025)
                for at in range(40)
            ),
            machine=Machine(cpu_cores=16, cpu_used=around(5, 9), engine_rss_bytes=6 * 2**30),
        )

    def _begin(self, slot: int) -> None:
        self._next_request += 1
        self._born[slot] = (f"chatcmpl-{self._next_request:06d}", time.time())
        self._blocks[slot] = []
        for block in self._shared[: len(self._shared) * (slot % 3) // 2]:
            self.cells[block] = pack_cell(2, 0, 8 + slot % 3, slot)

    def _take(self, slot: int, count: int) -> None:
        empty = np.flatnonzero((self.cells & np.uint32(0xF)) < 2)
        if empty.size < count:
            return
        first = self._random.randrange(empty.size - count + 1)
        taken = empty[first : first + count]
        self.cells[taken] = pack_cell(2, 0, 1, slot)
        self._blocks[slot] += taken.tolist()

    def _end(self, slot: int) -> None:
        self.cells[self._blocks[slot]] = CACHED

    def _delta(self) -> Delta:
        changed = np.flatnonzero(self.cells != self._told)
        runs: list[BlockRun] = []
        for block, cell in zip(changed.tolist(), self.cells[changed].tolist(), strict=True):
            last = runs[-1] if runs else None
            if last and last.start + last.length == block and last.cell == cell:
                runs[-1] = BlockRun(last.start, last.length + 1, cell)
            else:
                runs.append(BlockRun(block, 1, cell))
        self._told = self.cells.copy()
        return Delta(epoch=1, runs=tuple(runs))


class FeedServer:
    """An HTTP server on loopback that sends the feed to every client."""

    def __init__(self, engine: SyntheticEngine, ticks_per_second: float) -> None:
        self._engine = engine
        self._period = 1 / ticks_per_second
        self._writers: dict[asyncio.StreamWriter, zlib._Compress] = {}
        self.ticks = self.changed_blocks = 0
        self.port = 0

    async def __aenter__(self) -> FeedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            events: list[Event] = [self._engine.tick(), self._engine.sequences()]
            assert isinstance(events[0], Delta)
            self.changed_blocks += sum(run.length for run in events[0].runs)
            if self.ticks % round(1 / self._period) == 0:
                events.append(self._engine.stats())
            self.ticks += 1
            self._send(self._writers, events)
            due += self._period
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ended):
            request = await reader.readuntil(b"\r\n\r\n")
            if not request.startswith(b"GET /admin/v1/events "):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                writer.close()
                return
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            engine = self._engine
            packer = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)
            first: list[Event] = [
                engine.info(),
                engine.snapshot(),
                engine.sequences(),
                engine.stats(),
            ]
            self._send({writer: packer}, first)
            self._writers[writer] = packer
            await reader.read()
        self._writers.pop(writer, None)
        writer.close()

    @staticmethod
    def _send(writers: dict[asyncio.StreamWriter, zlib._Compress], events: list[Event]) -> None:
        frames = b"".join(map(encode_event, events))
        for writer, packer in writers.items():
            packed = packer.compress(frames) + packer.flush(zlib.Z_SYNC_FLUSH)
            writer.write(b"%x\r\n%s\r\n" % (len(packed), packed))
