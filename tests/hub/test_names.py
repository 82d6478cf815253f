"""One name, one model: what ships goes by its name, a folder of that name by its path."""

from pathlib import Path

from vitrail.hub.configs import SHIPPED, resolve


def test_a_folder_called_as_a_model_that_ships_is_meant_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("mini") == SHIPPED / "mini"
    assert resolve("./mini").samefile(tmp_path / "mini") and resolve(Path("mini")).samefile(tmp_path / "mini")
