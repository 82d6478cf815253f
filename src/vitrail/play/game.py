"""What is played at a place, and one player's part in it: the model's world and, beside it, the simulator's.

H, W pixels
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
from vitrail.play import messages
from vitrail.play.controls import Controls, idle, offered, own_controls
from vitrail.play.messages import Frame, Hello, Offer, Reset, Start, Step, View
from vitrail.play.playground import STEPS, TEMPERATURE, Playground
from vitrail.play.real import Real
from vitrail.processing.images import FORMATS, Source, load_image

MOST_BYTES = 16 << 20  # of a picture's file
MOST_PIXELS = 24_000_000
RATE = 15.0  # steps a second, where no simulator says
MODEL = "model"

Made = TypeVar("Made")


class Arcade:
    """What all players at one place share. Each has a world of their own; passes of the model are made one after the
    other, in one thread, since they would only share the cores.

    playground  the model, if there is one
    world       the simulator beside it, or alone, if there is one
    picture     to start from; each player may bring another
    players     that there is room for
    """

    def __init__(
        self,
        playground: Playground | None = None,
        world: str | None = None,
        *,
        title: str = "",
        picture: "Source | None" = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
        players: int = 4,
    ):
        if playground is None and world is None:
            raise ConfigError("there is nothing to play", "give a model, or a simulator's name")
        if players < 1:
            raise ConfigError(f"room for {players} players", "give at least one")
        self.playground, self.world, self.room = playground, world, players
        model = None if playground is None else playground.model
        controls = None if playground is None else playground.controls
        if world is not None and (controls is None or controls.world != world):
            repeat = 1 if controls is None else controls.repeat
            controls = Controls(world=world, repeat=repeat) if model is None else own_controls(model, world, repeat)
        self.actions = offered(model, controls, world is not None)
        if not self.actions:
            raise ConfigError(
                "there is nothing to do: no key stands for anything that the model or a simulator knows",
                "say in controls.json which actions the controls are, or let --episodes tell",
            )
        self.idle = idle(self.actions)
        self.repeat = 1 if controls is None else controls.repeat
        self.rate = RATE if controls is None else WORLDS[controls.world].rate / self.repeat
        self.title = title or world or MODEL
        self.picture = None if picture is None else self.fit(picture)
        self.how = {"steps": steps, "temperature": temperature}
        if playground is not None:
            playground.rollout(**self.how)  # what cannot be is said before anyone comes
        self.players: set[Game] = set()
        self._thinker = ThreadPoolExecutor(1, thread_name_prefix="model")

    def enter(self) -> "Game":
        if len(self.players) >= self.room:
            raise ConfigError(
                f"{len(self.players)} are playing, and there is room for {self.room}",
                "close another page, or start with more --players",
            )
        game = Game(self)
        self.players.add(game)
        return game

    def fit(self, picture: Source) -> Tensor:
        if self.playground is None:
            raise ConfigError("only a model starts from a picture", "there is a simulator alone")
        return self.playground.fit(load_image(picture, frame=0))

    def simulator(self) -> Real | None:
        side = None if self.playground is None else self.playground.size[0]
        return None if self.world is None else Real(self.world, side, self.repeat)

    def check(self) -> None:
        """Open the simulator once: making its environment may take a while, and no player should wait for it."""
        real = self.simulator()
        if real is not None:
            real.begin(0)
            real.close()

    async def think(self, call: Callable[..., Made], *given: Any) -> Made:
        """In the one thread of the model."""
        return await asyncio.get_running_loop().run_in_executor(self._thinker, call, *given)

    def afterwards(self, call: Callable[[], None]) -> None:
        """In the same thread, while the frame is on its way. Nobody waits for it; what fails here fails again where it
        is needed."""
        self._thinker.submit(call)

    def close(self) -> None:
        self._thinker.shutdown(cancel_futures=True)


class Game:
    """One player's. Messages come one after the other."""

    def __init__(self, arcade: Arcade):
        self.arcade, self.picture = arcade, arcade.picture
        self.rollout = None if arcade.playground is None else arcade.playground.rollout(**arcade.how)
        self.real = arcade.simulator()
        self.imagined: np.ndarray | None = None  # (H, W, 3)
        self.steps, self.seed, self.begun = 0, 0, False
        self.start: Start = "any"

    def hello(self) -> Hello:
        arcade = self.arcade
        names = [] if self.rollout is None else [MODEL]
        return Hello(
            title=arcade.title,
            views=tuple(names if arcade.world is None else [*names, arcade.world]),
            actions=tuple(
                Offer(name=a.name, keys=a.keys, model=a.code is not None, real=a.control is not None)
                for a in arcade.actions
            ),
            idle=arcade.idle,
            rate=arcade.rate,
            starts=0 if arcade.playground is None else len(arcade.playground.starts),
            choices=self.choices(),
            most_bytes=MOST_BYTES if arcade.playground is not None else 0,
        )

    def choices(self) -> tuple[str, ...]:
        """The first is where one starts unless one asks for another."""
        own = self.arcade.playground is not None and len(self.arcade.playground.starts)
        there = {"picture": self.picture is not None, "real": self.real is not None, "any": own}
        return tuple(name for name, is_there in there.items() if is_there)

    # ---- what is asked ------------------------------------------------------------------------------------------

    async def answer(self, text: str | None, data: bytes | None) -> bytes:
        """A message of the page → a frame. A `VitrailError` says why not, and leaves all as it was; or, where a part
        had been done by then, a world that has stopped."""
        began, went = time.perf_counter(), self.begun
        try:
            if data is not None:
                await self._begin(Reset(start="picture"), await asyncio.to_thread(self._read, data))
            elif text is not None:
                asked = messages.read(text)
                await (self._begin(asked) if isinstance(asked, Reset) else self._act(asked))
        except VitrailError as error:
            if self.begun or not went:
                raise
            raise type(error)(
                error.problem, f"{error.remedy}\nThe world has stopped: reset it to begin anew."
            ) from error
        return self._show((time.perf_counter() - began) * 1e3)

    def _read(self, data: bytes) -> Tensor:
        if len(data) > MOST_BYTES:
            raise ImageError(f"a file of {len(data):,} bytes", f"give one of {MOST_BYTES:,} at most")
        try:
            image = load_image(data, frame=0, max_pixels=MOST_PIXELS)
        except ImageError as error:
            usual = ", ".join(FORMATS[:5])
            raise ImageError(error.problem, f"give {usual}, … of {MOST_PIXELS:,} pixels at most") from None
        return self.arcade.fit(image)

    async def _begin(self, asked: Reset, brought: Tensor | None = None) -> None:
        """The simulator comes last unless the model starts as it does: it is what may fail."""
        seed = secrets.randbelow(messages.SEEDS) if asked.seed is None else asked.seed
        if brought is None:
            self._check(asked.start)
        if asked.start == "real":
            await self._begin_real(seed)
        if self.rollout is not None:
            picture = brought if brought is not None else await asyncio.to_thread(self._picture, asked.start, seed)
            self.imagined = await self.arcade.think(self._dream, picture, seed)
        if asked.start != "real":
            await self._begin_real(seed)
        self.picture = self.picture if brought is None else brought
        self.steps, self.seed, self.start, self.begun = 0, seed, asked.start, True

    async def _begin_real(self, seed: int) -> None:
        if self.real is not None:
            self.begun = False
            await asyncio.to_thread(self.real.begin, seed)

    def _check(self, start: Start) -> None:
        starts = 0 if self.arcade.playground is None else len(self.arcade.playground.starts)
        if start not in self.choices() and not (isinstance(start, int) and start < starts):
            known = ", ".join([*self.choices(), *([f"0 … {starts - 1}"] if starts else [])])
            raise ConfigError(f"nothing here starts from {start!r}", f"known: {known or 'send a picture first'}")

    def _picture(self, start: Start, seed: int) -> Tensor:
        """(H, W, 3)"""
        assert self.arcade.playground is not None
        if start == "real":
            assert self.real is not None
            return self.arcade.fit(self.real.frame)
        if start == "picture":
            assert self.picture is not None
            return self.picture
        starts = self.arcade.playground.starts
        return starts[start if isinstance(start, int) else seed % len(starts)]

    def _dream(self, picture: Tensor, seed: int) -> np.ndarray:
        assert self.rollout is not None
        return _shown(self.rollout.start(picture.movedim(-1, 0)[None], seed=seed))

    async def _act(self, asked: Step) -> None:
        if asked.action >= len(self.arcade.actions):
            raise ConfigError(
                f"there is no action {asked.action}", f"there are {len(self.arcade.actions)}, counted from 0"
            )
        if not self.begun:
            raise ConfigError("a world that has not begun cannot go on", "reset it first")
        action = self.arcade.actions[asked.action]
        self.begun = False  # until both have moved
        if self.real is not None and action.control is not None:
            await asyncio.to_thread(self.real.step, action.control)
        if self.rollout is not None and action.code is not None:
            self.imagined = await self.arcade.think(self._step, action.code)
            self.arcade.afterwards(self.rollout.settle)
        self.steps, self.begun = self.steps + 1, True

    def _step(self, code: int) -> np.ndarray:
        assert self.rollout is not None
        return _shown(self.rollout.draw(torch.tensor([code])))

    def _show(self, ms: float) -> bytes:
        seen: list[tuple[View, np.ndarray]] = []
        if self.imagined is not None:
            seen.append((_view(MODEL, self.imagined), self.imagined))
        if self.real is not None:
            real = self.real
            seen.append((_view(real.world, real.frame, reward=real.reward, ended=real.ended), real.frame))
        views, pixels = tuple(view for view, _ in seen), [frame for _, frame in seen]
        return messages.pack(
            Frame(step=self.steps, seed=self.seed, start=self.start, ms=round(ms, 1), views=views), pixels
        )

    def close(self) -> None:
        """Free what the player had; a simulator may take a moment to leave."""
        self.rollout = self.imagined = None
        if self.real is not None:
            self.real.leave()


def _shown(frames: Tensor) -> np.ndarray:
    """uint8 (1, C, H, W) → (H, W, C)"""
    return frames[0].movedim(0, -1).cpu().numpy()


def _view(name: str, frame: np.ndarray, **known: Any) -> View:
    return View(name=name, height=frame.shape[0], width=frame.shape[1], **known)
