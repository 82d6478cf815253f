import numpy as np
import pytest

from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, WORDS, Font, draw_word, draw_word_sprites, find_fonts
from vitrail.errors import TextError


def test_a_bare_machine_has_several_fonts_that_differ():
    pictures = {font.name: draw_word("forest", font) for font in BUILT_IN_FONTS}
    assert len(pictures) == 5
    shapes = {p.shape for p in pictures.values()}
    assert len(shapes) >= 4
    ink = {name: (p[..., 0][p[..., 3] > 128] < 128).mean() for name, p in pictures.items()}
    assert ink["aileron-bold"] > 1.2 * ink["aileron"]
    assert pictures["aileron-narrow"].shape[1] < pictures["aileron"].shape[1] < pictures["aileron-wide"].shape[1]


def test_letters_are_dark_with_a_white_outline():
    for font in BUILT_IN_FONTS:
        picture = draw_word("jagged Qf", font)
        assert not picture[[0, -1], :, 3].any() and not picture[:, [0, -1], 3].any()
        solid = picture[picture[..., 3] == 255][:, :3].mean(-1)
        assert (solid < 60).mean() > 0.2 and (solid > 230).mean() > 0.1


def test_a_word_is_one_concept_in_every_font():
    sprites = list(draw_word_sprites(["cat", "Cat"], BUILT_IN_FONTS[:2]))
    assert [s.id for s in sprites] == [f"letters/{f.name}/{t}" for f in BUILT_IN_FONTS[:2] for t in ("cat", "Cat")]
    assert {s.kind for s in sprites} == {"word"} and {s.name for s in sprites} == {"cat", "Cat"}
    assert not np.array_equal(sprites[0].rgba, sprites[1].rgba)
    assert len(set(WORDS)) == len(WORDS) > 100


def test_fonts_of_the_system_are_found_and_broken_files_passed_over(tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    assert find_fonts([tmp_path]) == []
    for font in find_fonts()[:3]:
        assert font.file is not None and draw_word("sun", font)[..., 3].any()


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(TextError, match="has no visible letters"):
        draw_word("  ", BUILT_IN_FONTS[0])
    with pytest.raises(TextError, match="has no visible letters"):
        draw_word("a\nb", BUILT_IN_FONTS[0])
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    with pytest.raises(TextError, match=r"broken\.ttf"):
        draw_word("a", Font("broken", tmp_path / "broken.ttf"))
