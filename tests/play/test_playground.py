"""A world model ready to hand: saved and loaded with what belongs to it, and what cannot be is refused."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
import worlds
from play.arcades import playground
from vitrail import hub
from vitrail.cli.studio import ship
from vitrail.data.episodes import RecordConfig, record
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.generate.sampling import Sampling
from vitrail.play import Controls, Playground
from vitrail.play.controls import idle, learn_controls, offered, surprise
from vitrail.studio import Studio


def test_a_folder_is_loaded_with_what_belongs_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    made = playground(controls=Controls(world="pocket", codes={"left": 3, "up": 0}, repeat=2))
    made.save(tmp_path)
    again = vitrail.load(tmp_path, device="cpu")
    assert isinstance(again, Playground)
    assert torch.equal(again.starts, made.starts) and again.controls == made.controls
    with Image.open(tmp_path / "starts.png") as strip:
        assert strip.size == (3 * worlds.SIDE, worlds.SIDE)
    assert again.roll([1, 2], seed=0)[1].tobytes() == made.roll([1, 2], seed=0)[1].tobytes()


def test_what_an_older_world_left_in_a_folder_is_gone(tmp_path):
    playground(controls=Controls(world="pocket", codes={"left": 3})).save(tmp_path)
    playground(starts=0).save(tmp_path)
    again = vitrail.load(tmp_path, device="cpu")
    assert len(again.starts) == 0 and again.controls is None


def test_a_name_that_is_no_path_is_refused():
    with pytest.raises(CheckpointError, match="cannot be opened") as refused:
        vitrail.load("n" * 5000)
    assert len(str(refused.value)) < 300


def test_a_folder_of_weights_alone_will_do(tmp_path):
    hub.save(playground().model, tmp_path)
    made = vitrail.load(tmp_path, device="cpu")
    assert len(made.starts) == 0 and made.controls is None
    with pytest.raises(ConfigError, match="start from"):
        made.env()
    with pytest.raises(ConfigError, match="start from"):
        made.roll([0])
    picture = Image.new("RGB", (40, 30), "teal")
    assert len(made.roll([0, 5, 7], picture, seed=1)) == 3
    with pytest.raises(ConfigError, match="template"):
        vitrail.load(tmp_path, template="vicuna")
    with pytest.raises(ConfigError, match="unified"):  # what asks for a model that answers is told so
        Studio.load(tmp_path, device="cpu")


@pytest.mark.parametrize("halves", [True, False])
def test_half_precision_is_for_those_who_multiply_it(tmp_path, monkeypatch, halves):
    playground().save(tmp_path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: halves, raising=False)
    kinds = {weight.dtype for weight in Playground.load(tmp_path, device="cpu").model.parameters()}
    assert kinds == {torch.bfloat16 if halves else torch.float32}
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")  # as in another version of torch
    assert Playground.load(tmp_path, device="cpu").roll([1], seed=0)


def test_rolls_are_those_of_a_rollout():
    made = playground()
    world = Rollout(made.model, Rolling(steps=3, sampling=Sampling(temperature=0.8)))
    world.start(made.starts[:1].movedim(-1, 1), seed=4)
    wanted = [world.step(torch.tensor([action]))[0].movedim(0, -1).numpy() for action in (7, 0, 2)]
    found = made.roll([7, 0, 2], seed=4, steps=3, temperature=0.8)
    assert all(np.array_equal(a, b) for a, b in zip(map(np.asarray, found), wanted, strict=True))


def test_pictures_become_codes_and_pictures():
    made = playground()
    pictures = [Image.new("RGB", (9, 31), "red"), made.starts[0].numpy()]
    ids = made.tokenize(pictures)
    assert ids.shape == (2, 2, 2) and torch.equal(made.tokenize(pictures[1]), ids[1:])
    assert [one.size for one in made.detokenize(ids)] == [(worlds.SIDE, worlds.SIDE)] * 2
    with pytest.raises(ConfigError, match="no picture"):
        made.tokenize([])


def test_an_environment():
    pytest.importorskip("gymnasium")
    made = playground()
    env = made.env(limit=2)
    seen, told = env.reset(seed=0)
    assert told["start"] in range(3) and env.observation_space.contains(seen)
    assert [env.step(a)[3] for a in (0, 7)] == [False, True]
    assert made.vector_env(2, steps=1).reset(seed=0)[0].shape == (2, worlds.SIDE, worlds.SIDE, 3)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("controls.json", '{"world": "pocket", "codes": {"left": 9}}', "controls.json: 'left' is action 9"),
        ("controls.json", '{"world": "pocket", "codes": {"fly": 1}}', "no control 'fly'"),
        ("controls.json", '{"world": "moon"}', "no world 'moon'"),
        ("controls.json", '{"world": "pusht"}', "dials"),
        ("controls.json", '{"world": "pocket", "repeat": 0}', "0 steps"),
        ("controls.json", f'{{"world": "pocket", "repeat": {10**400}}}', "1 … 100"),
        ("controls.json", '{"world": 1, "x": 2}', "controls.json"),
        ("controls.json", "[", "JSON"),
        ("starts.png", "no picture", "not a picture"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, file, text, says):
    playground().save(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(vitrail.errors.VitrailError, match=says):
        vitrail.load(tmp_path, device="cpu")


def test_starts_of_another_size_are_refused(tmp_path):
    playground().save(tmp_path)
    Image.new("RGB", (20, 8)).save(tmp_path / "starts.png")
    with pytest.raises(CheckpointError, match="8 × 20"):
        Playground.load(tmp_path, device="cpu")
    with pytest.raises(DataError, match="cannot start"):
        Playground(playground().model, np.zeros((1, 9, 9, 3), np.uint8))


# ---- controls ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("pocket")
    record(RecordConfig(world="pocket", steps=24, side=worlds.SIDE), folder, episodes=20, quiet=True)
    return folder


def test_what_controls_are_to_a_model_is_learned_from_episodes(recorded, monkeypatch):
    from vitrail.data.episodes import EpisodesConfig, EpisodeSource
    from vitrail.play.controls import LENGTH

    windows = EpisodeSource(EpisodesConfig(folder=str(recorded), length=LENGTH, stride=LENGTH, part="all"))
    done = {window["frames"].tobytes(): int(window["actions"][-1]) for window in windows}

    def surprise(model, video):  # of a model that knows: the walker's controls in another order
        last = [done[one.movedim(1, -1).contiguous().numpy().tobytes()] for one in video]
        return torch.stack([(torch.arange(8) != (control + 3) % 8).float() for control in last])

    monkeypatch.setattr("vitrail.play.controls.surprise", surprise)
    told = learn_controls(playground().model, str(recorded))
    assert told.codes == {"left": 3, "right": 4, "up": 5, "down": 6}


def test_how_likely_a_frame_is_under_each_action_is_what_the_dynamics_say():
    model, video = playground().model, torch.randint(0, 256, (3, 5, 3, worlds.SIDE, worlds.SIDE), dtype=torch.uint8)
    found = surprise(model, video)
    pixels = model.codec.pixels(video)
    with torch.no_grad():
        ids, actions = model.look(pixels), model.infer(pixels)
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        hidden[:, -1] = True
        for action in range(8):
            actions[:, -1] = action
            missed = model.dynamics.missed(ids, model.dynamics.led(actions), hidden)[:, -1].mean((1, 2))
            torch.testing.assert_close(found[:, action], missed, rtol=1e-4, atol=1e-5)


def test_episodes_give_starts_that_were_not_trained_on(recorded):
    from vitrail.data.episodes import Episodes

    made = playground(starts=0).with_episodes(recorded)
    episodes = Episodes(recorded)
    assert made.controls.world == "pocket" and set(made.controls.codes) == {"left", "right", "up", "down"}
    assert torch.equal(made.starts, torch.from_numpy(np.stack([episodes[n].frames[0] for n in (9, 19)])))


def test_shipped_it_is_small_and_starts_where_episodes_do(recorded, tmp_path, monkeypatch, capsys):
    playground(starts=0).save(tmp_path / "trained")
    monkeypatch.setattr("vitrail.hub.configs.SHIPPED", tmp_path / "weights")
    ship(str(tmp_path / "trained"), out=tmp_path / "weights" / "mini-world", episodes=recorded)
    size, logits, ids = capsys.readouterr().out.splitlines()
    ours = vitrail.load("mini-world", device="cpu")
    assert ours.controls.world == "pocket" and len(ours.starts) == 2
    stored = load_file(tmp_path / "weights" / "mini-world" / "model.safetensors")
    assert any(tensor.dtype == torch.int8 for tensor in stored.values()) and "MB, from" in size
    assert "differ by at most" in logits and "another id" in ids
    with pytest.raises(ConfigError, match="holds a model already"):
        ship(str(tmp_path / "trained"), out=tmp_path / "weights" / "mini-world", episodes=recorded)
    with pytest.raises(ConfigError, match="go with a world model"):
        ship(str(tmp_path / "trained"), out=tmp_path / "other")
    with pytest.raises(ConfigError, match="stands on no other"):
        ship(str(tmp_path / "trained"), out=tmp_path / "other", episodes=recorded, base="stories15M")


@pytest.mark.parametrize(("steps", "count"), [(12, 3), (4, 10)])
def test_episodes_that_are_too_few_or_too_short_are_refused(tmp_path, steps, count):
    pytest.importorskip("av")
    record(RecordConfig(world="pocket", steps=steps, side=worlds.SIDE), tmp_path, episodes=count, quiet=True)
    with pytest.raises(DataError, match=f"{count} episodes, the longest of {steps + 1} frames") as refused:
        playground().with_episodes(tmp_path)
    assert "vitrail data make" in refused.value.remedy


def test_episodes_of_another_size_are_refused(tmp_path):
    pytest.importorskip("av")
    record(RecordConfig(world="pocket", steps=12, side=16), tmp_path, episodes=10, quiet=True)
    with pytest.raises(ConfigError, match="16 × 16"):
        learn_controls(playground().model, str(tmp_path))


def test_actions_are_offered_on_keys():
    model = playground().model
    pocket = offered(model, Controls(world="pocket", codes={"left": 2}), simulator=False)
    assert [(a.name, a.keys, a.code, a.control) for a in pocket[7:]] == [
        ("8", ("Digit8",), 7, None),
        ("left", ("ArrowLeft",), 2, None),
    ]
    alone = offered(None, Controls(world="coinrun"), simulator=True)
    assert ("left up", ("ArrowLeft", "ArrowUp"), None, 2) in alone
    assert not {"D", "A", "W"} & {a.name for a in alone}  # keys of other games
    assert alone[idle(alone)].control == 4 and idle(pocket) is None
