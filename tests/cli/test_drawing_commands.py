"""`vitrail draw`: file names."""

from vitrail.cli.drawing_commands import find_unused_png_path


def test_default_file_name_is_unused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(find_unused_png_path("A red cat, left of a dog!")) == "a-red-cat-left-of-a-dog.png"
    (tmp_path / "a-cat.png").touch()
    assert str(find_unused_png_path("a cat")) == "a-cat-2.png"
    for taken in ("a-cat-3.png", "a-cat-2-1.png"):  # the third of three images; the first of three
        (tmp_path / taken).touch()
    assert str(find_unused_png_path("a cat", count=3)) == "a-cat-3.png"
    assert str(find_unused_png_path("")) == "drawing.png" and len(find_unused_png_path("cat " * 99).stem) <= 60
