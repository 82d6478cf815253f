"""A world model ready to hand: saved and loaded with what belongs to it, and what cannot be is refused."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
import worlds
from serve.play.arcades import world_pipeline
from vitrail import hub
from vitrail.cli.drawing_commands import package_model
from vitrail.data.episodes import RecordConfig, record_episodes
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.generate.rollout import Rollout, RolloutConfig
from vitrail.generate.sampling import SamplingConfig
from vitrail.pipelines.controls import compute_action_nll, find_idle_action, infer_controls, list_player_actions
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.serve.play import ControlMap, WorldPipeline


def test_folder_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    made = world_pipeline(controls=ControlMap(world="pocket", codes={"left": 3, "up": 0}, repeat=2))
    made.save(tmp_path)
    again = vitrail.load(tmp_path, device="cpu")
    assert isinstance(again, WorldPipeline)
    assert torch.equal(again.start_images, made.start_images) and again.controls == made.controls
    with Image.open(tmp_path / "starts.png") as strip:
        assert strip.size == (3 * worlds.SIDE, worlds.SIDE)
    assert again.generate_frames([1, 2], seed=0)[1].tobytes() == made.generate_frames([1, 2], seed=0)[1].tobytes()


def test_saving_removes_stale_files(tmp_path):
    world_pipeline(controls=ControlMap(world="pocket", codes={"left": 3})).save(tmp_path)
    world_pipeline(starts=0).save(tmp_path)
    again = vitrail.load(tmp_path, device="cpu")
    assert len(again.start_images) == 0 and again.controls is None


def test_invalid_path_is_refused():
    with pytest.raises(CheckpointError, match="cannot be opened") as refused:
        vitrail.load("n" * 5000)
    assert len(str(refused.value)) < 300


def test_folder_with_weights_only(tmp_path):
    hub.save(world_pipeline().model, tmp_path)
    made = vitrail.load(tmp_path, device="cpu")
    assert len(made.start_images) == 0 and made.controls is None
    with pytest.raises(ConfigError, match="no start images"):
        made.create_env()
    with pytest.raises(ConfigError, match="no start images"):
        made.generate_frames([0])
    picture = Image.new("RGB", (40, 30), "teal")
    assert len(made.generate_frames([0, 5, 7], picture, seed=1)) == 3
    with pytest.raises(ConfigError, match="template"):
        vitrail.load(tmp_path, template="vicuna")
    with pytest.raises(ConfigError, match="unified"):  # what asks for a model that answers is told so
        UnifiedPipeline.load(tmp_path, device="cpu")


@pytest.mark.parametrize("halves", [True, False])
def test_half_precision_needs_cpu_support(tmp_path, monkeypatch, halves):
    world_pipeline().save(tmp_path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: halves, raising=False)
    kinds = {weight.dtype for weight in WorldPipeline.load(tmp_path, device="cpu").model.parameters()}
    assert kinds == {torch.bfloat16 if halves else torch.float32}
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")  # as in another version of torch
    assert WorldPipeline.load(tmp_path, device="cpu").generate_frames([1], seed=0)


def test_generated_frames_equal_a_rollout():
    made = world_pipeline()
    world = Rollout(made.model, RolloutConfig(steps=3, sampling=SamplingConfig(temperature=0.8)))
    world.start(made.start_images[:1].movedim(-1, 1), seed=4)
    wanted = [world.step(torch.tensor([action]))[0].movedim(0, -1).numpy() for action in (7, 0, 2)]
    found = made.generate_frames([7, 0, 2], seed=4, steps=3, temperature=0.8)
    assert all(np.array_equal(a, b) for a, b in zip(map(np.asarray, found), wanted, strict=True))


def test_tokenize_round_trip():
    made = world_pipeline()
    pictures = [Image.new("RGB", (9, 31), "red"), made.start_images[0].numpy()]
    ids = made.tokenize(pictures)
    assert ids.shape == (2, 2, 2) and torch.equal(made.tokenize(pictures[1]), ids[1:])
    assert [one.size for one in made.detokenize(ids)] == [(worlds.SIDE, worlds.SIDE)] * 2
    with pytest.raises(ConfigError, match="list of images is empty"):
        made.tokenize([])


def test_environment():
    pytest.importorskip("gymnasium")
    made = world_pipeline()
    env = made.create_env(max_episode_steps=2)
    seen, result = env.reset(seed=0)
    assert result["start"] in range(3) and env.observation_space.contains(seen)
    assert [env.step(a)[3] for a in (0, 7)] == [False, True]
    assert made.create_vector_env(2, steps=1).reset(seed=0)[0].shape == (2, worlds.SIDE, worlds.SIDE, 3)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("controls.json", '{"world": "pocket", "codes": {"left": 9}}', "maps 'left' to action 9"),
        ("controls.json", '{"world": "pocket", "codes": {"fly": 1}}', "no control 'fly'"),
        ("controls.json", '{"world": "moon"}', "no world 'moon'"),
        ("controls.json", '{"world": "pusht"}', "continuous actions"),
        ("controls.json", '{"world": "pocket", "repeat": 0}', "repeat is 0"),
        ("controls.json", f'{{"world": "pocket", "repeat": {10**400}}}', "1 … 100"),
        ("controls.json", '{"world": 1, "x": 2}', "controls.json"),
        ("controls.json", "[", "JSON"),
        ("starts.png", "no picture", "not an image"),
    ],
)
def test_invalid_folder_is_refused(tmp_path, file, text, message):
    world_pipeline().save(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(vitrail.errors.VitrailError, match=message):
        vitrail.load(tmp_path, device="cpu")


def test_start_images_of_another_size_are_refused(tmp_path):
    world_pipeline().save(tmp_path)
    Image.new("RGB", (20, 8)).save(tmp_path / "starts.png")
    with pytest.raises(CheckpointError, match="8 × 20"):
        WorldPipeline.load(tmp_path, device="cpu")
    with pytest.raises(DataError, match="start images are"):
        WorldPipeline(world_pipeline().model, np.zeros((1, 9, 9, 3), np.uint8))


# ---- controls ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("pocket")
    record_episodes(RecordConfig(world="pocket", steps=24, image_size=worlds.SIDE), folder, episodes=20, quiet=True)
    return folder


def test_controls_are_inferred_from_episodes(recorded, monkeypatch):
    from vitrail.data.episodes import EpisodesConfig, EpisodeSource
    from vitrail.pipelines.controls import LENGTH

    windows = EpisodeSource(EpisodesConfig(folder=str(recorded), window_length=LENGTH, stride=LENGTH, split="all"))
    done = {window["frames"].tobytes(): int(window["actions"][-1]) for window in windows}

    def surprise(model, video):  # of a model that knows: the walker's controls in another order
        last = [done[one.movedim(1, -1).contiguous().numpy().tobytes()] for one in video]
        return torch.stack([(torch.arange(8) != (control + 3) % 8).float() for control in last])

    monkeypatch.setattr("vitrail.pipelines.controls.compute_action_nll", surprise)
    result = infer_controls(world_pipeline().model, str(recorded))
    assert result.codes == {"left": 3, "right": 4, "up": 5, "down": 6}


def test_action_nll_equals_the_dynamics():
    model, video = world_pipeline().model, torch.randint(0, 256, (3, 5, 3, worlds.SIDE, worlds.SIDE), dtype=torch.uint8)
    found = compute_action_nll(model, video)
    pixels = model.codec.to_pixels(video)
    with torch.no_grad():
        ids, actions = model.encode_frames(pixels), model.infer_actions(pixels)
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        hidden[:, -1] = True
        for action in range(8):
            actions[:, -1] = action
            missed = model.dynamics.compute_code_losses(ids, model.dynamics.shift_actions(actions), hidden)[:, -1].mean(
                (1, 2)
            )
            torch.testing.assert_close(found[:, action], missed, rtol=1e-4, atol=1e-5)


def test_start_images_come_from_the_test_split(recorded):
    from vitrail.data.episodes import EpisodeDataset

    made = world_pipeline(starts=0).with_episodes(recorded)
    episodes = EpisodeDataset(recorded)
    assert made.controls.world == "pocket" and set(made.controls.codes) == {"left", "right", "up", "down"}
    assert torch.equal(made.start_images, torch.from_numpy(np.stack([episodes[n].frames[0] for n in (9, 19)])))


def test_packaged_world_is_quantized_with_start_images(recorded, tmp_path, monkeypatch, capsys):
    world_pipeline(starts=0).save(tmp_path / "trained")
    monkeypatch.setattr("vitrail.hub.checkpoint_info.BUNDLED_MODELS_FOLDER", tmp_path / "weights")
    package_model(str(tmp_path / "trained"), out=tmp_path / "weights" / "mini-world", episodes=recorded)
    size, logits, ids = capsys.readouterr().out.splitlines()
    ours = vitrail.load("mini-world", device="cpu")
    assert ours.controls.world == "pocket" and len(ours.start_images) == 2
    stored = load_file(tmp_path / "weights" / "mini-world" / "model.safetensors")
    assert any(tensor.dtype == torch.int8 for tensor in stored.values()) and "MB, from" in size
    assert "largest difference" in logits and "changed" in ids
    with pytest.raises(ConfigError, match="already contains a model"):
        package_model(str(tmp_path / "trained"), out=tmp_path / "weights" / "mini-world", episodes=recorded)
    with pytest.raises(ConfigError, match="world models go together"):
        package_model(str(tmp_path / "trained"), out=tmp_path / "other")
    with pytest.raises(ConfigError, match="not a vision-language model"):
        package_model(str(tmp_path / "trained"), out=tmp_path / "other", episodes=recorded, base="stories15M")


@pytest.mark.parametrize(("steps", "count"), [(12, 3), (4, 10)])
def test_few_or_short_episodes_are_refused(tmp_path, steps, count):
    pytest.importorskip("av")
    record_episodes(
        RecordConfig(world="pocket", steps=steps, image_size=worlds.SIDE), tmp_path, episodes=count, quiet=True
    )
    with pytest.raises(DataError, match=f"{count} episodes, the longest with {steps + 1} frames") as refused:
        world_pipeline().with_episodes(tmp_path)
    assert "vitrail data make" in refused.value.remedy


def test_episodes_of_another_size_are_refused(tmp_path):
    pytest.importorskip("av")
    record_episodes(RecordConfig(world="pocket", steps=12, image_size=16), tmp_path, episodes=10, quiet=True)
    with pytest.raises(ConfigError, match="16 × 16"):
        infer_controls(world_pipeline().model, str(tmp_path))


def test_player_actions_have_keys():
    model = world_pipeline().model
    pocket = list_player_actions(model, ControlMap(world="pocket", codes={"left": 2}), has_simulator=False)
    assert [(a.name, a.keys, a.model_action, a.simulator_action) for a in pocket[7:]] == [
        ("8", ("Digit8",), 7, None),
        ("left", ("ArrowLeft",), 2, None),
    ]
    alone = list_player_actions(None, ControlMap(world="coinrun"), has_simulator=True)
    assert ("left up", ("ArrowLeft", "ArrowUp"), None, 2) in alone
    assert not {"D", "A", "W"} & {a.name for a in alone}  # keys of other games
    assert alone[find_idle_action(alone)].simulator_action == 4 and find_idle_action(pocket) is None
