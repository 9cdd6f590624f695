#!/usr/bin/env bash
# TensorBoard: event files of a run are read in the order of their names, which begin with the writer's clock.
#
# One would expect  a second process that goes on with a run to append to its curve, and `purge_step` to tell the reader
#                   where the new part begins.
# What happens      if the second machine's clock is an hour behind, its file sorts first: the curve shows steps 6 to 10,
#                   then 1 to 5. purge_step (a SessionLog START event) purges nothing of the file that is read later.
# Seen              2026-11-27, tensorboard 2.21.0, Python 3.11:
#                     steps in the order of the curve: [6, 7, 8, 9, 10, 1, 2, 3, 4, 5]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorboard==2.21.0 "setuptools<81"
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import time
from unittest import mock

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

now = time.time()


def train(clock: float, steps: range, purge: bool) -> None:
    """Write one process's part of a curve, as torch's SummaryWriter does, with or without its `purge_step`."""
    with mock.patch("time.time", lambda: clock):
        writer = EventFileWriter("run")
        if purge:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=clock, step=steps[0], session_log=start))
        for step in steps:
            values = Summary(value=[Summary.Value(tag="loss", simple_value=1 / step)])
            writer.add_event(Event(wall_time=clock + step, step=step, summary=values))
        writer.close()


train(now, range(1, 6), purge=False)
train(now - 3600, range(6, 11), purge=True)  # the successor, on a machine whose clock is an hour behind
events = EventAccumulator("run")
events.Reload()
steps = [event.step for event in events.Scalars("loss")]
print("steps in the order of the curve:", steps)
assert steps == [6, 7, 8, 9, 10, 1, 2, 3, 4, 5]
PY
