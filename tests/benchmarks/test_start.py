import json
import os
import time

import pytest
import start


def test_cpu_seconds_are_those_of_the_process():
    assert start.cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)


@pytest.mark.slow
@pytest.mark.long
def test_quick_measures_all_starts(tmp_path):
    start.main(["--quick", "--json", str(tmp_path / "start.json")])
    figures = json.loads((tmp_path / "start.json").read_text())["figures"]
    for name in ("fresh", "elsewhere"):
        assert 1 < figures[f"cpu_seconds_{name}"] < 12
        assert figures[f"seconds_{name}"] > 1

    assert figures["first_image_over_today_python"] < 0.9
    assert 0 < figures["first_image_over_today"] < 1.3
    assert figures["status_seconds"] < 1
