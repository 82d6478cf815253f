"""Game sessions: the world of the model and the simulator of each player, and the host that all sessions share.

Axes: H, W pixels.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitrail.data.episodes import WORLDS
from vitrail.errors import ConfigError, ImageError, VitrailError
from vitrail.pipelines.controls import ControlMap, build_native_controls, find_idle_action, list_player_actions
from vitrail.pipelines.world import STEPS, TEMPERATURE, WorldPipeline
from vitrail.processing.image_loading import IMAGE_FORMATS, ImageSource, load_image
from vitrail.serve.play import protocol
from vitrail.serve.play.protocol import (
    ActionInfo,
    FrameMessage,
    HelloMessage,
    ResetMessage,
    StartChoice,
    StepMessage,
    ViewInfo,
)
from vitrail.serve.play.simulator_session import SimulatorSession

MAX_UPLOAD_BYTES = 16 << 20  # of an uploaded image file
MAX_UPLOAD_PIXELS = 24_000_000
DEFAULT_STEP_RATE = 15.0  # steps a second without a simulator
MODEL_VIEW = "model"

Result = TypeVar("Result")


class GameHost:
    """The state that all sessions of a server share.

    Forward passes of the model run in one thread: parallel passes would compete for the same cores.

    pipeline     the world model, or None
    world        name of the simulator, or None
    start_image  image to start from; a player may upload another
    max_players  maximum number of sessions
    """

    def __init__(
        self,
        pipeline: WorldPipeline | None = None,
        world: str | None = None,
        *,
        title: str = "",
        start_image: "ImageSource | None" = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
        max_players: int = 4,
    ):
        if pipeline is None and world is None:
            raise ConfigError("neither a model nor a simulator is given", "give a model or the name of a simulator")
        if max_players < 1:
            raise ConfigError(f"--max-players is {max_players}", "give at least 1")
        self.pipeline, self.world, self.max_players = pipeline, world, max_players
        model = None if pipeline is None else pipeline.model
        controls = None if pipeline is None else pipeline.controls
        if world is not None and (controls is None or controls.world != world):
            repeat = 1 if controls is None else controls.repeat
            controls = (
                ControlMap(world=world, repeat=repeat) if model is None else build_native_controls(model, world, repeat)
            )
        self.actions = list_player_actions(model, controls, world is not None)
        if not self.actions:
            raise ConfigError(
                "no key maps to an action of the model or of a simulator",
                "add the mapping to controls.json, or infer it with --episodes",
            )
        self.idle_action = find_idle_action(self.actions)
        self.repeat = 1 if controls is None else controls.repeat
        self.steps_per_second = (
            DEFAULT_STEP_RATE if controls is None else WORLDS[controls.world].control_rate_hz / self.repeat
        )
        self.title = title or world or MODEL_VIEW
        self.start_image = None if start_image is None else self.preprocess_image(start_image)
        self.rollout_options = {"steps": steps, "temperature": temperature}
        if pipeline is not None:
            pipeline.create_rollout(**self.rollout_options)  # refuses invalid options before a player connects
        self.sessions: set[GameSession] = set()
        self._model_executor = ThreadPoolExecutor(1, thread_name_prefix="model")

    def create_session(self) -> "GameSession":
        """Create the session of a new player."""
        if len(self.sessions) >= self.max_players:
            raise ConfigError(
                f"the maximum of {self.max_players} players is reached",
                "close another page, or start the server with a larger --max-players",
            )
        game = GameSession(self)
        self.sessions.add(game)
        return game

    def preprocess_image(self, image: ImageSource) -> Tensor:
        """Crop and resize an image to a frame of the model, uint8 (H, W, 3)."""
        if self.pipeline is None:
            raise ConfigError("a simulator does not start from an image", "start the server with a model")
        return self.pipeline.preprocess_image(load_image(image, frame=0))

    def create_simulator_session(self) -> SimulatorSession | None:
        """Create the simulator session of a player, if there is a simulator."""
        side = None if self.pipeline is None else self.pipeline.image_size[0]
        return None if self.world is None else SimulatorSession(self.world, side, self.repeat)

    def check_simulator(self) -> None:
        """Open the simulator once, because installing its environment can take minutes."""
        real = self.create_simulator_session()
        if real is not None:
            real.reset(0)
            real.close()

    async def run_on_model_thread(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run a function in the thread of the model."""
        return await asyncio.get_running_loop().run_in_executor(self._model_executor, call, *args)

    def submit_to_model_thread(self, call: Callable[[], None]) -> None:
        """Submit a function to the thread of the model without waiting. An error recurs when its result is needed."""
        self._model_executor.submit(call)

    def close(self) -> None:
        self._model_executor.shutdown(cancel_futures=True)


class GameSession:
    """The session of one player. It handles one message at a time."""

    def __init__(self, host: GameHost):
        self.host, self.start_image = host, host.start_image
        self.rollout = None if host.pipeline is None else host.pipeline.create_rollout(**host.rollout_options)
        self.simulator = host.create_simulator_session()
        self.model_frame: np.ndarray | None = None  # (H, W, 3)
        self.step_count, self.seed, self.is_running = 0, 0, False
        self.start: StartChoice = "any"

    def build_hello(self) -> HelloMessage:
        """Build the first message to the page."""
        arcade = self.host
        names = [] if self.rollout is None else [MODEL_VIEW]
        return HelloMessage(
            title=arcade.title,
            views=tuple(names if arcade.world is None else [*names, arcade.world]),
            actions=tuple(
                ActionInfo(
                    name=a.name, keys=a.keys, model=a.model_action is not None, real=a.simulator_action is not None
                )
                for a in arcade.actions
            ),
            idle=arcade.idle_action,
            rate=arcade.steps_per_second,
            starts=0 if arcade.pipeline is None else len(arcade.pipeline.start_images),
            choices=self.list_start_choices(),
            most_bytes=MAX_UPLOAD_BYTES if arcade.pipeline is not None else 0,
        )

    def list_start_choices(self) -> tuple[str, ...]:
        """List the available start choices. The first is the default."""
        own = self.host.pipeline is not None and len(self.host.pipeline.start_images)
        is_available = {"picture": self.start_image is not None, "real": self.simulator is not None, "any": own}
        return tuple(name for name, is_there in is_available.items() if is_there)

    # ---- messages -----------------------------------------------------------------------------------------------

    async def handle_message(self, text: str | None, data: bytes | None) -> bytes:
        """Handle a message of the page and return the packed frame.

        Raises a `VitrailError` if the message is refused. The session is then unchanged, or stopped if the simulator or
        the model has already advanced.
        """
        began, went = time.perf_counter(), self.is_running
        try:
            if data is not None:
                await self._reset(ResetMessage(start="picture"), await asyncio.to_thread(self._decode_upload, data))
            elif text is not None:
                asked = protocol.parse_message(text)
                await (self._reset(asked) if isinstance(asked, ResetMessage) else self._apply_action(asked))
        except VitrailError as error:
            if self.is_running or not went:
                raise
            raise type(error)(
                error.problem, f"{error.remedy}\nThe world has stopped. Reset it to start again."
            ) from error
        return self._pack_frame((time.perf_counter() - began) * 1e3)

    def _decode_upload(self, data: bytes) -> Tensor:
        if len(data) > MAX_UPLOAD_BYTES:
            raise ImageError(f"the file has {len(data):,} bytes", f"give a file of at most {MAX_UPLOAD_BYTES:,} bytes")
        try:
            image = load_image(data, frame=0, max_pixels=MAX_UPLOAD_PIXELS)
        except ImageError as error:
            usual = ", ".join(IMAGE_FORMATS[:5])
            raise ImageError(error.problem, f"give {usual}, … with at most {MAX_UPLOAD_PIXELS:,} pixels") from None
        return self.host.preprocess_image(image)

    async def _reset(self, message: ResetMessage, uploaded_image: Tensor | None = None) -> None:
        """Reset both worlds. The simulator, which may fail, is reset last unless the model starts from its frame."""
        seed = secrets.randbelow(protocol.SEED_LIMIT) if message.seed is None else message.seed
        if uploaded_image is None:
            self._check_start(message.start)
        if message.start == "real":
            await self._reset_simulator(seed)
        if self.rollout is not None:
            picture = (
                uploaded_image
                if uploaded_image is not None
                else await asyncio.to_thread(self._select_start_image, message.start, seed)
            )
            self.model_frame = await self.host.run_on_model_thread(self._start_rollout, picture, seed)
        if message.start != "real":
            await self._reset_simulator(seed)
        self.start_image = self.start_image if uploaded_image is None else uploaded_image
        self.step_count, self.seed, self.start, self.is_running = 0, seed, message.start, True

    async def _reset_simulator(self, seed: int) -> None:
        if self.simulator is not None:
            self.is_running = False
            await asyncio.to_thread(self.simulator.reset, seed)

    def _check_start(self, start: StartChoice) -> None:
        starts = 0 if self.host.pipeline is None else len(self.host.pipeline.start_images)
        if start not in self.list_start_choices() and not (isinstance(start, int) and start < starts):
            known = ", ".join([*self.list_start_choices(), *([f"0 … {starts - 1}"] if starts else [])])
            raise ConfigError(f"there is no start {start!r}", f"known: {known or 'none; upload an image first'}")

    def _select_start_image(self, start: StartChoice, seed: int) -> Tensor:
        """(H, W, 3)"""
        assert self.host.pipeline is not None
        if start == "real":
            assert self.simulator is not None
            return self.host.preprocess_image(self.simulator.frame)
        if start == "picture":
            assert self.start_image is not None
            return self.start_image
        starts = self.host.pipeline.start_images
        return starts[start if isinstance(start, int) else seed % len(starts)]

    def _start_rollout(self, start_image: Tensor, seed: int) -> np.ndarray:
        assert self.rollout is not None
        return _to_array(self.rollout.start(start_image.movedim(-1, 0)[None], seed=seed))

    async def _apply_action(self, message: StepMessage) -> None:
        if message.action >= len(self.host.actions):
            raise ConfigError(
                f"there is no action {message.action}", f"give an index of 0 … {len(self.host.actions) - 1}"
            )
        if not self.is_running:
            raise ConfigError("the world is not running", "reset it first")
        action = self.host.actions[message.action]
        self.is_running = False  # until both worlds have advanced
        if self.simulator is not None and action.simulator_action is not None:
            await asyncio.to_thread(self.simulator.step, action.simulator_action)
        if self.rollout is not None and action.model_action is not None:
            self.model_frame = await self.host.run_on_model_thread(self._predict_frame, action.model_action)
            self.host.submit_to_model_thread(self.rollout.update_memory)
        self.step_count, self.is_running = self.step_count + 1, True

    def _predict_frame(self, code: int) -> np.ndarray:
        assert self.rollout is not None
        return _to_array(self.rollout.predict_frame(torch.tensor([code])))

    def _pack_frame(self, ms: float) -> bytes:
        frames: list[tuple[ViewInfo, np.ndarray]] = []
        if self.model_frame is not None:
            frames.append((_build_view_info(MODEL_VIEW, self.model_frame), self.model_frame))
        if self.simulator is not None:
            real = self.simulator
            frames.append((_build_view_info(real.world, real.frame, reward=real.reward, ended=real.ended), real.frame))
        views, pixels = tuple(view for view, _ in frames), [frame for _, frame in frames]
        return protocol.pack_frame(
            FrameMessage(step=self.step_count, seed=self.seed, start=self.start, ms=round(ms, 1), views=views), pixels
        )

    def close(self) -> None:
        """Release the rollout and stop the simulator, which may take a moment."""
        self.rollout = None
        self.model_frame = None
        if self.simulator is not None:
            self.simulator.abandon()


def _to_array(frames: Tensor) -> np.ndarray:
    """uint8 (1, C, H, W) → (H, W, C)"""
    return frames[0].movedim(0, -1).cpu().numpy()


def _build_view_info(name: str, frame: np.ndarray, **fields: Any) -> ViewInfo:
    return ViewInfo(name=name, height=frame.shape[0], width=frame.shape[1], **fields)
