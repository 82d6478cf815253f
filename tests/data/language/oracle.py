"""A slow reader who knows nothing of tensors: takes a question as a string, looks at one scene as a list of objects and
answers. Of the package it uses the templates' texts, as a grammar to parse with, and nothing else. Where a question is
open to doubt it raises `Doubt` rather than answer.
"""

import re
from dataclasses import dataclass
from itertools import product

from vitrail.data.language import templates

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Written down by hand, not derived: what toys are called, which of them may be taken for which, and who takes “an”.
CALLED = {"black horse": "horse", "green apple": "apple", "red apple": "apple", "scissors": "pair of scissors"}
MANY = {"horse": "horses", "apple": "apples", "pair of scissors": "pairs of scissors"}
CONFUSED = [{"dog", "dog face"}, {"dog", "hot dog"}, {"bird", "owl"}]
AN = {"owl", "elephant", "apple", "egg", "onion", "umbrella", "hourglass", "X-ray", "orange"}
BACKGROUNDS = ("a plain colour", "a gradient", "stripes", "checks", "blotches", "a blurred view")
SIDES = {"to the left of": "left", "left of": "left", "to the right of": "right", "right of": "right"}
SIDES |= {"above": "above", "below": "below", "inside": "inside"}
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
_SIZE, _SIDE = "bigger|larger|smaller", "|".join(SIDES)
CLOSED = {"relation": _SIDE, "side": _SIDE, "size": _SIZE, "extent": _SIZE, "amount": "more|fewer"}
CLOSED |= {"number": "|".join(NUMBERS), "at": "(?:in|at|on) the [a-z ]+?", "background": "|".join(BACKGROUNDS)}


class Doubt(Exception):
    pass


@dataclass
class Object:
    name: str  # as it is called; the text, if it is a word
    sort: str  # thing, word or frame
    colour: str  # "" if untinted
    box: tuple[float, ...]  # in shares of the picture
    inside: "Object | None" = None

    @property
    def centre(self):
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def area(self):
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])

    @property
    def output(self):
        return f'word "{self.name}"' if self.sort == "word" else self.name

    def disjoint(self, other):
        a, b = self.box, other.box
        return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def confusable(a, b):
    return a == b or {a, b} in CONFUSED


class Oracle:
    def __init__(self, table):
        self.table = table
        things = [
            (n, p) for n, p, sort in zip(table.names, table.plurals, table.category, strict=True) if sort != "word"
        ]
        self.singular = {CALLED.get(n, n) for n, _ in things}
        self.plural = {MANY.get(CALLED.get(n, n), p): CALLED.get(n, n) for n, p in things}
        self.texts = [n for n, sort in zip(table.names, table.category, strict=True) if sort == "word"]
        nouns = [*sorted([*self.singular, *self.plural], key=len, reverse=True), *(f'words? "{t}"' for t in self.texts)]
        self.thing = rf"(?:(?:[Aa]n?|[Tt]he) )?(?:(?:{'|'.join(COLOURS)}) )?(?:{'|'.join(nouns)}|word)"
        self.patterns = {}

    def objects(self, scenes, b):
        found = []
        for o, sprite in enumerate(scenes.sprite[b].tolist()):
            if sprite < 0:
                continue
            name = self.table.names[int(self.table.concept[sprite])]
            sort = self.table.kind[sprite]
            name = name if sort == "word" else CALLED.get(name, name)
            colour = ("", *COLOURS)[int(scenes.colour[b, o])]
            found.append(Object(name, sort, colour, tuple(x / 4096 for x in scenes.box[b, o].tolist())))
        for o, inside in enumerate(scenes.frame_slot[b].tolist()):
            if inside >= 0:
                found[o].inside = found[inside]
        return found

    # ── reading phrases ───────────────────────────────────────────────────────────────────────────────────────────

    def phrase(self, form, text):
        """“the red dog” → (colour, noun); None if it is no such phrase"""
        if text[:1].isupper() and form in ("A", "The"):
            text = text[0].lower() + text[1:]
        form = form.lower()
        article, _, rest = text.partition(" ") if form in ("a", "the") else ("", "", text)
        word = re.fullmatch(r'(?:(\w+) )?words? "(.+)"', rest)
        first, _, behind = rest.partition(" ")
        if word and (word[1] is None or word[1] in COLOURS) and word[2] in self.texts:
            colour, noun = word[1] or "", f'word "{word[2]}"'
        elif rest == "word" or (first in COLOURS and behind == "word"):
            colour, noun = (first if behind else ""), "word"
        elif (form == "plural" and rest in self.plural) or (form != "plural" and rest in self.singular):
            colour, noun = "", self.plural[rest] if form == "plural" else rest
        elif first in COLOURS and behind and (behind in self.plural if form == "plural" else behind in self.singular):
            colour, noun = first, self.plural[behind] if form == "plural" else behind
        else:
            return None
        expected = "the" if form == "the" or (word and not colour) else "an" if (colour or noun) in AN else "a"
        return (colour, noun) if form not in ("a", "the") or article == expected else None

    def parse(self, template, text):
        """A text read as a template: slot → value; None if it is none"""
        if template not in self.patterns:
            slots = re.findall(r"\{(\w+)(?: (\w+))?\}", template)
            literals = [re.escape(part) for part in re.split(r"\{[^}]*\}", template)]
            holes = [rf"({CLOSED[form]})" if name and form in CLOSED else rf"({self.thing})" for form, name in slots]
            pattern = literals[0] + "".join(hole + literal for hole, literal in zip(holes, literals[1:], strict=True))
            self.patterns[template] = slots, re.compile(pattern)
        slots, pattern = self.patterns[template]
        found = pattern.fullmatch(text)
        if found is None:
            return None
        read = {}
        for (form, name), output in zip(slots, found.groups(), strict=True):
            read[name or form] = output if name and form in CLOSED else self.phrase(form if name else "", output)
        return None if None in read.values() else read

    def parse_text(self, texts, output):
        """The one reading of a text by any of the templates"""
        found = []
        for text in texts:
            read = self.parse(text, output)
            if read is not None and read not in found:
                found.append(read)
        assert len(found) == 1, (output, found)
        return found[0]

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def the(self, objects, phrase):
        """The one object that a description fits."""
        colour, noun = phrase
        rivals = [o for o in objects if (o.sort == "word" if noun == "word" else confusable(o.output, noun))]
        fits = [o for o in rivals if noun in ("word", o.output) and colour in ("", o.colour)]
        if len(fits) != 1:
            raise Doubt(phrase, fits)
        if (not colour and len(rivals) > 1) or (
            colour and any(o.colour in ("", colour) for o in rivals if o is not fits[0])
        ):
            raise Doubt(phrase, rivals)
        return fits[0]

    def exists(self, objects, noun):
        return any(o.output == noun for o in objects) or self.count(objects, noun) > 0

    def count(self, objects, noun):
        if any(confusable(o.output, noun) and o.output != noun for o in objects):
            raise Doubt(noun)
        return sum(o.output == noun for o in objects)

    def place(self, o):
        cell = []
        for at in o.centre:
            if min(abs(at - 1 / 3), abs(at - 2 / 3)) < 1 / 32 - 1e-6:
                raise Doubt(o)
            cell.append(int(at * 3))
        return " ".join(filter(None, (ROWS[cell[1]], COLUMNS[cell[0]]))) or "centre"

    def side(self, a, b):
        """left, right, above or below, if one of them is beyond doubt"""
        dx, dy = a.centre[0] - b.centre[0], a.centre[1] - b.centre[1]
        if (
            a.inside is b
            or b.inside is a
            or max(abs(dx), abs(dy)) < 1 / 16
            or not (abs(dx) >= 2 * abs(dy) or abs(dy) >= 2 * abs(dx))
        ):
            raise Doubt(a, b)
        return ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else "above" if dy < 0 else "below"

    def neighbour(self, objects, x, r, y):
        """Is x r y? Only a clear yes or a clear no."""
        x, y = self.the(objects, x), self.the(objects, y)
        if r == "inside":
            if x.inside is y:
                return True
            if x.disjoint(y):
                return False
            raise Doubt(x, y)
        side = self.side(x, y)
        if {side, r} not in ({side}, {"left", "right"}, {"above", "below"}):
            raise Doubt(x, r, y)
        return side == r

    def bigger(self, a, b):
        if max(a.area, b.area) < 1.5 * min(a.area, b.area) - 1e-9:
            raise Doubt(a, b)
        return a.area > b.area

    # ── answering ─────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, kind, question, objects, it=None):
        if kind.startswith("choice"):
            return self.choose(kind, question, objects)
        texts = {**templates.QUESTION_KINDS, **templates.FOLLOW_UP_KINDS}[kind]
        read = self.parse_text(texts.train + texts.test + templates.EXTRA_TEMPLATES.get(kind, ()), question)
        kind = kind.removeprefix("unanswerable_").partition("_")[0] if not kind.startswith("it_") else kind
        return getattr(self, f"answer_{kind}")(objects, read) if it is None else self.about(kind, it)

    def about(self, kind, it):
        return it.colour if kind == "it_colour" else self.place(it)

    def answer_existence(self, objects, read):
        return "Yes" if self.exists(objects, read["x"][1]) else "No"

    def answer_counting(self, objects, read):
        return str(self.count(objects, read["x"][1]))

    def _absent(self, objects, read, name="x"):
        noun = read[name][1]
        return None if any(confusable(o.output, noun) for o in objects) else f"There is no {noun} in the picture."

    def answer_colour(self, objects, read):
        if none := self._absent(objects, read):
            return none
        colour = self.the(objects, read["x"]).colour
        if not colour:
            raise Doubt(read)
        return colour

    def answer_position(self, objects, read):
        return self._absent(objects, read) or self.place(self.the(objects, read["x"]))

    def answer_relation(self, objects, read):
        for name in "xy":
            if none := self._absent(objects, read, name):
                return none
        return "Yes" if self.neighbour(objects, read["x"], SIDES[read["r"]], read["y"]) else "No"

    def answer_inside(self, objects, read):
        assert self.the(objects, read["y"]).sort == "frame"
        return "Yes" if self.neighbour(objects, read["x"], "inside", read["y"]) else "No"

    def answer_what(self, objects, read):
        y, r = self.the(objects, read["y"]), SIDES[read["r"]]
        if r == "inside":
            found = [o for o in objects if o is not y and not o.disjoint(y)]
            if any(o.inside is not y for o in found):
                raise Doubt(found)
        else:
            axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[r]
            found = [o for o in objects if (o.centre[axis] - y.centre[axis]) * sign > 0]
        if len(found) != 1 or (r != "inside" and self.side(found[0], y) != r):
            raise Doubt(found)
        noun = found[0].output
        return f"the {noun}" if found[0].sort == "word" else f"{'an' if noun in AN else 'a'} {noun}"

    def answer_size(self, objects, read):
        x, y = self.the(objects, read["x"]), self.the(objects, read["y"])
        return "Yes" if self.bigger(x, y) == (read["s"] != "smaller") else "No"

    def answer_which(self, objects, read):
        x, y = self.the(objects, read["x"]), self.the(objects, read["y"])
        z = read["x"] if self.bigger(x, y) == (read["s"] != "smaller") else read["y"]
        return " ".join(filter(None, ("the", *z)))

    def answer_amount(self, objects, read):
        m, n = self.count(objects, read["x"][1]), self.count(objects, read["y"][1])
        if m == n:
            raise Doubt(m, n)
        return "Yes" if (m > n) == (read["q"] == "more") else "No"

    def answer_reading(self, objects, read):
        assert read["x"][1] == "word"
        return self.the(objects, read["x"]).name

    def answer_grounding(self, objects, read):
        return str([int(side * 99 + 0.5) for side in self.the(objects, read["x"]).box])

    def choose(self, kind, question, objects):
        options = None
        for before, after in (("(", ")"), ("", "."), ("", ")")):
            marks = [re.escape(f" {before}{letter}{after} ") for letter in "ABCD"]
            options = options or re.fullmatch("(.+?)" + "(.+)".join(marks) + "(.+)", question)
        assert options, question
        stem, *output = options.groups()
        if kind == "choice_object":
            assert stem in templates._QUESTIONS["choice_object"].train + templates._QUESTIONS["choice_object"].test
            right = [self.exists(objects, self.phrase("a", text)[1]) for text in output]
        else:
            open_kind = {"choice_count": "counting"}.get(kind, kind.removeprefix("choice_"))
            right = [text == self.answer(open_kind, stem, objects) for text in output]
        assert len(set(output)) == 4, question
        if sum(right) != 1:
            raise Doubt(question, right)
        return "ABCD"[right.index(True)]

    # ── telling true from false ───────────────────────────────────────────────────────────────────────────────────

    def listed(self, text):
        """“two red dogs, a cat and an apple” → [(2, "red", "dog"), …]"""
        items = re.split(r", | and ", text)
        assert " and ".join(filter(None, (", ".join(items[:-1]), items[-1]))) == text, text
        groups = []
        for item in items:
            first, _, rest = item.partition(" ")
            many = NUMBERS.index(first) if first in NUMBERS else 1
            phrase = self.phrase("plural", rest) if first in NUMBERS else self.phrase("a", item)
            assert phrase and many != 0, item
            groups.append((many, *phrase))
        return groups

    def tells_all(self, objects, text):
        """Whether a list names all there is, and nothing else: by name alone, or by colour and name."""
        groups = self.listed(text)
        if len({(c, n) for _, c, n in groups}) < len(groups):
            return False
        result = any(colour for _, colour, _ in groups)
        there = {}
        for o in objects:
            key = (o.colour if result else "", o.output)
            there[key] = there.get(key, 0) + 1
        return {(c, n): m for m, c, n in groups} == there

    def caption_is_true(self, text, objects, background, kind="caption_short"):
        first, *rest = re.split(r"(?<=\.) ", text)
        kind = templates.CAPTION_KINDS[kind]
        frames = [
            f.replace("{list}", "(.+)").replace(".", r"\.").replace(r"(\.+)", "(.+)")
            for f in kind.answers + kind.answers_test
        ]
        found = [m for m in (re.fullmatch(frame, first) for frame in frames) if m]
        assert len(found) == 1, first
        return self.tells_all(objects, found[0][1]) and all(self.sentence(s, objects, background) for s in rest)

    def sentence(self, text, objects, background):
        kinds = [templates.SENTENCE_KINDS[name] for name in ("related", "placed", "behind")]
        read = self.parse_text([t.strip() for kind in kinds for t in kind.train + kind.test], text)
        if "b" in read:
            return read["b"] == BACKGROUNDS[background % 6]
        if "p" in read:
            return re.fullmatch(r"(in|at|on) the (.+)", read["p"])[2] == self.place(self.the(objects, read["x"]))
        return self.neighbour(objects, read["x"], SIDES[read["r"]], read["y"])

    def swap_is_true(self, sort, text, objects):
        read = self.parse_text((*templates.SWAP_KINDS[sort].train, *templates.SWAP_KINDS[sort].test), text)
        if sort == "relation":
            return self.neighbour(objects, read["x"], SIDES[read["r"]], read["y"])
        if sort == "size":
            return self.bigger(self.the(objects, read["x"]), self.the(objects, read["y"]))
        if sort == "number":
            pairs = ((read["m"], read["x"]), (read["n"], read["y"]))
            return all(self.count(objects, thing[1]) == NUMBERS.index(number) for number, thing in pairs)
        return all(self.the(objects, ("", read[s][1])).colour == read[s][0] for s in "xy")

    def prompt_is_true(self, kind, text, objects):
        """Check a prompt literally: the named things exist, in the stated number, colour and position."""
        texts = templates.DRAWING_PROMPT_KINDS[kind]
        read = self.parse_text(texts.train + texts.test + templates.EXTRA_TEMPLATES[f"draw_{kind}"], text)
        fits = {
            s: [o for o in objects if o.output == read[s][1] and read[s][0] in ("", o.colour)]
            for s in "xy"
            if s in read
        }
        if kind == "counting":
            return len(fits["x"]) == NUMBERS.index(read["n"])
        if kind == "position":
            return any(SIDES[read["r"]] in self._geneval(a, b) for a, b in product(fits["x"], fits["y"]))
        return all(fits.values())

    def _geneval(self, a, b):
        (ax, ay), (bx, by) = a.centre, b.centre
        width, height = (a.box[i] - a.box[i - 2] + b.box[i] - b.box[i - 2] for i in (2, 3))
        length = ((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5
        dx, dy = max(abs(ax - bx) - 0.1 * width, 0), max(abs(ay - by) - 0.1 * height, 0)
        across = {"left" if ax < bx else "right"} if dx > length / 2 else set()
        return across | ({"above" if ay < by else "below"} if dy > length / 2 else set())
