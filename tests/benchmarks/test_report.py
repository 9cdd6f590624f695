import json

import pytest
import report
from common import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.mark.parametrize("path", [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")], ids=lambda p: p.name)
def test_committed_tables_are_those_of_the_committed_results(path):
    text = path.read_text()
    assert report.rendered(text, RESULTS) == text


def test_a_table_follows_its_results(tmp_path):
    document = json.loads((RESULTS / "flop_matched_mix_4x.json").read_text())
    for point in document["points"]:
        point["kid"]["efficientnet-lite0"]["value"] = 0.0123
    (tmp_path / "r.json").write_text(json.dumps(document))
    text = report.rendered("<!-- table mix r.json -->\nold\n<!-- end of table -->", tmp_path)
    assert "| monolith, ODE | 0.012 |" in text
    assert "old" not in text
