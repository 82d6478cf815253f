"""DPG-Bench's table, read back as it was written, or refused by its line."""

import csv
import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.test_graphs import graphs
from vitrail.data.formats.dpg import read_dpg
from vitrail.data.graphs import Graph
from vitrail.errors import DataError

COLUMNS = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language"
)


def written(graphs) -> str:
    """As DPG-Bench writes them."""
    out = io.StringIO(newline="")
    table = csv.writer(out)
    table.writerow(COLUMNS.split(","))
    for graph in graphs:
        for one in graph.questions:
            broad, _, detailed = one.category.partition(" - ")
            depends = ", ".join(map(str, one.depends)) or "0"
            row = (graph.id, graph.prompt, "", one.id, depends, broad, detailed, f"{one.category} (it, so)", one.text)
            table.writerow(row)
    return out.getvalue()


@given(st.lists(graphs(4), min_size=1, max_size=4), st.text("ab, \"'\n(é", min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, asked, text):
    made = [Graph(f"p{n}", f"a {text}.", tuple(own)) for n, own in enumerate(asked)]
    (tmp_path / "dpg.csv").write_text(written(made), encoding="utf-8", newline="")
    assert read_dpg(tmp_path / "dpg.csv") == made


def table(*rows: str, columns: str = COLUMNS) -> str:
    return "\n".join([columns, *rows]) + "\n"


ONE = 'a,"a boat, and a pier",,1,0,entity,whole,entity - whole (boat),Is there a boat?'
TWO = 'a,"a boat, and a pier",,2,1,attribute,color,"attribute - color (boat, red)",Is it red?'


def test_every_row_counts_and_categories_are_those_of_the_tuple(tmp_path):
    (tmp_path / "dpg.csv").write_text("\ufeff" + table(ONE, TWO.replace("attribute,color", "x,y")), encoding="utf-8")
    (graph,) = read_dpg(tmp_path / "dpg.csv")
    assert (graph.id, graph.prompt) == ("a", "a boat, and a pier")
    assert [(one.id, one.category, one.depends) for one in graph.questions] == [
        (1, "entity - whole", ()),
        (2, "attribute - color", (1,)),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (table(ONE, columns=COLUMNS.replace("dependency,", "")), "no column 'dependency'"),
        (table(ONE + ",x", columns=COLUMNS + ",tuple"), "the column 'tuple' twice"),
        (table(ONE, TWO.replace("2,1", "2,7")), "line 3: the question depends on 7"),
        (table(ONE.replace("1,0", "1,2"), TWO), "line 2: the question depends on itself"),
        (table(ONE, TWO.replace("2,1", "1,0")), "line 3: the question has an id that was there before"),
        (table(ONE, TWO.replace("2,1", "2,one")), "line 3: dependency has 'one'"),
        (table(ONE, TWO.replace("2,1", '2,"1,"')), "line 3: dependency has ''"),
        (table(ONE, TWO.replace("2,1", "2.0,1")), "line 3: proposition_id has '2.0'"),
        (table(ONE, TWO.replace("2,1", "9" * 5000 + ",1")), "line 3: proposition_id has"),
        (table(ONE, TWO.replace("2,1", "2,")), "line 3: dependency is empty"),
        (table(ONE, TWO.replace("attribute - color (", " (")), "line 3: .* names no category"),
        (table(ONE, TWO + ",more"), "line 3: 10 cells for 9 columns"),
        (table(ONE, TWO.replace("and a pier", "and a bridge")), "line 3: .* another text than in line 2"),
        (table(ONE, TWO.replace("a,", "b,", 1).replace("2,1", "2,0"), TWO), "line 4: .*was there before, from line 2"),
        (table(ONE, 'b,"never ended'), "line 3: unexpected end of data"),
        (table(), "has no row"),
        ("", "is empty"),
    ],
)
def test_what_is_refused(tmp_path, text, says):
    (tmp_path / "dpg.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=says):
        read_dpg(tmp_path / "dpg.csv")


def test_lines_are_counted_over_texts_of_several(tmp_path):
    long = ONE.replace("a boat, and", "a boat,\nand")
    (tmp_path / "dpg.csv").write_text(table(long, "b,x,,1,5,e,w,entity - whole (x),Is there?"), encoding="utf-8")
    with pytest.raises(DataError, match="line 4: the question depends on 5"):
        read_dpg(tmp_path / "dpg.csv")
