"""A wire that takes its time, and looks after what is on it.

`SlowWire` stands before the transport of a virtual rank. A message travels in a thread of its own and is there
`seconds` later, whatever the rank does meanwhile. While it travels::

    the buffer that will be filled     holds nothing but NaN, and still does when the message comes: nobody wrote to it
    the buffer that was sent           holds what it held: nobody wrote to it
    both                               share no memory with anything else that travels

Whoever reads too early computes with NaN. What is wrong is kept in `wrong`. `under` says of each message that was
waited for whether anything was `computed`, as its rank counts it, between its posting and that wait.
"""

import queue
import threading
import time
from collections import defaultdict

import torch

from attnspan.transports import Pending, Wrapped
from tests.pace import stretched

POISON = 0xFF  # as every byte of a float: NaN


class Mail:
    """What all ranks of one run share: a queue for each pair of them."""

    def __init__(self):
        self.boxes, self.lock = defaultdict(queue.Queue), threading.Lock()

    def box(self, source, target):
        with self.lock:
            return self.boxes[source, target]


class SlowWire(Wrapped):
    """A transport on which keys and gradients take ``seconds``, under way in a thread; the rest goes as before."""

    def __init__(self, transport, mail, seconds, only=("keys", "gradients")):
        super().__init__(transport)
        self.mail, self.seconds, self.only = mail, seconds, only
        self.wrong, self.computed, self.under, self._flying = [], 0, [], []

    def _post(self, sends, receives, what):
        if what not in self.only:
            return self.transport._post(sends, receives, what)
        spans = [span(tensor) for _, tensor in (*sends, *receives)]
        self._claim(spans, what)
        sent = [(tensor, tensor.clone()) for _, tensor in sends]
        for (peer, _), (_, copy) in zip(sends, sent, strict=True):
            self.mail.box(self.rank, peer).put(copy)
        for _, tensor in receives:
            raw(tensor).fill_(POISON)
        boxes = [self.mail.box(peer, self.rank) for peer, _ in receives]
        thread = threading.Thread(target=self._travel, args=(sent, receives, boxes, what), daemon=True)
        thread.start()
        before = self.computed

        def land():
            self.under.append(self.computed > before)
            thread.join()
            self._flying = [each for each in self._flying if each not in spans]

        return Pending(land)

    def _travel(self, sent, receives, boxes, what):
        time.sleep(self.seconds)
        self.wrong += [f"{what}: a buffer was written to while it was sent" for x, was in sent if not same(x, was)]
        for (_, tensor), box in zip(receives, boxes, strict=True):
            message = box.get(timeout=stretched(30))
            if bool((raw(tensor) != POISON).any()):
                self.wrong.append(f"{what}: a buffer was written to before its message came")
            raw(tensor).copy_(raw(message))

    def _claim(self, spans, what):
        if any(one[0] < other[1] and other[0] < one[1] for one in spans for other in self._flying):
            self.wrong.append(f"{what}: a buffer that is under way was posted again")
        self._flying += spans


def raw(tensor):
    return tensor.view(-1).view(torch.uint8)


def same(one, other):
    return torch.equal(raw(one), raw(other))


def span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
