"""A transport between threads of one process, each of which is a rank: what it takes to bring a third one."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from gluon_syncbn.exchange.waiting import Wait, WaitingTransport


class Post:
    """Where the ranks leave their parts for each other."""

    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.parts = defaultdict(dict)  # by label, then by rank
        self.gone = {}  # why, by rank
        self.sent = Counter()  # messages, by the kind of label


class ThreadTransport(WaitingTransport):
    def __init__(self, post, rank):
        super().__init__(rank, post.size)
        self._post = post

    def carry(self, label, message, ranks):
        identity, wait = tuple(label[:5]), Wait(self, label)
        with self._post.changed:
            parts = self._post.parts[identity]
            parts[self.rank] = message
            self._post.sent[label.kind] += len(ranks) - 1
            self._post.changed.notify_all()
            while True:
                missing = [rank for rank in ranks if rank not in parts]
                if not missing:
                    return [parts[rank] for rank in ranks]
                for rank in missing:
                    if rank in self._post.gone:
                        where = f"(rank {self.rank} was in {label})"
                        self.give_up(label, f"rank {rank} of {self.size} has failed: {self._post.gone[rank]} {where}")
                wait.poll(missing)
                self._post.changed.wait(0.01)

    def tell(self, reason):
        with self._post.changed:
            self._post.gone[self.rank] = reason
            self._post.changed.notify_all()

    def close(self):
        self._closed = True
