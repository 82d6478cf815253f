"""Fine-tuning at the shapes of Qwen3-VL-2B and LLaVA-1.5-7B: speed against transformers + PEFT, and memory.

    python perf/finetune.py --out results.json           # needs a CUDA device, transformers and peft
    python perf/finetune.py --out results.json --tiny    # the same script with shrunk models, on the CPU
    python perf/finetune.py --out results.json --only "qwen3-vl-2b lora" --seconds 60

Samples have the text lengths of The Cauldron (see `packed.py`) and one image each, of IMAGE_SIZES. The released
config.json gives the sizes of the models; weights are random, in bf16, and shared by both sides. Both sides take the
same samples in the same steps, with gradient checkpointing, the same LoRA layers and the same optimizer: AdamW with
float32 master copies. Inputs of all steps are prepared before the first step.

| side | rows |
|---|---|
| `ours` | the trainer of `vitrail finetune`: packed rows of ROW_LENGTH tokens |
| `padded` | transformers + PEFT with SDPA: rows in random order, padded to the longest of their micro-batch |
| `grouped` | the same with the samples of each step sorted by length, which transformers calls group_by_length |
| `flash` | the same as `grouped` with FlashAttention 2, if it is installed |

`tokens_per_s` counts text and image tokens without padding. `first_loss` is that of the first step, before any update:
both sides must agree. `state_gib` is allocated before the first step, `peak_gib` is the peak of all steps;
`estimate_gib` is what `--dry-run` prints. The QLoRA case runs with at most MEMORY_LIMIT_GIB of reserved memory.
Figures are written after each side of each case.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from packed import QUESTION_LENGTH, Conversation, sample_conversations
from PIL import Image
from record import ROOT, make_parser, write_record
from timing import CUDA, DEVICE, describe_error, limit_time, read_peak_gib, synchronize
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from vlm import share_weights

from vitrail.hub import load_tokenizer
from vitrail.models.vlm import VLM
from vitrail.nn.blockwise_quantization import count_parameters
from vitrail.recipe.finetuning import SOURCE, FinetuneConfig, FinetunePlan
from vitrail.stream.packing import IGNORE_INDEX
from vitrail.tasks.chat_task import ChatTask, EncodedConversation
from vitrail.training.lora import add_lora, quantize_base
from vitrail.training.optimizer import Optimizer
from vitrail.training.task import Batch
from vitrail.training.trainer import Trainer

sys.path.append(str(ROOT / "tests"))
from hub.shrunk_checkpoints import write_config

GIB, ROW_LENGTH, WARMUP, MEMORY_LIMIT_GIB = 2**30, 2048, 2, 12
IMAGE_SIZES = ((640, 480), (480, 640), (640, 427), (500, 375), (1024, 768))  # of COCO photographs, and of a larger one
PEFT_LAYERS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
MEASURED = (
    "vitrail.training.trainer",
    "vitrail.training.lora",
    "vitrail.training.optimizer",
    "vitrail.nn.blockwise_quantization",
    "vitrail.tasks.chat_task",
    "vitrail.recipe.finetune_memory",
    "vitrail.nn.attention_backends",
)


class Case(NamedTuple):
    """A model and a method, with the samples of a micro-batch of both sides."""

    model: str
    family: str
    method: str
    micro_batch: int
    peer_micro_batch: int


QWEN, LLAVA = ("Qwen/Qwen3-VL-2B-Instruct", "qwen3_vl"), ("llava-hf/llava-1.5-7b-hf", "llava")
CASES = {
    "qwen3-vl-2b lora": Case(*QWEN, "lora", 32, 8),
    "llava-1.5-7b lora": Case(*LLAVA, "lora", 32, 8),
    "llava-1.5-7b qlora": Case(*LLAVA, "qlora", 8, 8),
    "qwen3-vl-2b full": Case(*QWEN, "full", 32, 8),
    "llava-1.5-7b full": Case(*LLAVA, "full", 32, 8),
}


class Size(NamedTuple):
    samples: int  # in a step
    steps: int
    row_length: int
    image_sizes: tuple[tuple[int, int], ...]
    shrink: bool


FULL_SIZE = Size(32, 5, ROW_LENGTH, IMAGE_SIZES, shrink=False)
TINY_SIZE = Size(4, 3, 512, ((64, 48), (48, 64)), shrink=True)

# ---- data -----------------------------------------------------------------------------------------------------------


def write_data(folder: Path, size: Size, tokenizer: Any) -> Path:
    """Write a LLaVA JSON with the lengths of the histogram, and its images."""
    rng, files = np.random.default_rng(0), []
    for i, (width, height) in enumerate(size.image_sizes * (1 if size.shrink else 3)):
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        files.append(f"{i}.jpg")
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / files[-1])
    word = find_word(tokenizer)
    conversations = sample_conversations(size.samples * size.steps, size.row_length // 2)
    rows = [make_row(i, conversation, files[i % len(files)], word) for i, conversation in enumerate(conversations)]
    (folder / "data.json").write_text(json.dumps(rows))
    return folder / "data.json"


def find_word(tokenizer: Any) -> str:
    """Return a word that is one token wherever it stands in a text."""
    words = ("a", "is", "red", "blue", "cube", "ball", "what", "how", "many", "this")
    return next(word for word in words if len(tokenizer.encode(f" {word}" * 50)) in (50, 51))


def make_row(number: int, conversation: Conversation, image: str, word: str) -> dict[str, Any]:
    turns = []
    for turn in range(conversation.turns):
        question = " ".join([word] * QUESTION_LENGTH)
        turns.append({"from": "human", "value": f"<image>\n{question}" if turn == 0 else question})
        turns.append({"from": "gpt", "value": " ".join([word] * conversation.answer)})
    return {"id": str(number), "image": image, "conversations": turns}


# ---- ours -----------------------------------------------------------------------------------------------------------


class StepTimer(Trainer):
    """Trainer without saves that records when each step starts. The trainer itself synchronizes once in a step."""

    starts: list[float]
    losses: list[float]

    def _train_step(self, batches: Any) -> dict[str, float]:
        self.starts.append(time.perf_counter())
        values = super()._train_step(batches)
        self.losses.append(values["loss"])
        return values

    def _tensor_groups(self) -> dict[str, Any]:
        return {}

    def _save_checkpoint(self) -> None:
        synchronize()
        self.starts.append(time.perf_counter())

    def _finalize_model(self) -> torch.nn.Module:
        return self.task.model


def build_ours(case: Case, plan: FinetunePlan, hf_config: Any) -> VLM:
    reference = build_reference(hf_config)
    model = share_weights(case.family, reference)
    if not CUDA:  # tensors that both models have are one
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    del reference
    if plan.recipe.lora is not None:
        add_lora(model, plan.recipe.lora, torch.float32)
        if case.method == "qlora":
            quantize_base(model, DEVICE)
    return model


def measure_ours(
    case: Case, plan: FinetunePlan, hf_config: Any, batches: Sequence[Batch], tokens: Sequence[int]
) -> dict[str, float]:
    model = build_ours(case, plan, hf_config)
    task, prepared = plan.make_task(model), iter(batches)
    task.collate = lambda _: next(prepared)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, limit_memory(case.method == "qlora"):
        trainer = StepTimer(
            plan.stage, task, {SOURCE: plan.source}, Path(folder), device=DEVICE, loggers=(), quiet=True
        )
        trainer.starts, trainer.losses = [], []
        state = read_allocated_gib()
        trainer.train()
    seconds = trainer.starts[-1] - trainer.starts[WARMUP]
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / GIB
    return summarize(seconds, tokens, trainer.losses, state, weights)


def summarize(
    seconds: float, tokens: Sequence[int], losses: Sequence[float], state: float, weights: float
) -> dict[str, float]:
    figures = {
        "tokens_per_s": sum(tokens[WARMUP:]) / seconds,
        "step_ms": 1000 * seconds / (len(tokens) - WARMUP),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "weights_gib": weights,
        "state_gib": state,
        "peak_gib": read_peak_gib(),
    }
    return figures | ({"reserved_gib": torch.cuda.max_memory_reserved() / GIB} if CUDA else {})


def read_allocated_gib() -> float:
    return torch.cuda.memory_allocated() / GIB if CUDA else 0.0


def free_memory() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def limit_memory(is_limited: bool) -> Iterator[None]:
    """Count the peak of a block, and limit its reserved memory."""
    free_memory()
    total = torch.cuda.get_device_properties(0).total_memory if CUDA else 0
    if CUDA and is_limited:
        torch.cuda.set_per_process_memory_fraction(MEMORY_LIMIT_GIB * GIB / total)
    try:
        yield
    finally:
        if CUDA:
            torch.cuda.set_per_process_memory_fraction(1.0)


# ---- transformers + PEFT --------------------------------------------------------------------------------------------


def build_reference(hf_config: Any, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    with torch.device(DEVICE):
        dtype = torch.bfloat16 if CUDA else torch.float32
        return AutoModelForImageTextToText.from_config(hf_config, dtype=dtype, attn_implementation=attention)


def pad_conversations(
    case: Case, conversations: Sequence[EncodedConversation], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the inputs of transformers: rows padded to the longest."""
    streams = [one.stream for one in conversations]
    ids = [stream.ids for stream in streams]
    labels = [stream.ids.where(stream.loss_mask, IGNORE_INDEX) for stream in streams]
    images = [one.images for one in conversations if one.images is not None]
    inputs = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "pixel_values": torch.cat([one.pixels for one in images]).to(torch.bfloat16 if CUDA else torch.float32),
    }
    if case.family == "qwen3_vl":
        inputs["image_grid_thw"] = torch.tensor([[g.t, g.h, g.w] for one in images for g in one.layouts])
        if "mm_token_type_ids" in names:
            kinds = [(stream.kinds == 1).long() for stream in streams]
            inputs["mm_token_type_ids"] = pad_sequence(kinds, batch_first=True)
    return inputs


def measure_peer(
    case: Case,
    plan: FinetunePlan,
    hf_config: Any,
    steps: Sequence[Sequence[EncodedConversation]],
    tokens: Sequence[int],
    is_grouped: bool,
    attention: str = "sdpa",
) -> dict[str, float]:
    import inspect

    model = build_reference(hf_config, attention)
    names = list(inspect.signature(type(model).forward).parameters)
    if plan.recipe.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora = plan.recipe.lora
        settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=PEFT_LAYERS)
        # Adapters in bf16 with float32 master copies, as ours; float32 adapters would need casts in each layer.
        model = get_peft_model(model, settings, autocast_adapter_dtype=False)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = []
    for conversations in steps:
        ordered = sorted(conversations, key=lambda one: len(one.stream)) if is_grouped else list(conversations)
        groups = [ordered[i : i + case.peer_micro_batch] for i in range(0, len(ordered), case.peer_micro_batch)]
        batches.append([pad_conversations(case, group, names) for group in groups])
    with limit_memory(False):
        optimizer, losses, start = Optimizer(model, plan.stage.optim), [], 0.0
        state = read_allocated_gib()
        for step, micro_batches in enumerate(batches):
            if step == WARMUP:
                synchronize()
                start = time.perf_counter()
            lr_factor = plan.stage.schedule.lr_factor(step, plan.stage.steps)
            losses.append(run_peer_step(model, optimizer, micro_batches, lr_factor))
        synchronize()
    weights = sum(p.nbytes for p in model.parameters()) / GIB
    return summarize(time.perf_counter() - start, tokens, losses, state, weights)


def run_peer_step(
    model: Any, optimizer: Optimizer, micro_batches: Sequence[dict[str, Tensor]], lr_factor: float
) -> float:
    """Gradients of micro-batches are summed in the dtype of the weights, as torch does."""
    counts = [int((one["labels"][:, 1:] != IGNORE_INDEX).sum()) for one in micro_batches]
    total = torch.zeros((), device=DEVICE)
    for inputs, count in zip(micro_batches, counts, strict=True):
        on_device = {name: value.to(DEVICE, non_blocking=True) for name, value in inputs.items()}
        loss = model(**on_device, use_cache=False).loss * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    optimizer.clip_grad_norm()
    optimizer.step(lr_factor)
    optimizer.zero_grad()
    return total.item()


# ---- cases ----------------------------------------------------------------------------------------------------------


class Preparation:
    """The files of a model and its encoded conversations, for all its cases."""

    def __init__(self, case: Case, size: Size, folder: Path):
        from transformers import AutoConfig

        self.size, self.folder = size, folder
        write_config(case.model, folder, shrink=size.shrink)
        self.data = write_data(folder, size, load_tokenizer(folder))
        self.hf_config = AutoConfig.from_pretrained(folder)
        self._encoded: dict[str, EncodedConversation] = {}

    def make_plan(self, case: Case) -> FinetunePlan:
        size = self.size
        config = FinetuneConfig(
            model=str(self.folder),
            data=str(self.data),
            method=case.method,  # type: ignore[arg-type]
            batch_size=size.samples,
            gradient_accumulation_steps=max(1, size.samples // case.micro_batch),
            steps=size.steps,
            max_length=size.row_length,
            gradient_checkpointing=True,
            save_every=size.steps,
        )
        return FinetunePlan(config, DEVICE)

    def make_batches(self, plan: FinetunePlan) -> tuple[list[Batch], list[list[EncodedConversation]]]:
        """Return all micro-batches of the training, and the conversations of each step."""
        task, samples = plan.make_task(plan.model), []
        encode: Callable[[Any], EncodedConversation] = ChatTask.encode_conversation.__get__(task)

        def encode_once(sample: Any) -> EncodedConversation:
            if sample.id not in self._encoded:
                self._encoded[sample.id] = encode(sample)
            samples.append(sample.id)
            return self._encoded[sample.id]

        task.encode_conversation = encode_once  # type: ignore[method-assign]
        stage = plan.stage
        batches = plan.read_micro_batches(task, stage.steps * stage.gradient_accumulation_steps)
        conversations = [self._encoded[name] for name in samples]
        count = self.size.samples
        return batches, [conversations[i : i + count] for i in range(0, len(conversations), count)]


def measure_case(
    case: Case, preparation: Preparation, save: Callable[[dict[str, Any]], None], seconds: float, deadline: float
) -> None:
    """Measure both sides of a case, and save the figures after each. No side starts after the deadline."""
    start, plan = time.perf_counter(), preparation.make_plan(case)
    batches, steps = preparation.make_batches(plan)
    tokens = [sum(len(one.stream) for one in conversations) for conversations in steps]
    lengths = [len(one.stream) for conversations in steps for one in conversations]
    result: dict[str, Any] = {
        "tokens_a_sample": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "filled": sum(tokens) / sum(batch["ids"].numel() for batch in batches),
        "estimate_gib": {name: size / GIB for name, size in plan.estimate_memory(batches).items()},
    }
    result["parameters"] = count_parameters(plan.model)
    print(f"prepared in {time.perf_counter() - start:.0f} s: {json.dumps(result)}", flush=True)
    hf_config, sides = preparation.hf_config, {}
    sides["ours"] = lambda: measure_ours(case, plan, hf_config, batches, tokens)
    if case.method != "qlora":
        sides["grouped"] = lambda: measure_peer(case, plan, hf_config, steps, tokens, True)
        sides["padded"] = lambda: measure_peer(case, plan, hf_config, steps, tokens, False)
        if has_flash_attention():
            sides["flash"] = lambda: measure_peer(case, plan, hf_config, steps, tokens, True, "flash_attention_2")
    for name, measure in sides.items():
        start = time.perf_counter()
        try:
            with limit_time(max(1.0, min(seconds, deadline - start))):
                result[name] = measure()
        except Exception as error:  # the other figures are kept
            result[name] = describe_error(error)
        free_memory()
        print(f"{name}, {time.perf_counter() - start:.0f} s: {json.dumps(result[name])}", flush=True)
        save(compare(result))


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """Add the ratios of the sides that were measured."""
    ours = result.get("ours")
    if isinstance(ours, dict):
        peers = [
            row for name, row in result.items() if name in ("padded", "grouped", "flash") and isinstance(row, dict)
        ]
        if peers:
            result["speedup"] = ours["tokens_per_s"] / max(row["tokens_per_s"] for row in peers)
        if CUDA:
            estimate, activations = sum(result["estimate_gib"].values()), result["estimate_gib"]["activations"]
            result["estimate_over_peak"] = estimate / ours["peak_gib"]
            result["peak_over_weights"] = ours["peak_gib"] / ours["weights_gib"]
            result["peak_without_activations_over_weights"] = (ours["peak_gib"] - activations) / ours["weights_gib"]
    return result


def has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="cases")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one side of a case")
    parser.add_argument("--total-seconds", type=float, default=330.0, help="time limit of all cases")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    size, result, preparations = TINY_SIZE if arguments.tiny else FULL_SIZE, {}, {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or CASES:
            case = CASES[name]
            if arguments.tiny:
                case = case._replace(micro_batch=2, peer_micro_batch=2)

            def save(figures: dict[str, Any], name: str = name) -> None:
                result[name] = figures
                write_record(arguments.out, result, MEASURED)

            if time.perf_counter() - start > arguments.total_seconds:
                save({"error": "no time was left"})
                continue
            print(f"{name}, after {time.perf_counter() - start:.0f} s", flush=True)
            if case.family not in preparations:
                preparations[case.family] = Preparation(case, size, Path(folder) / case.family)
            measure_case(case, preparations[case.family], save, arguments.seconds, start + arguments.total_seconds)
    for name, figures in result.items():
        if "speedup" in figures:
            print(f"{name}: {figures['speedup']:.2f} times the tokens per second of transformers + PEFT")
        if "estimate_over_peak" in figures:
            print(
                f"{name}: peak {figures['ours']['peak_gib']:.1f} GiB, "
                f"estimate {figures['estimate_over_peak']:.2f} of it, "
                f"{figures['peak_without_activations_over_weights']:.2f} times the weights without activations"
            )


if __name__ == "__main__":
    main()
