"""A preparation in small parts and groups that machines share. As a script: kill machines at random moments."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from threading import Thread

from prepare.listed import Listener
from prepare.tiny_experiment import tiny_experiment

from ddm_lightning.core.files import sha256_json
from ddm_lightning.prepare import ledger, prepared, records, stages
from ddm_lightning.prepare.share import Share
from ddm_lightning.prepare.stages import prepare

NUM_KILLS = 20


def experiment_at(url, **changes):
    """Five parts, three groups."""
    experiment = tiny_experiment(num_samples=100, **changes)
    experiment.remote, experiment.prepare.images.size = url, 8
    return experiment


def set_sizes(set_value=setattr):
    set_value(records, "BLOCK_SIZE", 20)
    set_value(ledger, "POLL_SECONDS", 0.05)
    set_value(stages, "RECHECK_SECONDS", 1.0)
    set_value(prepared, "GROUP_SIZE", 2)


def machine(experiment, folder, index, count):
    """Do one machine's share; give its lines and the manifest."""
    listener = Listener()
    manifest = prepare(experiment, folder, listener, share=Share(index, count))
    return listener.lines, manifest


def together(experiment, folders):
    """All machines at once, as threads; what each gives."""
    results = {}

    def work(number, folder):
        results[number] = machine(experiment, folder, number, len(folders))

    threads = [Thread(target=work, args=pair) for pair in enumerate(folders, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in sorted(results)]


def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def trial(url, folder, draw, seconds):
    """Two machines, of which one is killed and replaced by one with an empty folder; a hash of what they made."""
    experiment = experiment_at(url)
    children = {i: in_child(lambda i=i: machine(experiment, folder / f"{i}", i, 2)) for i in (1, 2)}
    time.sleep(draw.uniform(0, seconds))
    victim = draw.choice((1, 2))
    os.kill(children[victim], signal.SIGKILL)
    died = os.waitstatus_to_exitcode(os.waitpid(children[victim], 0)[1])
    children[victim] = in_child(lambda: machine(experiment, folder / "replaced", victim, 2))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children.values()]
    manifest = folder / ("replaced" if victim == 1 else "1") / "prepared" / "manifest.json"
    return {"died": died, "codes": codes, "manifest": sha256_json(json.loads(manifest.read_text()))}


def main(url, folder):
    os.fsync = lambda _: None
    set_sizes()
    draw, start = random.Random(0), time.monotonic()
    first = trial(f"{url}/first", folder / "first", random.Random(1), 0)
    seconds = (time.monotonic() - start) / 2  # of which the replaced machine took a half
    trials = [trial(f"{url}/{number}", folder / f"{number}", draw, seconds) for number in range(NUM_KILLS)]
    print(json.dumps([first, *trials]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
