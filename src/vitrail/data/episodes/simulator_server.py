"""Runs a simulator in its own interpreter, controlled through a pipe. The interpreter may lack vitrail's packages.

`python simulator_server.py worlds/NAME.py IMAGE_SIZE [OPTION …]` answers messages until its input ends. A message is
the length of a JSON header, the header, and the bytes of the arrays that the header names.
"""

import json
import os
import runpy
import sys
from typing import Any, BinaryIO

import numpy as np


def send_message(pipe: BinaryIO, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a message to a pipe."""
    names = [[name, str(array.dtype), array.shape] for name, array in arrays.items()]
    encoded = json.dumps({**header, "arrays": names}).encode()
    pipe.write(len(encoded).to_bytes(4, "little") + encoded)
    for array in arrays.values():
        pipe.write(array.tobytes())
    pipe.flush()


def receive_message(pipe: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Read the next message, or return None if the other side has closed the pipe."""
    size = pipe.read(4)
    if len(size) < 4:
        return None
    header = json.loads(pipe.read(int.from_bytes(size, "little")))
    arrays = {}
    for name, dtype, shape in header.pop("arrays"):
        bytes_ = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        data = pipe.read(bytes_)
        if len(data) < bytes_:
            return None
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return header, arrays


def main(file: str, image_size: str, *options: str) -> None:
    """Run a simulator file, and answer requests to reset and step."""
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep output that a simulator prints out of the responses
    simulator = runpy.run_path(file)["Simulator"](int(image_size), *options)
    while (message := receive_message(sys.stdin.buffer)) is not None:
        header, arrays = message
        if "seed" in header:
            observation, reward, terminated = simulator.reset(header["seed"]), 0.0, False
        else:
            action = arrays["action"]
            observation, reward, terminated = simulator.step(int(action) if action.ndim == 0 else action)
        send_message(responses, {"reward": float(reward), "ended": bool(terminated)}, observation)


if __name__ == "__main__":
    main(*sys.argv[1:])
