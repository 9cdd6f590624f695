import os
import signal
import threading
import time

import pytest

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.reading import one_ahead


def test_one_item_and_no_more_is_made_while_the_caller_works_on_the_last():
    begun = [threading.Event() for _ in range(4)]

    def items():
        for number, event in enumerate(begun):
            event.set()
            yield number

    ahead = one_ahead(items())
    assert next(ahead) == 0
    assert begun[1].wait(10) and not begun[2].wait(0.05)
    assert next(ahead) == 1
    assert begun[2].wait(10) and not begun[3].wait(0.05)
    assert list(ahead) == [2, 3]


def test_an_error_comes_in_its_place():
    def items():
        yield from (0, 1)
        raise UserError("sample 'c' is wrong")

    ahead = one_ahead(items())
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(UserError, match="sample 'c' is wrong"):
        next(ahead)


def test_ctrl_c_does_not_wait_for_a_slow_source_and_no_thread_is_left():
    answers = threading.Event()

    def items():
        yield 0
        os.kill(os.getpid(), signal.SIGINT)
        yield answers.wait(60)

    before, start = set(threading.enumerate()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(one_ahead(items()))
    assert time.monotonic() - start < 30
    (reader,) = {thread for thread in threading.enumerate() if thread.name.startswith("read")} - before
    assert reader.daemon, "otherwise the end of the program waits for it"
    answers.set()
    reader.join(60)
    assert not reader.is_alive()
