"""The next minibatches of a source, which threads read while the training computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torchmn.cntk.readers.deserializer import Deserializer
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.minibatch_plan import MinibatchPlan, PlannedMinibatch, Progress, Request
from torchmn.cntk.readers.read_ahead import Chunks, Deferred, Threads
from torchmn.cntk.readers.streams import StreamInformation


@dataclass(frozen=True, eq=False)
class MinibatchInProgress:
    """A minibatch that is being read, and where the source is after it."""

    request: Request
    after: Progress
    minibatch: PlannedMinibatch
    streams: Future[dict[str, MinibatchData]] | Deferred[dict[str, MinibatchData]]


class MinibatchesAhead:
    """Reads the minibatches of a plan, and some more of what was asked for last. Local.

    In memory are the chunks of the blocks that these minibatches are from, and those of the next
    block as its turn comes near. A process that was forked begins with nothing read: threads do not
    survive a fork.

    Args:
        plan: says which minibatches there are.
        deserializer: has their sequences.
        streams: of the deserializer.
        seed: of the source, for random transforms.
        num_threads: that decode; 0: each minibatch is read when it is asked for.
    """

    def __init__(
        self,
        plan: MinibatchPlan,
        deserializer: Deserializer,
        streams: Sequence[StreamInformation],
        seed: int,
        num_threads: int,
    ) -> None:
        self._plan = plan
        self._deserializer = deserializer
        self._streams = streams
        self._seed = seed
        self._num_threads = num_threads
        self._begin_process()

    def first(self, progress: Progress, request: Request) -> MinibatchInProgress | None:
        """The minibatch at ``progress``, and begin to read those after it; None at the end."""
        self._notice_fork()
        if self._begun and self._begun[0].request != request:
            self.forget()
        self._begin(progress, request, at_least=max(self._num_ahead, 1))
        return self._begun[0] if self._begun else None

    def begin_another(self, progress: Progress, request: Request) -> None:
        """Begin to read one more, in place of the first one, which is there.

        What a later minibatch raises is left to the call that asks for it.
        """
        if self._num_ahead:
            with suppress(Exception):
                self._begin(progress, request, at_least=self._num_ahead + 1)

    def drop_first(self) -> None:
        """The first minibatch is done."""
        self._begun.popleft()

    def forget(self) -> None:
        """Drop all minibatches, as the next one is another."""
        self._notice_fork()
        for each in self._begun:
            each.streams.cancel()
        self._begun.clear()

    def close(self) -> None:
        """End the threads, and drop what they have read. A later call resumes."""
        self.forget()
        self._threads.close()
        self._loader.close()
        self._chunks.keep_only(())

    def stop(self) -> None:
        """Read each minibatch when it is asked for, from now on."""
        self.close()
        self._num_threads = self._num_ahead = 0

    def unread_copy(self) -> MinibatchesAhead:
        """The same with nothing read, for a copy of the source."""
        return MinibatchesAhead(
            self._plan, self._deserializer, self._streams, self._seed, self._num_threads
        )

    def _begin(self, progress: Progress, request: Request, at_least: int) -> None:
        """Begin to read minibatches until there are ``at_least`` some that were begun."""
        while len(self._begun) < at_least:
            before = self._begun[-1].after if self._begun else progress
            minibatch = self._plan.take(before, request)
            if minibatch is None:
                return
            after = before.after(minibatch)
            reader = minibatch.reader(request.num_partitions, request.partition)
            streams = self._start_reading(reader)
            self._begun.append(MinibatchInProgress(request, after, minibatch, streams))
            self._move_window(before)

    def _start_reading(
        self, reader: Callable[..., dict[str, MinibatchData]]
    ) -> Future[dict[str, MinibatchData]] | Deferred[dict[str, MinibatchData]]:
        read = partial(reader, self._streams, self._chunks, self._seed)
        return self._threads.run(read) if self._num_ahead else Deferred(read)

    def _move_window(self, progress: Progress) -> None:
        """Drop the chunks of blocks that are done, and read those of the next block in time."""
        if self._plan.keeps_all_chunks:
            return
        current = self._plan.chunk_ids(progress)
        used = {chunk for each in self._begun for chunk in each.minibatch.chunk_ids}
        used.update(current)
        ahead: tuple[int, ...] = ()
        if len(used) == len(current):
            ahead = self._plan.next_chunk_ids(progress)
        self._chunks.keep_only(used | set(ahead))
        if self._num_ahead:
            for chunk_id in sorted(set(ahead) - self._chunks_ahead):
                self._loader.run(partial(self._chunks.read_ahead, chunk_id))
            self._chunks_ahead.clear()
            self._chunks_ahead.update(ahead)

    def _notice_fork(self) -> None:
        """Leave what belongs to the threads of the process that this one was forked from."""
        if os.getpid() != self._process:
            self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._begun: deque[MinibatchInProgress] = deque()
        self._chunks_ahead: set[int] = set()
        self._num_ahead = self._num_threads and self._num_threads + 1
        self._chunks = Chunks(self._deserializer.get_chunk, repr(self._deserializer))
        self._threads = Threads(self._num_threads, "torchmn-decode")
        self._loader = Threads(1, "torchmn-read")
