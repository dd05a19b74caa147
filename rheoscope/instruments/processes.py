"""Processes that share one measurement, as `torchrun` starts them: who reads what, and how their sums become one.

Every process reads whole batches of the one-process run, so that each batch gives the same numbers. After a pass the
states are merged by process 0 and handed back to all, which then do the same with them. States are float64 in CPU
memory, whatever the model runs on, so they travel by gloo. What they travel as are plain arrays.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rheoscope.errors import RheoscopeError, first_line
from rheoscope.instruments.partial import set_aside
from rheoscope.stats import restore, state_of, take_in

BEAT = 2.0  # seconds between two signs of life
PATIENCE = 120.0  # seconds without one after which a process counts as gone
TRANSFER = timedelta(minutes=10)  # for one array to arrive
PACK = 2**26  # bytes of arrays that travel together, at least
FAILED = "failed"


class Ended(RheoscopeError):  # noqa: N818 - it is what happened
    """Another process of the run has failed or is gone, and has said so itself if it could."""


@dataclass
class Processes:
    """One of `size` processes that share a measurement. Without a store: the only one."""

    rank: int = 0
    size: int = 1
    store: dist.Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, n_batches: int) -> range:
        """The batches that this process reads, in one stretch."""
        return range(n_batches * self.rank // self.size, n_batches * (self.rank + 1) // self.size)

    def agree(self, key: Mapping[str, Any]) -> None:
        """Raise RheoscopeError where this process measures something else than process 0."""
        if self.size == 1:
            return
        if self.first:
            self.store.set("key", json.dumps(key))
        self._wait_for("key", of=0)
        held = json.loads(self.store.get("key"))
        other = sorted(name for name in key if held.get(name) != key[name])
        if other:
            raise RheoscopeError(
                f"process {self.rank} measures something else than process 0 (it differs in {', '.join(other)}): "
                "give all processes the same model, text and options"
            )

    def told(self, name: str, value: int) -> int:
        """The value that process 0 has, which may have measured its machine a little differently."""
        if self.size == 1:
            return value
        if self.first:
            self.store.set(name, str(value))
        self._wait_for(name, of=0)
        return int(self.store.get(name))

    def merge(self, readers: Sequence[object], *, number: int, idle: Callable[[], None]) -> None:
        """What all processes have gathered in pass `number`, in the readers of each; `idle` while others still read."""
        if self.size == 1:
            return
        parts = dict(enumerate(readers))
        with _explained():
            if self.first:
                ready = [f"ready {number} {other}" for other in range(1, self.size)]
                if not self.store.check(ready):
                    idle()
                for other in range(1, self.size):
                    self._wait_for(ready[other - 1], of=other)
                    self.store.set(f"turn {number} {other}", "")
                    take_in(parts, dict(_received(lambda array, other=other: dist.recv(array, other))))
                self.store.set(f"merged {number}", "")
                _handed_on(state_of(parts), lambda array: dist.broadcast(array, 0))
            else:
                self.store.set(f"ready {number} {self.rank}", "")
                if not self.store.check([f"turn {number} {self.rank}"]):
                    idle()
                self._wait_for(f"turn {number} {self.rank}", of=0)
                _handed_on(state_of(parts), lambda array: dist.send(array, 0))
                self._wait_for(f"merged {number}", of=0)
                restore(parts, dict(_received(lambda array: dist.broadcast(array, 0))))

    def fail(self) -> bool:
        """Tells the others that this process fails. Returns whether it is the first to, whose sentence is printed."""
        if self.size == 1:
            return True
        try:
            return self.store.add(FAILED, 1) == 1
        except RuntimeError:  # the store is gone with the process that held it
            return False

    def look(self) -> None:
        """Raise Ended where another process has failed."""
        if self.size > 1 and self.store.check([FAILED]):
            raise Ended("another process of this run has failed")

    def written(self) -> None:
        """Process 0 says that the run is written; the others wait for that, so that none drops its state too early."""
        if self.size == 1:
            return
        if not self.first:
            self._wait_for("written", of=0)
            self.store.add("known", 1)
            return
        self.store.set("written", "")
        until = time.monotonic() + PATIENCE  # it may hold the store, which the others need until they know
        while self.store.add("known", 0) < self.size - 1 and time.monotonic() < until:
            self.look()
            time.sleep(0.02)

    def _wait_for(self, name: str, *, of: int) -> None:
        self._wait(lambda: self.store.check([name]), of=of)

    def _wait(self, arrived: Callable[[], bool], *, of: int | None) -> None:
        """Returns when something has arrived; raises Ended where a process has failed, or gives no sign of life."""
        heard, beat = time.monotonic(), None
        while not arrived():
            self.look()
            now = self.store.get(f"beat {of}") if of is not None and self.store.check([f"beat {of}"]) else beat
            if now != beat:
                heard, beat = time.monotonic(), now
            if time.monotonic() - heard > PATIENCE:
                raise Ended(f"process {of} has given no sign of life for {PATIENCE:.0f} s")
            time.sleep(0.02)


@contextmanager
def joined() -> Iterator[Processes]:
    """This process among those that torchrun, or whoever set its variables, has started."""
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size, timeout=TRANSFER
        )
    except (ValueError, RuntimeError) as error:
        raise RheoscopeError(
            f"the processes of this run do not find one another ({first_line(error)}): start them by torchrun"
        ) from error
    processes, over = Processes(rank, size, dist.PrefixStore("rheoscope", store)), threading.Event()
    heart = _Heart(processes, over)
    for work in (heart.beat, heart.watch):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield processes
    finally:
        over.set()
        dist.destroy_process_group()


@dataclass
class _Heart:
    """Signs of life of a process, and an end to it where they no longer go through."""

    processes: Processes
    over: threading.Event
    beats: int = 0

    def beat(self) -> None:
        """A sign now and then, until the run is over."""
        while not self.over.wait(BEAT):
            try:
                self.processes.store.set(f"beat {self.processes.rank}", str(self.beats))
            except RuntimeError:  # the store is gone, as whoever waits for the others will find
                return
            self.beats += 1

    def watch(self) -> None:
        """Ends the process where the network is gone: whatever asks the store then would wait for many minutes."""
        missed, seen = 0, self.beats
        while not self.over.wait(BEAT):
            missed, seen = (missed + 1 if seen == self.beats else 0), self.beats
            if missed * BEAT > PATIENCE:
                where = f"process {self.processes.rank} of {self.processes.size}"
                print(f"rheoscope: {where}: the others have been out of reach for {PATIENCE:.0f} s", file=sys.stderr)
                os._exit(2)


def _handed_on(state: Iterator[tuple[str, np.ndarray]], give: Callable[[torch.Tensor], Any]) -> None:
    """Gives a state away in packs of arrays: the length of a pack's description, the description, the bytes."""
    for pack in _packs(state):
        about = json.dumps([[name, array.dtype.str, array.shape] for name, array in pack]).encode()
        give(torch.tensor([len(about)]))
        give(_tensor(np.frombuffer(about, np.uint8)))
        give(_tensor(np.concatenate([_bytes(array) for _, array in pack])))
    give(torch.tensor([0]))


def _received(take: Callable[[torch.Tensor], Any]) -> Iterator[tuple[str, np.ndarray]]:
    """What another process gives away, array by array."""
    while True:
        length = torch.zeros(1, dtype=torch.int64)
        take(length)
        if not length.item():
            return
        about = np.empty(length.item(), np.uint8)
        take(_tensor(about))
        pack = [(name, np.empty(shape, np.dtype(dtype))) for name, dtype, shape in json.loads(about.tobytes())]
        together = np.empty(sum(array.nbytes for _, array in pack), np.uint8)
        take(_tensor(together))
        start = 0
        for name, array in pack:
            _bytes(array)[:] = together[start : start + array.nbytes]
            start += array.nbytes
            yield name, set_aside(array)


def _packs(state: Iterator[tuple[str, np.ndarray]]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Arrays in groups of about PACK bytes: thousands of small ones would wait for the connection one by one."""
    pack, size = [], 0
    for name, array in state:
        pack.append((name, np.ascontiguousarray(array).reshape(array.shape)))
        size += array.nbytes
        if size >= PACK:
            yield pack
            pack, size = [], 0
    if pack:
        yield pack


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@contextmanager
def _explained() -> Iterator[None]:
    """A block in which a connection that breaks off is another process's end."""
    try:
        yield
    except RuntimeError as error:
        raise Ended("the connection to another process of this run has broken off") from error
