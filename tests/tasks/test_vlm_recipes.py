"""VLM recipes and sweeps: initial weights and compared settings."""

import json

import pytest
import torch
import torch._dynamo
from PIL import Image

import vitrail
from tasks.small_vlms import ARMS, arm, shrunk, small
from vitrail import hub, recipe
from vitrail.errors import ConfigError
from vitrail.models.qlip_model import QLIP, QLIPConfig
from vitrail.recipe import sweep as sweeps


def test_two_stages_from_parts_of_other_runs(atlas, monkeypatch, tmp_path):
    """Start from QLIP's tower and a decoder; train the connector first, then the decoder too."""
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: atlas)
    tower = recipe.load_recipe("qlip-scenes").to_dict()["model"]["config"]
    tower = shrunk(tower) | {"critic": None}
    tower["codec"]["net"]["decoder"] |= {"image_size": 4}
    torch.manual_seed(3)
    hub.save(QLIP(QLIPConfig.from_dict(tower)), tmp_path / "qlip")
    plain = small("vlm-codes").to_dict()
    hub.save(recipe.build_model(small("vlm-codes"), None).decoder, tmp_path / "decoder")
    plain["model"]["parts"] = {
        "tower": {"checkpoint": str(tmp_path / "qlip"), "part": "codec"},
        "decoder": {"checkpoint": str(tmp_path / "decoder"), "part": ""},
    }
    del plain["sources"]["unseen"]
    plain["sources"]["scenes"]["num_samples"] = 6
    plain["stages"][1].update({"validate": ["scenes"], "validate_every": 2})
    made = recipe.train_recipe(recipe.Recipe.from_dict(plain), tmp_path / "out", quiet=True)
    before, again = hub.load(tmp_path / "qlip"), hub.load(tmp_path / "out" / "final")
    for part in ("encoder", "pre_quant_proj"):
        theirs = before.codec.get_submodule(part).state_dict()
        assert all(torch.equal(w, theirs[k]) for k, w in again.tower.get_submodule(part).state_dict().items())
    old = hub.load(tmp_path / "decoder").state_dict()
    assert not any(torch.equal(w, old[k]) for k, w in again.decoder.state_dict().items() if "weight" in k)
    rows = [json.loads(line) for line in (tmp_path / "out" / "tune" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["validation/scenes/answers"] > 0 and made.config.image_token_id == 1
    output = vitrail.load(tmp_path / "out" / "final", device="cpu").ask(
        Image.new("RGB", (9, 5)), "what?", max_new_tokens=3
    )
    assert isinstance(output, str)


@pytest.mark.parametrize("fusion", ["cross", "expert"])
def test_fused_decoder_starts_from_a_plain_one(fusion, tmp_path):
    chosen = small("mini-vlm-gated" if fusion == "cross" else "vlm-expert")
    plain = recipe.build_model(small("mini-vlm-llava"), None).decoder
    hub.save(plain, tmp_path)
    chosen = recipe.Recipe.from_dict(
        chosen.replace(
            model=chosen.model.replace(parts={"decoder": recipe.PretrainedPartConfig(str(tmp_path), "")})
        ).to_dict()
    )
    model = recipe.build_model(chosen, None)
    ids = torch.arange(7)[None]
    assert torch.equal(model.decoder(ids), plain(ids))
    if fusion == "expert":  # a copy of the loaded weights, not of the initial ones
        own = {name: p for name, p in model.decoder.fusion.named_parameters() if p.ndim == 2}
        assert all(any(torch.equal(p, q) for q in plain.parameters() if q.shape == p.shape) for p in own.values())


def test_every_sweep_variant_is_covered():
    names = {file.stem for file in sweeps.sweep_folder().glob("vlm*.toml")} | {"systems"}
    assert {(name, one.name) for name in names for one in sweeps.load_sweep(name).variants} == set(ARMS.values())


def test_sweep_arms_have_equal_tokens_and_samples():
    for sweep in {sweep for sweep, _ in ARMS.values()} - {"vlm-gates", "systems"}:
        chosen = [arm(*where) for where in ARMS.values() if where[0] == sweep]
        assert len({one.stages[-1].steps * one.stages[-1].batch_size for one in chosen}) == 1  # of the scored data
        before = [stage.steps for one in chosen for stage in one.stages[:-1] if stage.steps > 1]  # except one stage
        assert len(set(before)) == 1 and len(before) == len(chosen) - (sweep == "vlm")
        configs = [one.build_model_config() for one in chosen]
        assert {config.count_tokens(config.policy.layout(64, 64)) for config in configs} == {64}
        rows = {
            (one.task_settings(1).num_questions, one.task_settings(1).question_kinds, one.task_settings(1).max_length)
            for one in chosen
        }
        assert len(rows) == 1


@pytest.mark.parametrize(("name", "things"), [("vlm", "hundred"), ("vlm-queries", "thirty"), ("vlm-towers", "hundred")])
def test_short_runs_and_their_validation_share_settings(name, things):
    sweep = sweeps.load_sweep(name)
    scenes = {key: source.scene_config() for key, source in sweep.load_recipe(sweep.variants[0], 0).sources.items()}
    assert scenes["scenes"].things == scenes["unseen"].things == (things,)
    for words in sweep.tests.values():
        at = words.index("--things") + 1
        assert words[at] == things
        assert tuple(map(float, words[at + 2 : at + 4])) == scenes["unseen"].sizes


def test_sweep_starts_from_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="of tower does not exist"):
        sweeps.check_checkpoints(sweeps.load_sweep("vlm"), tmp_path)
    (tmp_path / "out" / "qlip-scenes" / "final").mkdir(parents=True)
    sweeps.check_checkpoints(sweeps.load_sweep("vlm"), tmp_path)
