"""A request to stop, in trainings of a few steps."""

import math
import os
import signal
from types import SimpleNamespace

import lightning as L
import pytest
from torch.utils.data import DataLoader
from training.members import Recorder, batch, expert
from training.two_processes import in_two_processes, trainer_of

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.processes import on_stop_signal
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.training import callbacks
from ddm_lightning.training.callbacks import RollingCheckpoints, StopOnRequest, StopRequested
from ddm_lightning.training.module import MemberModule

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*trainable parameters.*:UserWarning"),
]


class Told(L.Callback):
    """Sends a signal to this process within a step, and counts validations."""

    def __init__(self, number=None, step=None):
        self.number = number
        self.step = step
        self.num_validations = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)

    def on_validation_start(self, trainer, module):
        self.num_validations += 1


def train(folder, told, rank=None, max_steps=10, every=1000, **island):
    """Train up to ``max_steps``, validating ``every`` so many: the step it ends at, and the stopping callback."""
    island = IslandConfig(checkpoint_every_n_steps=1000, validate_every_n_steps=every, **island)
    stop = StopOnRequest(RollingCheckpoints(folder, island, {}))
    trainer = trainer_of(
        rank,
        max_steps=max_steps,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        callbacks=[stop.checkpoints, stop, told],
    )
    loader = DataLoader([batch()] * 100, batch_size=None)
    with on_stop_signal(stop.request):
        trainer.fit(MemberModule(expert(Recorder())), loader, DataLoader([batch()], batch_size=None))

    return trainer.global_step, trainer.should_stop


def saved(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_between_steps_saves_at_the_end_of_the_step_and_stops_without_validating(tmp_path, number):
    told = Told(number, 5)
    step, stopped = train(tmp_path, told, every=3)

    assert (step, stopped, saved(tmp_path)) == (6, True, [3, 6])
    assert told.num_validations == 1  # at step 3, and none at 6


def test_a_signal_in_the_last_step_does_not_keep_the_member_from_ending(tmp_path):
    step, stopped = train(tmp_path, Told(signal.SIGTERM, 9))
    assert (step, stopped) == (10, False)


def test_ranks_wait_for_one_another_in_the_last_validation_too(tmp_path, monkeypatch):
    asked = []
    agreed = StopOnRequest._agreed
    monkeypatch.setattr(StopOnRequest, "_agreed", lambda *given: asked.append(given) or agreed(*given))
    train(tmp_path, Told(), max_steps=4, every=4)

    assert len(asked) == 4 + 1  # at each step, and at the held-out batch


@pytest.mark.parametrize("rank_told", [0, 1])
def test_ranks_stop_together_at_the_tenth_step(tmp_path, rank_told):
    def task(rank):
        told = Told(signal.SIGTERM, 4) if rank == rank_told else Told()
        step, stopped = train(tmp_path, told, rank, max_steps=20)
        return step, stopped

    assert in_two_processes(task) == dict.fromkeys((0, 1), (10, True))
    assert saved(tmp_path) == [10]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_save_by_the_clock_of_rank_zero(tmp_path, late):
    def task(rank):
        minutes = 1e-9 if rank == late else None
        own = {"checkpoint_every_n_minutes": minutes, "keep_checkpoints": 9}
        return train(tmp_path, Told(), rank, max_steps=25, **own)[0]

    assert in_two_processes(task) == dict.fromkeys((0, 1), 25)
    assert saved(tmp_path) == ([10, 20, 25] if late == 0 else [25])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_outside_of_the_steps_stops_at_once(tmp_path, number):
    stop = StopOnRequest(RollingCheckpoints(tmp_path, IslandConfig(), {}))
    with pytest.raises(StopRequested), on_stop_signal(stop.request):
        os.kill(os.getpid(), number)


def test_the_signals_are_given_back(tmp_path):
    before = [signal.getsignal(number) for number in SIGNALS]
    train(tmp_path, Told(), max_steps=2)

    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_after_a_resume_speed_counts_this_start_and_time_all_of_them(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=500.0)
    monkeypatch.setattr(callbacks, "time", clock)
    status = MemberStatus("expert-0", 100, step=40, seconds=1000.0, samples_per_second=3.0)
    trainer = SimpleNamespace(global_step=40, is_global_zero=True)
    module = SimpleNamespace(
        member=SimpleNamespace(batch_size=16), averages={"train/loss": 0.5, "train/norm": math.inf}
    )
    module.logs_now = lambda: True
    module.log_curves = lambda: None
    reporter = callbacks.Reporter(tmp_path, status, show=False)
    reporter.on_train_start(trainer, module)
    for trainer.global_step, clock.now, speed in ((40, 504.0, 3.0), (50, 505.0, 32.0), (70, 520.0, 24.0)):
        reporter.on_train_batch_end(trainer, module)
        written = MemberStatus.read(tmp_path, "expert-0", 100)
        found = (written.step, written.seconds, written.samples_per_second)
        assert found == (trainer.global_step, 500.0 + clock.now, speed)

    assert written.metrics == {"train/loss": 0.5}

    reporter.on_train_end(trainer, module)
