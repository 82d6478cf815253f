"""Runs a simulator in an interpreter of its own, which has its packages and perhaps not ours: asked through a pipe.

`python player.py worlds/NAME.py SIDE [OPTION …]` answers messages until its input ends. A message is the length of a
JSON text, that text, and behind it the bytes of the arrays that it names.
"""

import json
import os
import runpy
import sys
from typing import Any, BinaryIO

import numpy as np


def send(pipe: BinaryIO, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    names = [[name, str(array.dtype), array.shape] for name, array in arrays.items()]
    head = json.dumps({**about, "arrays": names}).encode()
    pipe.write(len(head).to_bytes(4, "little") + head)
    for array in arrays.values():
        pipe.write(array.tobytes())
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next message, or None where the other side has gone."""
    size = pipe.read(4)
    if len(size) < 4:
        return None
    about = json.loads(pipe.read(int.from_bytes(size, "little")))
    arrays = {}
    for name, dtype, shape in about.pop("arrays"):
        bytes_ = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        data = pipe.read(bytes_)
        if len(data) < bytes_:
            return None
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return about, arrays


def main(file: str, side: str, *options: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a simulator prints must not get between the answers
    simulator = runpy.run_path(file)["Simulator"](int(side), *options)
    while (asked := receive(sys.stdin.buffer)) is not None:
        about, arrays = asked
        if "seed" in about:
            seen, reward, ended = simulator.reset(about["seed"]), 0.0, False
        else:
            action = arrays["action"]
            seen, reward, ended = simulator.step(int(action) if action.ndim == 0 else action)
        send(answers, {"reward": float(reward), "ended": bool(ended)}, seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
