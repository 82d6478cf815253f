"""DPG-Bench's table round-trips, and invalid tables are refused with the line."""

import csv
import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.test_question_graphs import graphs
from vitrail.data.formats.dpg_bench import read_dpg
from vitrail.data.question_graphs import QuestionGraph
from vitrail.errors import DataError

COLUMNS = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language"
)


def to_csv(graphs) -> str:
    """Format graphs like DPG-Bench's file."""
    out = io.StringIO(newline="")
    table = csv.writer(out)
    table.writerow(COLUMNS.split(","))
    for graph in graphs:
        for one in graph.questions:
            broad, _, detailed = one.category.partition(" - ")
            depends = ", ".join(map(str, one.dependencies)) or "0"
            row = (graph.id, graph.prompt, "", one.id, depends, broad, detailed, f"{one.category} (it, so)", one.text)
            table.writerow(row)
    return out.getvalue()


@given(st.lists(graphs(4), min_size=1, max_size=4), st.text("ab, \"'\n(é", min_size=1, max_size=12))
@settings(suppress_health_check=list(HealthCheck))
def test_table_round_trips(tmp_path, question_lists, text):
    made = [QuestionGraph(f"p{n}", f"a {text}.", tuple(questions)) for n, questions in enumerate(question_lists)]
    (tmp_path / "dpg.csv").write_text(to_csv(made), encoding="utf-8", newline="")
    assert read_dpg(tmp_path / "dpg.csv") == made


def table(*rows: str, columns: str = COLUMNS) -> str:
    return "\n".join([columns, *rows]) + "\n"


ONE = 'a,"a boat, and a pier",,1,0,entity,whole,entity - whole (boat),Is there a boat?'
TWO = 'a,"a boat, and a pier",,2,1,attribute,color,"attribute - color (boat, red)",Is it red?'


def test_categories_come_from_the_tuple_column(tmp_path):
    (tmp_path / "dpg.csv").write_text("\ufeff" + table(ONE, TWO.replace("attribute,color", "x,y")), encoding="utf-8")
    (graph,) = read_dpg(tmp_path / "dpg.csv")
    assert (graph.id, graph.prompt) == ("a", "a boat, and a pier")
    assert [(one.id, one.category, one.dependencies) for one in graph.questions] == [
        (1, "entity - whole", ()),
        (2, "attribute - color", (1,)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(ONE, columns=COLUMNS.replace("dependency,", "")), "no column 'dependency'"),
        (table(ONE + ",x", columns=COLUMNS + ",tuple"), "the column 'tuple' twice"),
        (table(ONE, TWO.replace("2,1", "2,7")), "line 3: the question depends on 7"),
        (table(ONE.replace("1,0", "1,2"), TWO), "line 2: the question depends on itself"),
        (table(ONE, TWO.replace("2,1", "1,0")), "line 3: the question has a duplicate id"),
        (table(ONE, TWO.replace("2,1", "2,one")), "line 3: dependency has 'one'"),
        (table(ONE, TWO.replace("2,1", '2,"1,"')), "line 3: dependency has ''"),
        (table(ONE, TWO.replace("2,1", "2.0,1")), "line 3: proposition_id has '2.0'"),
        (table(ONE, TWO.replace("2,1", "9" * 5000 + ",1")), "line 3: proposition_id has"),
        (table(ONE, TWO.replace("2,1", "2,")), "line 3: dependency is empty"),
        (table(ONE, TWO.replace("attribute - color (", " (")), "line 3: .* has no category"),
        (table(ONE, TWO + ",more"), "line 3: 10 cells for 9 columns"),
        (table(ONE, TWO.replace("and a pier", "and a bridge")), "line 3: the text of .* differs from line 2"),
        (table(ONE, TWO.replace("a,", "b,", 1).replace("2,1", "2,0"), TWO), "line 4: .*occurs already at line 2"),
        (table(ONE, 'b,"never ended'), "line 3: unexpected end of data"),
        (table(), "has no rows"),
        ("", "is empty"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, text, message):
    (tmp_path / "dpg.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_dpg(tmp_path / "dpg.csv")


def test_line_numbers_with_multiline_texts(tmp_path):
    long = ONE.replace("a boat, and", "a boat,\nand")
    (tmp_path / "dpg.csv").write_text(table(long, "b,x,,1,5,e,w,entity - whole (x),Is there?"), encoding="utf-8")
    with pytest.raises(DataError, match="line 4: the question depends on 5"):
        read_dpg(tmp_path / "dpg.csv")
