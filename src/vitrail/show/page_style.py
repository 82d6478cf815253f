"""How a page looks, by day and by night, and how its tables are sorted."""

from vitrail.show import style
from vitrail.show.figure import hexed

NIGHT = {
    style.PAPER: "#16181c",
    style.INK: "#e8e6e1",
    style.SOFT: "#a2a5ab",
    style.FAINT: "#34373d",
    style.BLUE: "#7db0f5",
    style.RED: "#f0836e",
    style.GREEN: "#5cc795",
    style.GOLD: "#e3b04b",
    style.VIOLET: "#b99be8",
}

# Heads of tables become buttons: a column is sorted by its numbers or words, and the other way when pressed again.
SORT = """
for (const table of document.querySelectorAll("table.data")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.n ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const x = Number(a || NaN), y = Number(b || NaN), turn = down ? -1 : 1;
        if (Number.isNaN(x) && Number.isNaN(y)) return turn * a.localeCompare(b);
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;  // what has no number comes last
        return turn * (x - y);
      };
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
    });
  });
}
"""

_LOOK = """
:root { color-scheme: light dark; --paper: #faf9f6; --ink: #20232a; --soft: #5f636b; --line: #dedbd4;
  --right: #1d7a50; --wrong: #b8402c; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e6e1; --soft: #a2a5ab; --line: #34373d;
  --right: #5cc795; --wrong: #f0836e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin: 2rem 0 .5rem; }
p { max-width: 42rem; margin: .5rem 0; }
.row { display: flex; flex-wrap: wrap; gap: .75rem; margin: .75rem 0; }
figure { margin: 0; width: min(10rem, 47%); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 0 1.5rem; }
.tiles figure { width: calc((100% - 1.5rem) / 3); }
.strip { display: grid; grid-template-columns: repeat(auto-fill, minmax(max(6rem, 15%), 1fr)); gap: .75rem;
  margin: .75rem 0; }
.strip figure { width: auto; }
header li { max-width: 42rem; }
.line { display: block; }
.line + .line { margin-top: .25rem; }
img, svg:not(.drawn) { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; }
.row rect:hover { stroke: var(--ink); stroke-width: .12; }
figcaption, th { color: var(--soft); font-size: .875rem; }
figcaption { margin-top: .25rem; line-height: 1.35; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
.short th:first-child { width: 36%; }
.short th:nth-child(4) { width: 5.5rem; }
@media (max-width: 40rem) { .short table { font-size: .875rem; } .short th, .short td { padding-right: .5rem; } }
.long { max-width: 76rem; }
nav ul { columns: 16rem; padding-left: 1.2rem; }
a, summary, button { color: inherit; }
figure.whole { width: auto; margin: 1rem 0; }
svg.drawn { display: block; height: auto; font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; }
table.data { width: auto; table-layout: auto; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
table.data caption { text-align: left; padding: .5rem 0; max-width: min(42rem, 88vw); overflow-wrap: anywhere; }
table.data tbody th { font-weight: normal; color: inherit; }
table.data td { max-width: 24rem; }
.number { text-align: right; white-space: nowrap; }
th button { all: unset; cursor: pointer; text-decoration: underline dotted; }
th button:focus-visible, .wide:focus-visible { outline: 2px solid; }
[aria-sort=ascending] button::after { content: " ↑"; }
[aria-sort=descending] button::after { content: " ↓"; }
.origin { display: block; color: var(--soft); font-size: .8125rem; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
.right { color: var(--right); }
.wrong { color: var(--wrong); }
"""


def _by_night() -> str:
    """Drawings are made for paper: in the dark each of their colours has another."""
    rules = "".join(
        f'svg.drawn [{what}="{hexed(colour)}"] {{ {what}: {night}; }} '
        for colour, night in NIGHT.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark) {{ {rules}}}"


STYLE = _LOOK + _by_night()
