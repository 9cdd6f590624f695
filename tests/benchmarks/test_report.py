import pytest
import report
from common import REPOSITORY


@pytest.mark.parametrize("path", [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")], ids=lambda p: p.name)
def test_committed_tables_are_those_of_the_committed_results(path):
    text = path.read_text()
    assert report.rendered(text, REPOSITORY / "benchmarks" / "results") == text
