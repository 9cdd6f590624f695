import os
import signal
from types import SimpleNamespace

import pytest
from training.two_processes import in_two_processes

from ddm_lightning.training.callbacks import StopOnRequest, StopRequested
from ddm_lightning.training.rolling import RollingCheckpoints


class Saves(RollingCheckpoints):
    def __init__(self, late=False):
        self.steps, self.late = [], late

    def is_late(self):
        return self.late

    def save(self, trainer):
        self.steps.append(trainer.global_step)

    def on_train_end(self, trainer, module):
        """Nothing is being written."""


def trainer_at(step, **settings):
    defaults = {"world_size": 1, "max_steps": 10, "should_stop": False, "limit_val_batches": 1.0, "global_rank": 0}
    found = SimpleNamespace(**{**defaults, "global_step": step, **settings})
    found.is_global_zero = found.global_rank == 0
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_between_steps_saves_at_the_end_of_the_step_and_stops_without_validating(number):
    saves = Saves()
    stop, trainer = StopOnRequest(saves), trainer_at(4)
    with stop.listening():
        stop.on_train_start(trainer, None)
        stop.on_train_batch_end(trainer, None)
        assert (saves.steps, trainer.should_stop) == ([], False)
        os.kill(os.getpid(), number)
        trainer.global_step = 5
        stop.on_train_batch_end(trainer, None)
        stop.on_train_end(trainer, None)
    assert saves.steps == [5]
    assert stop.stopped
    assert trainer.should_stop
    assert trainer.limit_val_batches == 0


def test_a_signal_in_the_last_step_does_not_keep_the_member_from_ending():
    stop, trainer = StopOnRequest(Saves()), trainer_at(10)
    with stop.listening():
        stop.on_train_start(trainer, None)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.on_train_batch_end(trainer, None)
    assert not stop.stopped


def test_ranks_ask_one_another_every_ten_steps(monkeypatch):
    asked, stop = [], StopOnRequest(Saves())
    monkeypatch.setattr(stop, "_agreed", lambda *flags: asked.append(step) or flags)
    stop._hosts = object()
    for step in range(1, 31):
        stop.on_train_batch_end(trainer_at(step), None)
    assert asked == [10, 20, 30]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_save_by_the_clock_of_rank_zero(late):
    def saved(rank):
        saves = Saves(late=rank == late)
        stop = StopOnRequest(saves)
        stop.on_train_start(trainer_at(0, world_size=2), None)
        for step in range(1, 21):
            stop.on_train_batch_end(trainer_at(step, world_size=2, global_rank=rank, max_steps=20), None)
        return saves.steps, stop.stopped

    assert in_two_processes(saved) == dict.fromkeys((0, 1), ([10, 20] if late == 0 else [], False))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_outside_of_the_steps_stops_at_once(number):
    stop = StopOnRequest(Saves())
    with pytest.raises(StopRequested), stop.listening():
        os.kill(os.getpid(), number)
    with pytest.raises(StopRequested), stop.listening():
        stop.on_train_start(trainer_at(0), None)
        stop.on_train_end(trainer_at(10), None)
        os.kill(os.getpid(), number)


def test_the_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    stop = StopOnRequest(Saves())
    with stop.listening():
        stop.on_train_start(trainer_at(0), None)
        assert signal.getsignal(signal.SIGINT) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
