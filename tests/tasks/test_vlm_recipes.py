"""Recipes and sweeps of vision-language models: what they start from, and what they compare."""

import json

import pytest
import torch
import torch._dynamo
from PIL import Image

import vitrail
from tasks.small_vlms import ARMS, arm, shrunk, small
from vitrail import hub, recipe
from vitrail import sweep as sweeps
from vitrail.errors import ConfigError
from vitrail.models.qlip import QLIP, QLIPConfig
from vitrail.models.rows import mark_of


def test_two_stages_from_parts_of_others(atlas, monkeypatch, tmp_path):
    """QLIP's tower and a decoder of before, both as they were; first the connector alone, then the decoder too."""
    monkeypatch.setattr("vitrail.recipe.open_atlas", lambda name: atlas)
    tower = recipe.read("qlip-scenes").plain()["model"]["config"]
    tower = shrunk(tower) | {"critic": None}
    tower["codec"]["net"]["decoder"] |= {"image": 4}
    torch.manual_seed(3)
    hub.save(QLIP(QLIPConfig.read(tower)), tmp_path / "qlip")
    plain = small("vlm-codes").plain()
    hub.save(recipe._model(small("vlm-codes"), None).decoder, tmp_path / "decoder")
    plain["model"]["parts"] = {
        "tower": {"start": str(tmp_path / "qlip"), "part": "codec"},
        "decoder": {"start": str(tmp_path / "decoder"), "part": ""},
    }
    del plain["sources"]["unseen"]
    plain["sources"]["scenes"]["count"] = 6
    plain["stages"][1].update({"judge": ["scenes"], "judge_every": 2})
    made = recipe.train(recipe.Recipe.read(plain), tmp_path / "out", quiet=True)
    before, again = hub.load(tmp_path / "qlip"), hub.load(tmp_path / "out" / "final")
    for part in ("encoder", "into"):
        theirs = before.codec.get_submodule(part).state_dict()
        assert all(torch.equal(w, theirs[k]) for k, w in again.tower.get_submodule(part).state_dict().items())
    old = hub.load(tmp_path / "decoder").state_dict()
    assert not any(torch.equal(w, old[k]) for k, w in again.decoder.state_dict().items() if "weight" in k)
    rows = [json.loads(line) for line in (tmp_path / "out" / "tune" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["judge/scenes/answers"] > 0 and mark_of(made) == 1
    said = vitrail.load(tmp_path / "out" / "final", device="cpu").ask(Image.new("RGB", (9, 5)), "what?", max_new=3)
    assert isinstance(said, str)


@pytest.mark.parametrize("fusion", ["cross", "expert"])
def test_a_fused_decoder_starts_from_a_plain_one(fusion, tmp_path):
    chosen = small("mini-vlm-gated" if fusion == "cross" else "vlm-expert")
    plain = recipe._model(small("mini-vlm-llava"), None).decoder
    hub.save(plain, tmp_path)
    chosen = recipe.Recipe.read(
        chosen.with_(model=chosen.model.with_(parts={"decoder": recipe.StartPart(str(tmp_path), "")})).plain()
    )
    model = recipe._model(chosen, None)
    ids = torch.arange(7)[None]
    assert torch.equal(model.decoder(ids), plain(ids))
    if fusion == "expert":  # a copy of the weights that came, and not of those it was built with
        own = {name: p for name, p in model.decoder.fusion.named_parameters() if p.ndim == 2}
        assert all(any(torch.equal(p, q) for q in plain.parameters() if q.shape == p.shape) for p in own.values())


def test_every_variant_of_every_sweep_is_among_them():
    names = {file.stem for file in sweeps.folder().glob("vlm*.toml")}
    assert {(name, one.name) for name in names for one in sweeps.read(name).variants} == set(ARMS.values())


def test_arms_of_a_sweep_have_as_many_tokens_and_samples():
    for sweep in {sweep for sweep, _ in ARMS.values()} - {"vlm-gates"}:
        chosen = [arm(*where) for where in ARMS.values() if where[0] == sweep]
        assert len({one.stages[-1].steps * one.stages[-1].batch for one in chosen}) == 1  # of what is scored
        before = [stage.steps for one in chosen for stage in one.stages[:-1] if stage.steps > 1]  # but for one stage
        assert len(set(before)) == 1 and len(before) == len(chosen) - (sweep == "vlm")
        configs = [one.model_config() for one in chosen]
        assert {config.tokens(config.policy.cut(64, 64)) for config in configs} == {64}
        rows = {(one.settings(1).questions, one.settings(1).kinds, one.settings(1).length) for one in chosen}
        assert len(rows) == 1


@pytest.mark.parametrize(("name", "things"), [("vlm", "hundred"), ("vlm-queries", "thirty"), ("vlm-towers", "hundred")])
def test_short_trainings_and_their_exams_are_of_the_same_things(name, things):
    sweep = sweeps.read(name)
    scenes = {key: source.asked() for key, source in sweep.read_recipe(sweep.variants[0], 0).sources.items()}
    assert scenes["scenes"].names == scenes["unseen"].names == (things,)
    for words in sweep.tests.values():
        at = words.index("--names") + 1
        assert words[at] == things
        assert tuple(map(float, words[at + 2 : at + 4])) == scenes["unseen"].sizes


def test_a_sweep_starts_from_packages_and_refuses_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="tower starts from out/qlip-scenes/final"):
        sweeps.check_starts(sweeps.read("vlm"), tmp_path)
    (tmp_path / "out" / "qlip-scenes" / "final").mkdir(parents=True)
    sweeps.check_starts(sweeps.read("vlm"), tmp_path)
