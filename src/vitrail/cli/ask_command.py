"""`vitrail ask`: question answering about images and videos."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.cli.drawing_commands import check_png_path, progress_bar, save_image
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.pipelines import ChatPipeline

Turn = tuple[list[str], str]  # image and video files, and the question about them


def ask_questions(
    image: str,
    /,
    *words: str,
    model: str = "mini",
    stream: Annotated[bool, Parameter(negative="")] = False,
    max_new_tokens: int | None = None,
    temperature: float | Literal["model"] = 0.0,
    seed: int | None = None,
    chat_template: str | None = None,
    num_frames: int | None = None,
    fps: float | None = None,
    heatmap: Path | None = None,
    device: DeviceOption = None,
    reduce: Literal["vispruner", "visionzip", "pool"] | None = None,
    keep: int | None = None,
) -> None:
    """Ask a model questions about images and videos.

    Example: vitrail ask scene.png "how many dogs are there?"

    Example: vitrail ask a.jpg b.jpg "what has changed?" "and what has not?" --model llava-hf/llava-1.5-7b-hf --stream

    Example: vitrail ask clip.mp4 "what happens?" --model Qwen/Qwen3-VL-2B-Instruct --fps 1

    Example: vitrail ask a.jpg "what is this?" --model llava-hf/llava-1.5-7b-hf --reduce vispruner --keep 64

    A vision-language model answers in one conversation: each question is a turn, with the files given before it. A
    unified model answers each question about its single image independently.

    Parameters
    ----------
    image
        An image or video file. Videos need Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL, LLaVA-OneVision,
        LLaVA-NeXT-Video or SmolVLM.
    words
        Questions, and further files.
    model
        A unified model or a vision-language model: mini, mini-vlm, a folder or a hub id.
    stream
        Print tokens as they are generated. Vision-language models only.
    max_new_tokens
        Maximum tokens of an answer. Default: 64 for a unified model, else 256 or what fits the context.
    temperature
        Sampling temperature. 0 is greedy. model: the sampling settings of the checkpoint's generation_config.json, for
        vision-language models.
    seed
        Seed of sampling. The same seed gives the same answers.
    chat_template
        Name of a chat template (vicuna, qwen2-vl, …), or of another template of the checkpoint, instead of its default
        one. Vision-language models only.
    num_frames
        Frames to sample from each video.
    fps
        Frames to sample from each second of a video. Default: the checkpoint's setting; otherwise 2, except 1 for
        SmolVLM, 8 frames in total for InternVL and LLaVA-NeXT-Video, and 32 for LLaVA-OneVision.
    heatmap
        A PNG to write: an occlusion map, brightest where covering the image lowers the likelihood of the answer most.
        One question to a unified model only.
    reduce
        Method that removes vision features before the connector. Needs --keep. Vision-language models only.
    keep
        Number of tokens that remain of each view of an image.
    """
    turns = _parse_turns(image, words)
    if heatmap is not None and len(turns) > 1:
        raise ConfigError(f"--heatmap supports one question, not {len(turns)}", "ask one question at a time")
    if heatmap is not None:
        check_png_path(heatmap)
        if temperature or max_new_tokens is not None:
            raise ConfigError(
                "--heatmap supports neither --temperature nor --max-new-tokens", "remove the other options"
            )
    from vitrail.connectors.feature_reduction import make_reduction_config
    from vitrail.generate.sampling import SamplingConfig
    from vitrail.pipelines.loading import is_vlm, load

    reduction = make_reduction_config(reduce, keep)
    options = {} if temperature == "model" else {"sampling": SamplingConfig(temperature=temperature, seed=seed)}
    options |= {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    if is_vlm(model):
        if heatmap is not None:
            raise ConfigError(f"--heatmap needs a unified model, not {model}", "remove --heatmap")
        _check_video_options(turns, num_frames, fps)
        pipeline = load(model, template=chat_template, device=device, reduction=reduction)
        options.setdefault("sampling", pipeline.checkpoint_sampling.replace(seed=seed))
        _print_conversation(pipeline, turns, stream, {"num_frames": num_frames, "fps": fps}, options)
        return
    pictures = sum(len(shown) for shown, _ in turns)
    if pictures > 1:
        raise ConfigError(f"{pictures} images for a model that supports one", "ask about one image at a time")
    if _count_videos(turns) or num_frames is not None or fps is not None:
        raise ConfigError(f"{model} does not support videos", "use a vision-language model such as Qwen3-VL")
    if stream or temperature == "model":
        option = "--stream" if stream else "--temperature model"
        raise ConfigError(f"unified models do not support {option}", f"remove {option}")
    pipeline = load(model, template=chat_template, device=device, reduction=reduction)
    if heatmap is None:
        print("\n".join(pipeline.ask(image, [question for _, question in turns], **options)))
        return
    with progress_bar() as progress:
        text, occlusion_map = pipeline.ask_with_occlusion_map(image, turns[0][1], progress=progress)
    print(text)
    save_image(occlusion_map, heatmap)


def _count_videos(turns: list[Turn]) -> int:
    from vitrail.models.video_inputs import is_video

    return sum(is_video(name) for shown, _ in turns for name in shown)


def _check_video_options(turns: list[Turn], num_frames: int | None, fps: float | None) -> None:
    """Check the options of videos before a model is loaded."""
    if num_frames is not None and fps is not None:
        raise ConfigError("--num-frames and --fps exclude each other", "give one of the two")
    if (num_frames, fps) != (None, None) and not _count_videos(turns):
        raise ConfigError("--num-frames and --fps need a video, but none is given", "remove them")


def _parse_turns(picture: str, words: tuple[str, ...]) -> list[Turn]:
    """Return each question with the image and video files given before it."""
    from vitrail.data.formats.media_folders import VIDEO_SUFFIXES
    from vitrail.search.image_index import list_image_suffixes

    suffixes, pictures = list_image_suffixes() | VIDEO_SUFFIXES, [picture]
    turns: list[Turn] = []
    for word in words:
        if _is_media_file(word, suffixes):
            pictures.append(word)
        else:
            turns.append((pictures, word))
            pictures = []
    if not turns or pictures:
        raise ConfigError("the question is missing", 'add it after the image: "what is this?"')
    return turns


def _is_media_file(word: str, endings: set[str]) -> bool:
    """Whether an argument is an image or video file. A missing file with a known extension is not a question."""
    path = Path(word)
    try:
        return (path.suffix.lower() in endings and " " not in word) or path.is_file()
    except (OSError, ValueError):  # too long or invalid for a file name
        return False


def _print_conversation(
    pipeline: "ChatPipeline", turns: list[Turn], stream: bool, video_options: dict[str, Any], options: dict[str, Any]
) -> None:
    """Generate and print the answer of each turn."""
    messages: list[Any] = []
    for pictures, question in turns:
        messages.append(
            pipeline.build_message(
                pictures, question, **(video_options if _count_videos([(pictures, question)]) else {})
            )
        )
        if not stream:
            reply = pipeline.chat(messages, **options)
            print(reply)
        else:
            reply = ""
            try:
                for piece in pipeline.stream_chat(messages, **options):
                    piece = piece if reply else piece.lstrip()
                    print(piece, end="", flush=True)
                    reply += piece
            finally:
                if reply:
                    print()
        messages.append({"role": "assistant", "content": reply.strip()})
