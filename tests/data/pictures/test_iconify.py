"""Emoji joined to codepoints by the names of their drawings: what must meet, and what must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.pictures import pictures
from vitrail.data.pictures.iconify import Icons, joined, renamed, slug
from vitrail.errors import DataError, ImageError

LABELS = {
    "1f436": "dog face",
    "1f43b": "bear",
    "1f3cf": "cricket game",
    "1f997": "cricket",
    "1f44b": "waving hand",
    "1f44b-1f3fe": "waving hand: medium-dark skin tone",
    "1f471-1f3fe": "person: medium-dark skin tone, blond hair",
    "1f1e8-1f1ee": "flag: Côte d’Ivoire",
    "1f1e7-1f1fb": "flag: Bouvet Island",
    "1f1f8-1f1ef": "flag: Svalbard & Jan Mayen",
    "1f3f4": "black flag",
    "1f4ab": "dizzy",
    "1f635": "face with crossed-out eyes",
}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("waving hand: medium-dark skin tone", "waving-hand-medium-dark-skin-tone"),
        ("flag: Côte d’Ivoire", "flag-cote-divoire"),
        ("flag: St. Vincent & Grenadines", "flag-st-vincent-and-grenadines"),
        ("woman’s hat", "womans-hat"),
        ("UP! button", "up-button"),
        ("A button (blood type)", "a-button-blood-type"),
        ("keycap: #", "keycap-pound"),
        ("keycap: *", "keycap-asterisk"),
        ("piñata", "pinata"),
    ],
)
def test_labels_as_sets_write_them(label, name):
    assert slug(label) == name


@given(st.text())
def test_slugs_stay_once_written(label):
    assert slug(slug(label)) == slug(label)


@pytest.mark.parametrize(
    ("icon", "key"),
    [
        ("dog-face", "1f436"),
        ("waving-hand-medium-dark-skin-tone", "1f44b-1f3fe"),
        ("blond-haired-person-medium-dark-skin-tone", "1f471-1f3fe"),
        ("flag-for-cote-divoire", "1f1e8-1f1ee"),
        ("flag-for-flag-cote-divoire", "1f1e8-1f1ee"),
        ("flag-for-black-flag", "1f3f4"),
        ("dizzy", "1f4ab"),
        ("dizzy-face", "1f635"),  # not dizzy, which is a star
    ],
)
def test_a_name_finds_its_codepoint(icon, key):
    assert joined({icon: ()}, LABELS) == {key: icon}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cat-face-with-wry-smile", "cat-with-wry-smile"),
        ("weary-cat-face", "weary-cat"),
        ("ab-button", "ab-button-blood-type"),
        ("bride-with-veil-dark-skin-tone", "person-with-veil-dark-skin-tone"),
        ("man-with-chinese-cap", "person-with-skullcap"),
        ("two-women-holding-hands", "women-holding-hands"),
        ("up-text-button", "up-button"),
    ],
)
def test_older_names(old, new):
    assert renamed(old) == {new}


@pytest.mark.parametrize("icon", ["pistol", "hound", "waving-hand-green-skin-tone", "flag-for-nowhere", "face", ""])
def test_what_has_no_sure_name_is_left_out(icon):
    assert joined({icon: ()}, LABELS) == {}


def test_further_names_count_after_the_icons_own():
    assert joined({"bear-face": ["bear"]}, LABELS) == {"1f43b": "bear-face"}
    assert joined({"banner": ["flag-for-black-flag"]}, LABELS) == {"1f3f4": "banner"}
    assert joined({"cricket-game": ["cricket"]}, LABELS) == {"1f3cf": "cricket-game"}
    assert joined({"flag-for-bouvet-island": ["flag-for-flag-svalbard-and-jan-mayen"]}, LABELS) == {
        "1f1e7-1f1fb": "flag-for-bouvet-island"
    }


def test_what_is_ambiguous_is_left_out():
    assert joined({"beast": ["bear", "dog-face"]}, LABELS) == {}  # one icon, two codepoints
    assert joined({"beast": ["bear"], "brute": ["bear"]}, LABELS) == {}  # two icons, one codepoint
    assert joined({"beast": ["bear"], "bear": []}, LABELS) == {"1f43b": "bear"}  # the name is another's own
    assert joined({"twin": []}, {"1f46f": "twin", "1f46c": "twin!"}) == {}  # one name, two codepoints


_ICON = st.sampled_from(sorted({*map(slug, LABELS.values()), "flag-for-black-flag", "bear-face", "x", "dizzy-face"}))


@given(st.dictionaries(_ICON, st.lists(_ICON, max_size=3), max_size=8))
def test_an_icon_has_one_codepoint_and_a_codepoint_one_icon(icons):
    found = joined(icons, LABELS)
    assert len(set(found.values())) == len(found) and set(found.values()) <= set(icons)
    for key, icon in found.items():
        names = {icon, *icons[icon]}
        assert slug(LABELS[key]) in names.union(*map(renamed, names))
    # An icon whose own name is a label has that codepoint, whatever else there is; and the order changes nothing.
    assert {key for key, label in LABELS.items() if slug(label) in icons} <= set(found)
    assert joined(dict(reversed(icons.items())), LABELS) == found


# ---- opened -----------------------------------------------------------------------------------------------------

RECT = '<rect width="{}" height="4" fill="#00f"/>'


def opened(place, names, icons, aliases=None, **more) -> Icons:
    place("noto-v1", {"package/icons.json": {"prefix": "made", "icons": icons, "aliases": aliases or {}, **more}})
    found = pictures("noto-v1", names)
    assert isinstance(found, Icons)
    return found


def test_a_set_is_read(place, names):
    pytest.importorskip("resvg_py")
    icons = {"hound": {"body": RECT.format(2)}, "man-farmer": {"body": RECT.format(8)}, "what": {"body": ""}}
    made = opened(place, names, icons, {"pet": {"parent": "hound"}, "dog-face": {"parent": "pet"}}, width=4, height=4)
    dog, farmer = map(made.about, range(len(made)))
    assert (dog.id, dog.vendor, dog.key, dog.name) == ("noto-v1/1f436", "noto-v1", "1f436", "dog face")
    assert dog.keywords == ("pet", "woof") and dog.category == "animals-nature" and dog.labels["de"] == "Hundegesicht"
    assert farmer.key == "1f468-200d-1f33e" and made.unnamed == ("what",)
    pixels = made.rgba(0, 8)
    assert pixels.shape == (8, 8, 4) and (pixels[:, :4] == (0, 0, 255, 255)).all() and not pixels[:, 4:].any()
    assert (made.rgba(1, 8) == (0, 0, 255, 255)).all()


def test_an_icon_has_its_own_window(place, names):
    pytest.importorskip("resvg_py")
    made = opened(place, names, {"dog-face": {"body": RECT.format(9), "left": 8, "top": -1, "width": 2, "height": 4}})
    pixels = made.rgba(0, 16)
    assert pixels.shape == (16, 8, 4) and not pixels[:4].any() and (pixels[4:, :4] == (0, 0, 255, 255)).all()
    assert not pixels[:, 4:].any()
    assert opened(place, names, {"dog-face": {"body": RECT.format(9)}}).rgba(0).shape == (16, 16, 4)  # the default


@pytest.mark.parametrize("turn", [{"hFlip": True}, {"vFlip": True}, {"rotate": 1}, {"width": 3}])
def test_what_turns_another_picture_is_no_name_for_it(place, names, turn):
    aliases = {"dog-face": {"parent": "hound", **turn}, "cur": {"parent": "dog-face"}}
    made = opened(place, names, {"hound": {"body": ""}, "man-farmer": {"body": ""}}, aliases)
    assert made.keys == ["1f468-200d-1f33e"] and made.unnamed == ("hound",)
    if "width" not in turn:
        assert opened(place, names, {"dog-face": {"body": "", **turn}, "man-farmer": {"body": ""}}).keys == made.keys


def test_aliases_without_a_picture(place, names):
    circle = {"dog-face": {"parent": "b"}, "b": {"parent": "dog-face"}, "keycap-pound": {"parent": "nothing"}}
    assert opened(place, names, {"man-farmer": {"body": ""}}, circle).keys == ["1f468-200d-1f33e"]
    # A drawing is itself, whatever an alias of its name says.
    made = opened(place, names, {"dog-face": {"body": ""}, "x": {"body": ""}}, {"dog-face": {"parent": "x"}})
    assert made.icons == {"1f436": "dog-face"} and made.unnamed == ("x",)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"icons": {"dog-face": {}}}', '{"icons": {}}', '{"icons": {"x": {"body": ""}}}']
)
def test_a_broken_set(place, names, content):
    place("emojione", {"package/icons.json": content})
    with pytest.raises(DataError):
        pictures("emojione", names)


@pytest.mark.parametrize(
    "icon",
    [
        {"body": "<rect"},
        {"body": '</svg><svg xmlns="http://www.w3.org/2000/svg">'},
        {"body": '<!DOCTYPE a [<!ENTITY b "c">]>&b;'},
        {"body": "", "width": -1},
        {"body": "", "height": 1e9},
        {"body": "", "width": 1e300, "height": 1e300},
    ],
)
def test_a_body_that_cannot_be_drawn(place, names, icon):
    pytest.importorskip("resvg_py")
    with pytest.raises(ImageError, match="noto-v1, dog-face"):
        opened(place, names, {"dog-face": icon}).rgba(0, 8)


@pytest.mark.parametrize("attribute", ["href", "xlink:href"])
def test_a_body_sees_no_other_file(place, names, tmp_path, attribute):
    pytest.importorskip("resvg_py")
    (tmp_path / "private.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect width="1" height="1"/></svg>'
    )
    body = f'<image width="16" height="16" {attribute}="{tmp_path}/private.svg"/>'
    assert not opened(place, names, {"dog-face": {"body": body}}).rgba(0, 8).any()


def test_a_side_that_cannot_be(place, names):
    with pytest.raises(ImageError, match="longer side"):
        opened(place, names, {"dog-face": {"body": ""}}).rgba(0, 0)
