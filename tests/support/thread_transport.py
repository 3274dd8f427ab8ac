"""A transport between threads of one process, each of which is a rank: what it takes to bring another one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gluon_syncbn import _native
from gluon_syncbn.exchange.base import Transport
from gluon_syncbn.exchange.bridge import readers_of


class ThreadTransport(Transport):
    """``handles`` has those of all ranks, whose list all of them share."""

    def __init__(self, handles, rank, size):
        super().__init__(rank, size)
        self._handles = handles

    def open(self, handle):
        super().open(handle)
        self._handles.append(handle)
        if self.size > 1:
            threading.Thread(target=self._carry, name=f"carrier of rank {self.rank}", daemon=True).start()

    def _carry(self):
        for message in iter(partial(_native.next_message, self.handle, 1.0), None):
            for reader in readers_of(message) if message else ():
                _native.deliver(self._handles[reader], len(message), message)


def everywhere(stores, work):
    """``work(store)`` in a thread for the store of each rank; what it returns or raises, in their order."""
    with ThreadPoolExecutor(len(stores)) as pool:
        jobs = [pool.submit(work, store) for store in stores]
        return [job.exception() or job.result() for job in jobs]
