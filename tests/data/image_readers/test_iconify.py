"""Emoji matched to codepoints by the names of their icons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.image_readers import open_images
from vitrail.data.image_readers.iconify import IconifyReader, get_current_names, match_icons, slugify
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
def test_slugs_of_labels(label, name):
    assert slugify(label) == name


@given(st.text())
def test_slugify_is_idempotent(label):
    assert slugify(slugify(label)) == slugify(label)


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
        ("dizzy-face", "1f635"),  # not "dizzy", which is a star
    ],
)
def test_names_match_codepoints(icon, key):
    assert match_icons({icon: ()}, LABELS) == {key: icon}


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
def test_older_names_are_updated(old, new):
    assert get_current_names(old) == {new}


@pytest.mark.parametrize("icon", ["pistol", "hound", "waving-hand-green-skin-tone", "flag-for-nowhere", "face", ""])
def test_uncertain_names_are_left_out(icon):
    assert match_icons({icon: ()}, LABELS) == {}


def test_aliases_count_after_own_names():
    assert match_icons({"bear-face": ["bear"]}, LABELS) == {"1f43b": "bear-face"}
    assert match_icons({"banner": ["flag-for-black-flag"]}, LABELS) == {"1f3f4": "banner"}
    assert match_icons({"cricket-game": ["cricket"]}, LABELS) == {"1f3cf": "cricket-game"}
    assert match_icons({"flag-for-bouvet-island": ["flag-for-flag-svalbard-and-jan-mayen"]}, LABELS) == {
        "1f1e7-1f1fb": "flag-for-bouvet-island"
    }


def test_ambiguous_icons_are_left_out():
    assert match_icons({"beast": ["bear", "dog-face"]}, LABELS) == {}  # one icon, two codepoints
    assert match_icons({"beast": ["bear"], "brute": ["bear"]}, LABELS) == {}  # two icons, one codepoint
    assert match_icons({"beast": ["bear"], "bear": []}, LABELS) == {
        "1f43b": "bear"
    }  # the alias is another icon's own name
    assert match_icons({"twin": []}, {"1f46f": "twin", "1f46c": "twin!"}) == {}  # one name, two codepoints


_ICON = st.sampled_from(sorted({*map(slugify, LABELS.values()), "flag-for-black-flag", "bear-face", "x", "dizzy-face"}))


@given(st.dictionaries(_ICON, st.lists(_ICON, max_size=3), max_size=8))
def test_matching_is_one_to_one(icons):
    matches = match_icons(icons, LABELS)
    assert len(set(matches.values())) == len(matches) and set(matches.values()) <= set(icons)
    for key, icon in matches.items():
        names = {icon, *icons[icon]}
        assert slugify(LABELS[key]) in names.union(*map(get_current_names, names))
    # An icon whose own name is a label always has that codepoint, and the order of icons has no effect.
    assert {key for key, label in LABELS.items() if slugify(label) in icons} <= set(matches)
    assert match_icons(dict(reversed(icons.items())), LABELS) == matches


# ---- opened -----------------------------------------------------------------------------------------------------

RECT = '<rect width="{}" height="4" fill="#00f"/>'


def open_icons(place, names, icons, aliases=None, **more) -> IconifyReader:
    place("noto-v1", {"package/icons.json": {"prefix": "made", "icons": icons, "aliases": aliases or {}, **more}})
    found = open_images("noto-v1", names)
    assert isinstance(found, IconifyReader)
    return found


def test_icon_set_is_read(place, names):
    pytest.importorskip("resvg_py")
    icons = {"hound": {"body": RECT.format(2)}, "man-farmer": {"body": RECT.format(8)}, "what": {"body": ""}}
    made = open_icons(
        place, names, icons, {"pet": {"parent": "hound"}, "dog-face": {"parent": "pet"}}, width=4, height=4
    )
    dog, farmer = map(made.get_record, range(len(made)))
    assert (dog.id, dog.vendor, dog.key, dog.name) == ("noto-v1/1f436", "noto-v1", "1f436", "dog face")
    assert dog.keywords == ("pet", "woof") and dog.category == "animals-nature" and dog.labels["de"] == "Hundegesicht"
    assert farmer.key == "1f468-200d-1f33e" and made.unnamed == ("what",)
    pixels = made.load_rgba(0, 8)
    assert pixels.shape == (8, 8, 4) and (pixels[:, :4] == (0, 0, 255, 255)).all() and not pixels[:, 4:].any()
    assert (made.load_rgba(1, 8) == (0, 0, 255, 255)).all()


def test_icons_have_their_own_view_box(place, names):
    pytest.importorskip("resvg_py")
    made = open_icons(
        place, names, {"dog-face": {"body": RECT.format(9), "left": 8, "top": -1, "width": 2, "height": 4}}
    )
    pixels = made.load_rgba(0, 16)
    assert pixels.shape == (16, 8, 4) and not pixels[:4].any() and (pixels[4:, :4] == (0, 0, 255, 255)).all()
    assert not pixels[:, 4:].any()
    assert open_icons(place, names, {"dog-face": {"body": RECT.format(9)}}).load_rgba(0).shape == (
        16,
        16,
        4,
    )  # the default


@pytest.mark.parametrize("turn", [{"hFlip": True}, {"vFlip": True}, {"rotate": 1}, {"width": 3}])
def test_transformed_aliases_are_left_out(place, names, turn):
    aliases = {"dog-face": {"parent": "hound", **turn}, "cur": {"parent": "dog-face"}}
    made = open_icons(place, names, {"hound": {"body": ""}, "man-farmer": {"body": ""}}, aliases)
    assert made.keys == ["1f468-200d-1f33e"] and made.unnamed == ("hound",)
    if "width" not in turn:
        assert (
            open_icons(place, names, {"dog-face": {"body": "", **turn}, "man-farmer": {"body": ""}}).keys == made.keys
        )


def test_aliases_without_an_icon(place, names):
    circle = {"dog-face": {"parent": "b"}, "b": {"parent": "dog-face"}, "keycap-pound": {"parent": "nothing"}}
    assert open_icons(place, names, {"man-farmer": {"body": ""}}, circle).keys == ["1f468-200d-1f33e"]
    # An icon's own drawing takes precedence over an alias of its name.
    made = open_icons(place, names, {"dog-face": {"body": ""}, "x": {"body": ""}}, {"dog-face": {"parent": "x"}})
    assert made.icons == {"1f436": "dog-face"} and made.unnamed == ("x",)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"icons": {"dog-face": {}}}', '{"icons": {}}', '{"icons": {"x": {"body": ""}}}']
)
def test_broken_icon_set_is_refused(place, names, content):
    place("emojione", {"package/icons.json": content})
    with pytest.raises(DataError):
        open_images("emojione", names)


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
def test_invalid_icon_body_is_refused(place, names, icon):
    pytest.importorskip("resvg_py")
    with pytest.raises(ImageError, match="noto-v1, dog-face"):
        open_icons(place, names, {"dog-face": icon}).load_rgba(0, 8)


@pytest.mark.parametrize("attribute", ["href", "xlink:href"])
def test_icon_body_cannot_read_files(place, names, tmp_path, attribute):
    pytest.importorskip("resvg_py")
    (tmp_path / "private.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect width="1" height="1"/></svg>'
    )
    body = f'<image width="16" height="16" {attribute}="{tmp_path}/private.svg"/>'
    assert not open_icons(place, names, {"dog-face": {"body": body}}).load_rgba(0, 8).any()


def test_invalid_size_is_refused(place, names):
    with pytest.raises(ImageError, match="longer side"):
        open_icons(place, names, {"dog-face": {"body": ""}}).load_rgba(0, 0)
