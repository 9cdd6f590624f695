import json

import prepare_scale
import pytest


@pytest.mark.slow
@pytest.mark.long
def test_every_stage_is_timed_within_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_scale, "SIZES", ((200, 2_000),) * 2)

    prepare_scale.main(["--json", str(tmp_path / "scale.json")])

    table = (tmp_path / "scale.md").read_text().split("--: |\n")[1].split("\n\n")[0]
    *stages, (_, *whole) = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert [name for name, *_ in stages] == ["source", "encode", "index", "partition", "shards", "merge"]
    for place, seconds in enumerate(map(float, whole), 1):
        assert 0 < sum(float(stage[place]) for stage in stages) < seconds
    figures = json.loads((tmp_path / "scale.json").read_text())["figures"]
    assert figures["files_1m"] > 20 and 0.1 < figures["peak_gb_1m"] < 4
