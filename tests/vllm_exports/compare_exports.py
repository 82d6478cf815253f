"""Compare the greedy tokens of exported models in vLLM with ours: `make vllm`.

Random checkpoints in the shapes of released models are loaded, exported, and given to vLLM, which runs in an
environment of its own. Ids must be equal, except from a token on whose two largest logits differ by less than 1e-3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hub.shrunk_checkpoints import DEFAULT_MODELS, MODELS, find_family, find_row, write_checkpoint
from vitrail import hub
from vitrail.backbones.decoder import Decoder
from vitrail.generate.sampling import GREEDY
from vitrail.generate.text_generation import generate_texts
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.chat_layout import prepend_bos
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.chat import append_ids
from vitrail.stream.packing import pad_streams

HERE = Path(__file__).parent
TIE = 1e-3  # logits that are closer than this may be ordered differently
MAX_LENGTH, MAX_NEW_TOKENS = 2048, 12
QUESTIONS = ("what is this?", "how many?")
IMAGE_SIZES = ((41, 97), (80, 64), (30, 30))  # height, width


class VLLMError(Exception):
    """vLLM cannot serve a folder."""


class Request(NamedTuple):
    """A prompt for vLLM, and what our model generates.

    ids         prompt with one placeholder for each image
    images      image files
    prompt_ids  prompt with all image tokens
    generated   greedy ids
    logits      (N, V) before each of them
    """

    ids: list[int]
    images: list[str]
    prompt_ids: list[int]
    generated: list[int]
    logits: Tensor


def write_images(folder: Path) -> list[str]:
    """Write random images of unequal sizes."""
    files = []
    for number, size in enumerate(IMAGE_SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        files.append(str(folder / f"{number}.png"))
        Image.fromarray(pixels).save(files[-1])
    return files


@torch.no_grad()
def generate_text(folder: Path) -> list[Request]:
    """Generate with a language model."""
    model: Decoder = hub.load(folder)
    requests = []
    for seed, length in enumerate((1, 7, 40)):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        (output,) = generate_texts(model, [ids], max_new_tokens=MAX_NEW_TOKENS, sampling=GREEDY, stop_ids=())
        logits = model(torch.tensor([ids + output.ids]))[0, len(ids) - 1 : -1]
        requests.append(Request(ids, [], ids, output.ids, logits))
    return requests


@torch.no_grad()
def generate_answers(folder: Path, files: list[str], most_images: int) -> list[Request]:
    """Generate with a vision-language model: without, with one and with several images, up to `most_images`."""
    pipeline = ChatPipeline.load(folder, device="cpu")
    requests = []
    for shown, question in (([], QUESTIONS[0]), (files[:1], QUESTIONS[0]), (files[1:][:most_images], QUESTIONS[1])):
        messages = [pipeline.build_message(shown, question)]
        stream, images, _ = pipeline.build_prompt(messages)
        chat = pipeline.chat_template.encode(messages, pipeline.tokenizer, add_generation_prompt=True)
        ids = prepend_bos(chat, pipeline.tokenizer, pipeline.model.config.image_token_id).ids
        (output,) = generate_from_streams(
            pipeline.model, [stream], images, max_new_tokens=MAX_NEW_TOKENS, sampling=GREEDY, stop_ids=()
        )
        hidden = pipeline.model.forward_hidden(pad_streams([append_ids(stream, output.ids)]), images)
        logits = pipeline.model.decoder.compute_logits(hidden[0, len(stream) - 1 : -1])
        requests.append(Request(ids, shown, stream.ids.tolist(), output.ids, logits))
    return requests


def run_vllm(python: str, folder: Path, requests: list[Request], scratch: Path) -> list[dict[str, list[int]]]:
    """Generate with vLLM, in its environment."""
    prompts = [{"ids": request.ids, "images": request.images} for request in requests]
    asked = {"folder": str(folder), "prompts": prompts, "max_length": MAX_LENGTH, "max_new_tokens": MAX_NEW_TOKENS}
    (scratch / "request.json").write_text(json.dumps(asked))
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [python, str(HERE / "run_vllm.py"), str(scratch / "request.json"), str(scratch / "answer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VLLMError(f"vLLM fails on {folder}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads((scratch / "answer.json").read_text())


def find_difference(request: Request, answer: dict[str, list[int]]) -> str | None:
    """Return what differs, or None: only ties may."""
    if answer["prompt_ids"] != request.prompt_ids:
        return f"the prompt has {len(answer['prompt_ids'])} tokens in vLLM, {len(request.prompt_ids)} here"
    for n, (ours, theirs) in enumerate(zip(request.generated, answer["ids"], strict=True)):
        if ours != theirs:
            gap = float(request.logits[n, ours] - request.logits[n, theirs])
            return (
                None if abs(gap) < TIE else f"token {n} is {theirs} in vLLM, {ours} here; their logits differ by {gap}"
            )
    return None


def compare_model(name: str, python: str) -> dict[str, Any]:
    """Export a random checkpoint in the shape of a released model and compare its greedy tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        row = find_row(name)
        released = write_checkpoint(name, scratch / "released", row.vllm_patch)
        model = hub.load(released)
        exported = scratch / "exported"
        hub.to_hf(model, exported, tokenizer=hub.load_tokenizer(released))
        is_text = isinstance(model, Decoder)
        requests = (
            generate_text(exported) if is_text else generate_answers(exported, write_images(scratch), row.vllm_images)
        )
        if row.vllm_inserts:
            placeholder = model.config.image_token_id
            requests = [one._replace(ids=[id for id in one.ids if id != placeholder]) for one in requests]
        answers = run_vllm(python, exported, requests, scratch)
    found = [find_difference(request, answer) for request, answer in zip(requests, answers, strict=True)]
    equal = sum(
        ours == theirs
        for request, answer in zip(requests, answers, strict=True)
        for ours, theirs in zip(request.generated, answer["ids"], strict=True)
    )
    total = sum(len(request.generated) for request in requests)
    return {"family": find_family(name), "tokens": total, "equal": equal, "differences": [x for x in found if x]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="released models; default: all that vLLM serves")
    parser.add_argument("--python", required=True, help="python of the environment of vLLM")
    given = parser.parse_args()
    failed = []
    for name in given.models or [name for name, row in (MODELS | DEFAULT_MODELS).items() if row.is_served]:
        try:
            row = compare_model(name, given.python)
        except VLLMError as error:
            failed.append(name)
            sys.stdout.write(f"{find_family(name):16} {name:45} {error}\n")
            continue
        state = "; ".join(row["differences"]) or "equal up to ties"
        failed += [name] if row["differences"] else []
        sys.stdout.write(f"{row['family']:16} {name:45} {row['equal']:3} of {row['tokens']} tokens equal: {state}\n")
        sys.stdout.flush()
    sys.exit(f"vLLM and Vitrail differ: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
