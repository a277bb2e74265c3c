"""docs/deployment.md: what it says is there and tested, is."""

from __future__ import annotations

import re

from tests.deploy.charts import CHART, EXAMPLES, ROOT

PAGE = ROOT / "docs" / "deployment.md"
TEXT = PAGE.read_text()
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")


def _table() -> dict[str, str]:
    """Shoal's cells of the comparison, by feature."""
    section = TEXT.partition("## Beside other charts")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows[1:]} == {6}
    return {row[0]: row[-1] for row in rows[1:]}


def test_each_of_shoals_cells_names_a_template_and_its_test() -> None:
    table = _table()
    assert len(table) > 15
    for feature, cell in table.items():
        (template, template_path), (test, test_path) = _LINK.findall(cell)
        assert (PAGE.parent / template_path).resolve().is_relative_to(CHART), feature
        assert (PAGE.parent / template_path).is_file(), template
        source = (PAGE.parent / test_path).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{feature}: {test}"


def test_every_link_leads_somewhere() -> None:
    for name, target in _LINK.findall(TEXT):
        if not target.startswith("http"):
            assert (PAGE.parent / target).exists(), name


def test_every_example_is_in_the_page() -> None:
    for path in EXAMPLES:
        assert f"`{path.name}`" in TEXT
