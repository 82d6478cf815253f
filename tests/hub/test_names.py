"""Names of bundled models take precedence over folders with the same name."""

from pathlib import Path

from vitrail.hub.checkpoint_info import BUNDLED_MODELS_FOLDER, resolve_path


def test_bundled_name_takes_precedence_over_folder(tmp_path, monkeypatch):
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_path("mini") == BUNDLED_MODELS_FOLDER / "mini"
    assert resolve_path("./mini").samefile(tmp_path / "mini") and resolve_path(Path("mini")).samefile(tmp_path / "mini")
